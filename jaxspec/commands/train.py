"""`jaxspec train` and `train.py`."""

from __future__ import annotations

import argparse

from jaxspec.commands.common import add_config_arguments, refuse_without_plan
from jaxspec.config import TrainConfig, load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, TrainConfig)
    planning = parser.add_argument_group("plan", "compile for TPUs that are not there, without weights; train nothing")
    planning.add_argument("--plan", action="store_true", help="memory, collectives and estimated time of a step")
    planning.add_argument("--tpu", metavar="TOPOLOGY", help="default: the config's mesh.topology")


def main(args: argparse.Namespace) -> int:
    config = load_config(TrainConfig, args.config, args.overrides)
    if args.plan:
        from jaxspec.training.plan import plan

        return plan(config, args.tpu, lambda line: print(line, flush=True))
    refuse_without_plan(args, "tpu")
    from jaxspec.training import pod

    pod.join(config.mesh)
    from jaxspec.evaluation.during_training import hook  # after the check, so that a wrong key costs no second
    from jaxspec.training import main as training

    training.run(config, evaluate=hook(config))
    return 0
