"""What the subcommands that read a config share."""

from __future__ import annotations

import argparse

from jaxspec.config import Section, add_help


def add_config_arguments(parser: argparse.ArgumentParser, model: type[Section], *, required: bool = True) -> None:
    """`--config FILE [section.key=value ...]`, and every key under --help."""
    parser.add_argument("--config", metavar="FILE", required=required, help="YAML config")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="keys that replace the file's")
    add_help(parser, model)
