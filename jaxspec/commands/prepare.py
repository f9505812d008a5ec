"""`jaxspec prepare INPUT... --target T --out FILE.npz`: conversations into a token file for data.path."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from jaxspec.commands.common import at_least, template_argument
from jaxspec.errors import DataError, problem


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "inputs",
        nargs="+",
        type=Path,
        metavar="INPUT",
        help=".jsonl, .json or .parquet: messages, ShareGPT, Alpaca, or prompt and answer",
    )
    parser.add_argument("--target", required=True, metavar="SOURCE", help="the target whose tokenizer is used")
    parser.add_argument(
        "--out", required=True, type=Path, metavar="FILE.npz", help="token file; FILE.npz.json says what is in it"
    )
    template_argument(parser)
    parser.add_argument("--max-length", type=int, default=4096, metavar="N", help="cut after N tokens (%(default)s)")
    parser.add_argument(
        "--min-loss-tokens", type=int, default=2, metavar="N", help="leave out rows with fewer supervised (%(default)s)"
    )
    parser.add_argument(
        "--max-empty-fraction",
        type=float,
        default=0.5,
        metavar="F",
        help="stop where more of the rows have nothing to train on (%(default)s)",
    )
    parser.add_argument(
        "--eval", nargs="+", type=Path, default=[], metavar="FILE", help="prompts that must not be in the data"
    )
    parser.add_argument(
        "--overlap", choices=("drop", "refuse"), default="drop", help="rows that have them (%(default)s)"
    )
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print N rows, what is supervised marked")
    parser.add_argument("--force", action="store_true", help="replace the output")
    parser.add_argument("--json", action="store_true", help="print the account as JSON")


def main(args: argparse.Namespace) -> int:
    for name, least in (("max_length", 2), ("min_loss_tokens", 1), ("show", 0)):
        at_least(args, name, least)
    if not 0 <= args.max_empty_fraction <= 1:
        raise DataError(problem("--max-empty-fraction", args.max_empty_fraction, "a number from 0 to 1"))
    if args.show and args.json:
        raise DataError(problem("--show and --json", "both", "one of the two", "leave one out"))
    from rich.console import Console

    from jaxspec.checkpoints.inspection import target_config
    from jaxspec.checkpoints.tokenizer import load_tokenizer
    from jaxspec.training.outputs import check_out
    from jaxspec.training.prepare import Settings, prepare
    from jaxspec.training.show import show
    from jaxspec.training.templates import choose

    check_out(args.out, ".npz", args.force, [*args.inputs, *args.eval])  # before a target is fetched
    config, directory = target_config(args.target)
    tokenizer = load_tokenizer(directory)
    settings = Settings(args.max_length, args.min_loss_tokens, args.max_empty_fraction, args.overlap)
    with Console(stderr=True).status("reading") as status:

        def watch(stats: Any) -> None:
            if stats.rows % 100 == 0:
                status.update(f"{stats.rows:,} rows, {stats.tokens:,} tokens")

        examples, report = prepare(
            args.inputs,
            args.out,
            tokenizer=tokenizer,
            template=choose(args.template, tokenizer),
            target=Path(args.target).name if Path(args.target).exists() else args.target,
            vocab_size=config.vocab_size,
            settings=settings,
            evaluation=args.eval,
            force=args.force,
            watch=watch,
        )
    if args.json:
        print(json.dumps(report, indent=1, ensure_ascii=False))
        return 0
    console = Console()
    for index in range(min(args.show, len(examples))):
        row = examples[index]
        title = f"{index + 1}: {len(row['input_ids'])} tokens, {int(row['loss_mask'].sum())} supervised"
        show(console, tokenizer, row["input_ids"].tolist(), row["loss_mask"].tolist(), title)
    console.print(_table(report))
    print(f"wrote {args.out}")
    return 0


def _table(report: dict[str, Any]) -> Any:
    from rich.table import Table

    stats, asked = report["statistics"], report["evaluation"]
    table = Table(show_header=False)
    table.add_row("target", report["target"])
    table.add_row("template", report["template"])
    lines = [
        ("rows", stats["rows"]),
        *((f"dropped: {reason}", count) for reason, count in sorted(stats["dropped"].items())),
        ("kept", stats["kept"]),
        ("truncated", stats["truncated"]),
        ("tokens cut off", stats["cut"]),
        ("tokens", stats["tokens"]),
        ("supervised", stats["supervised"]),
        ("longest row", stats["longest"]),
    ]
    if asked["files"]:
        lines.append(("evaluation prompts compared", asked["prompts"]))
    for name, count in lines:
        table.add_row(name, f"{count:,}")
    for one in asked["found"]:
        table.add_row(f"found: {one['prompt'][:60]!r}", f"{one['rows']:,} rows")
    return table
