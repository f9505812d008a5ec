"""What several subcommands share."""

from __future__ import annotations

import argparse

from jaxspec.config import Section, add_help
from jaxspec.errors import DataError, problem


def add_config_arguments(parser: argparse.ArgumentParser, model: type[Section], *, required: bool = True) -> None:
    """`--config FILE [section.key=value ...]`, and every key under --help."""
    parser.add_argument("--config", metavar="FILE", required=required, help="YAML config")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="keys that replace the file's")
    add_help(parser, model)


def template_argument(parser: argparse.ArgumentParser) -> None:
    """`--template`, as data.template."""
    parser.add_argument(
        "--template",
        choices=("auto", "qwen", "llama", "tokenizer"),
        default="auto",
        help="chat template; auto takes the tokenizer's own (%(default)s)",
    )


def at_least(args: argparse.Namespace, name: str, least: int) -> None:
    """Raises DataError for a smaller number."""
    if getattr(args, name) < least:
        raise DataError(problem(f"--{name.replace('_', '-')}", getattr(args, name), f"at least {least}"))
