"""`jaxspec serve` and `serve.py`."""

from __future__ import annotations

import argparse

from jaxspec.commands.common import add_config_arguments
from jaxspec.config import ServeConfig, load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, ServeConfig)


def main(args: argparse.Namespace) -> int:
    config = load_config(ServeConfig, args.config, args.overrides)
    from jaxspec.serving import main as serving  # after the check, so that a wrong key costs no second

    return int(serving.run(config) or 0)
