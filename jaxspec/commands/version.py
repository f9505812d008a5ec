"""`jaxspec version`."""

from __future__ import annotations

import argparse
import json

from jaxspec.commands.doctor import versions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    found = versions()
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print(" ".join(f"{name} {found[name]}" for name in ("jaxspec", "python", "jax")))
    return 0
