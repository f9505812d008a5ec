"""`jaxspec config train|serve`: checks a config and prints it resolved."""

from __future__ import annotations

import argparse
import json

from jaxspec.commands.common import add_config_arguments
from jaxspec.config import Section, ServeConfig, TrainConfig, load_config, render

_MODELS: dict[str, type[Section]] = {"train": TrainConfig, "serve": ServeConfig}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="train|serve")
    for name, model in _MODELS.items():
        kind = kinds.add_parser(name, help=(model.__doc__ or "").strip(), allow_abbrev=False)
        add_config_arguments(kind, model, required=False)
        kind.add_argument("--json", action="store_true", help="print JSON instead of YAML")


def main(args: argparse.Namespace) -> int:
    config = load_config(_MODELS[args.kind], args.config, args.overrides)
    print(
        json.dumps(config.model_dump(mode="json"), indent=1) if args.json else render(config),
        end="\n" if args.json else "",
    )
    return 0
