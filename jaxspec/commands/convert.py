"""`jaxspec convert SRC --target T --to LAYOUT --out DIR`: a drafter in another public layout."""

from __future__ import annotations

import argparse

_LAYOUTS = ("zlab", "specforge", "deepspec", "eagle3", "speculators")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="drafter folder or org/name")
    parser.add_argument("--target", required=True, metavar="SOURCE", help="the target that the drafter was made for")
    parser.add_argument("--to", required=True, choices=_LAYOUTS, help="layout to write")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write; replaced if it exists")


def main(args: argparse.Namespace) -> int:
    from jaxspec.checkpoints.convert import convert

    found = convert(args.source, args.target, args.to, args.out)
    print(f"wrote {found.directory}: {found.drafter.method}, layout {found.layout}, {len(found.names)} tensors")
    return 0
