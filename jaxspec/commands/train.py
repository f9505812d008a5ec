"""`jaxspec train` and `train.py`."""

from __future__ import annotations

import argparse

from jaxspec.commands.common import add_config_arguments
from jaxspec.config import TrainConfig, load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, TrainConfig)


def main(args: argparse.Namespace) -> int:
    config = load_config(TrainConfig, args.config, args.overrides)
    from jaxspec.evaluation.during_training import hook  # after the check, so that a wrong key costs no second
    from jaxspec.training import main as training

    training.run(config, evaluate=hook(config))
    return 0
