"""`jaxspec quantization`: tau of a drafter under a target as it is, and under its int8 form."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, metavar="SOURCE", help="as for `jaxspec generate`")
    parser.add_argument("--drafter", required=True, metavar="SOURCE", help="as for `jaxspec generate`")
    parser.add_argument("--file", required=True, type=Path, metavar="JSONL", help='one object a line with "prompt"')
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="default %(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default %(default)s")
    parser.add_argument("--max-context", type=int, default=1024, metavar="N", help="default %(default)s")
    parser.add_argument("--num-slots", type=int, default=8, metavar="N", help="default %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    from jaxspec.evaluation.prompts import read_prompts
    from jaxspec.evaluation.quantization import compare

    report = compare(
        args.target,
        args.drafter,
        read_prompts(args.file, "--file"),
        dtype=args.dtype,
        max_new_tokens=args.max_new_tokens,
        max_context=args.max_context,
        num_slots=args.num_slots,
    )
    print(json.dumps(report.as_dict()) if args.json else "\n".join(report.lines()))
    return 0
