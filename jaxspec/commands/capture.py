"""`jaxspec capture --config X`: the target's features of a run's data, into a folder or a spool."""

from __future__ import annotations

import argparse
import json

from jaxspec.commands.common import add_config_arguments
from jaxspec.config import TrainConfig, load_config
from jaxspec.errors import DataError, problem


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where to", "default: the config's features.mode and features.path")
    group.add_argument("--out", metavar="DIR", help="a folder for any number of epochs: features.mode=offline")
    group.add_argument("--spool", metavar="DIR", help="a spool that a trainer empties: features.mode=spool")
    parser.add_argument("--status", action="store_true", help="print what became of a spool's steps; capture nothing")
    parser.add_argument("--json", action="store_true", help="print the account as JSON")
    add_config_arguments(parser, TrainConfig)


def main(args: argparse.Namespace) -> int:
    if args.out and args.spool:
        raise DataError(problem("--out and --spool", "both", "one of the two", "leave one out"))
    chosen = [f"features.mode={mode}" for mode, path in (("offline", args.out), ("spool", args.spool)) if path]
    path = args.out or args.spool
    named = [f"features.path={json.dumps(path)}"] if path else []
    config = load_config(TrainConfig, args.config, [*args.overrides, *chosen, *named])
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from jaxspec.training.featurestore import run as capturing  # after the config's check: jax takes a second to load

    if args.status:
        if config.features.mode != "spool":
            raise DataError(problem("--status", f"features.mode={config.features.mode}", "a spool", "give --spool DIR"))
        print(json.dumps(capturing.status(str(config.features.path)), indent=1))
        return 0
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    columns = (TextColumn("capturing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("examples", total=None)

        def watch(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        report = capturing.run(config, say=lambda line: console.print(line, markup=False), watch=watch)
    if args.json:
        print(json.dumps(report))
    else:
        print(_line(report, str(config.features.path)))
    return 0


def _line(report: dict[str, object], path: str) -> str:
    about = f"{report['status']}: {report['shards']} shards in {path}"
    if "bytes" not in report:
        return about
    line = f"{about}, {report['examples']} examples, {report['bytes']} bytes"
    return line + (f", int8 error {report['relative_error']:.3%} of a row's norm" if report["relative_error"] else "")
