"""`jaxspec serve` and `serve.py`."""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxspec.commands.common import add_config_arguments
from jaxspec.config import ServeConfig, load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, ServeConfig)
    planning = parser.add_argument_group("plan", "compile for TPUs that are not there, without weights; serve nothing")
    planning.add_argument("--plan", action="store_true", help="memory and estimated time of every round")
    planning.add_argument("--tpu", metavar="TOPOLOGY", default="v5e:2x2", help="default %(default)s")
    planning.add_argument("--cost-table", type=Path, metavar="FILE", help="where the estimated cost table goes")


def main(args: argparse.Namespace) -> int:
    config = load_config(ServeConfig, args.config, args.overrides)
    if args.plan:
        from jaxspec.serving import plan

        default = Path("out/plan") / f"{Path(args.config).stem}-{args.tpu.replace(':', '-')}.json"
        return plan.plan(config, args.tpu, args.cost_table or default, lambda line: print(line, flush=True))
    from jaxspec.serving import main as serving  # after the check, so that a wrong key costs no second

    return int(serving.run(config) or 0)
