"""`jaxspec serve` and `serve.py`."""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxspec.commands.common import add_config_arguments, refuse_without_plan
from jaxspec.config import ServeConfig, load_config

TOPOLOGY = "v5e:2x2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, ServeConfig)
    planning = parser.add_argument_group("plan", "compile for TPUs that are not there, without weights; serve nothing")
    planning.add_argument("--plan", action="store_true", help="memory and estimated time of every round")
    planning.add_argument("--tpu", metavar="TOPOLOGY", help=f"default {TOPOLOGY}")
    planning.add_argument("--cost-table", type=Path, metavar="FILE", help="where the estimated cost table goes")


def main(args: argparse.Namespace) -> int:
    config = load_config(ServeConfig, args.config, args.overrides)
    if args.plan:
        from jaxspec.serving import plan

        tpu = args.tpu or TOPOLOGY
        default = Path("out/plan") / f"{Path(args.config).stem}-{tpu.replace(':', '-')}.json"
        return plan.plan(config, tpu, args.cost_table or default, lambda line: print(line, flush=True))
    refuse_without_plan(args, "tpu", "cost_table")
    import jax  # after the check, so that a wrong key costs no second

    from jaxspec.serving import main as serving

    jax.devices()  # what does not start is said here, not by the thread that loads
    return int(serving.run(config) or 0)
