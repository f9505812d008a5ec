"""What several subcommands share."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from jaxspec.config import Section, add_help
from jaxspec.errors import DataError, RequestError, problem


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


def refuse_without_plan(args: argparse.Namespace, *names: str) -> None:
    """Raises DataError for an option that only `--plan` reads."""
    for name in names:
        if getattr(args, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise DataError(f"{flag}: found without --plan, expected both; add --plan or leave it out")


def check_sampling(args: argparse.Namespace) -> None:
    """Of the sampling options that the command has. Raises RequestError naming the first that is out of range, before
    anything large is loaded; what depends on the target's vocabulary is checked with it."""
    from jaxspec.decoding.request import SamplingParams

    names = [field.name for field in dataclasses.fields(SamplingParams) if hasattr(args, field.name)]
    try:
        SamplingParams(**{name: getattr(args, name) for name in names}).validate(2**31)
    except RequestError as error:
        name, colon, rest = str(error).partition(":")
        raise RequestError(f"--{name.replace('_', '-')}{colon}{rest}") from None


def check_new_file(path: Path, force: bool, field: str = "--out") -> None:
    """Raises DataError unless a file can be written at `path`; one that is there needs `force`."""
    where = f"{field} {path}"
    if path.is_dir():
        raise DataError(f"{where}: found a folder, expected a file's name")
    if path.exists() and not force:
        raise DataError(f"{where}: found a file there, expected none; --force replaces it")
    if not path.absolute().parent.is_dir():
        raise DataError(f"{where}: found no folder {path.absolute().parent}, expected one")
