"""`jaxspec inspect DIR`: what a drafter's folder holds, and what it lacks."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="DIR", help="drafter folder or org/name")
    parser.add_argument("--target", metavar="SOURCE", help="the target it is for; guessed from its config if left out")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    """0 where the tensors are exactly the method's and every value is a number, else 1."""
    from jaxspec.checkpoints.inspection import inspect, target_config

    target = None if args.target is None else target_config(args.target)[0]
    found = inspect(args.source, target)
    print(json.dumps(found.report(), indent=1) if args.json else _text(found.report()))
    return 0 if found.whole else 1


def _text(report: dict[str, Any]) -> str:
    size = f"{report['num_proposals']} proposals a round"
    if report["tree_nodes"]:
        size = f"a tree of {report['tree_nodes']} nodes, {report['num_proposals']} deep"
    taps = "follow from the target's depth (give --target)" if report["taps"] is None else report["taps"]
    tables = ", ".join(report["own_tables"]) or "none: embedding and head are the target's"
    lines = [
        f"method       {report['method']}",
        f"layout       {report['layout']} ({', '.join(report['architectures']) or 'no architecture'})",
        f"proposes     {size}",
        f"taps         {taps}",
        f"own tables   {tables}",
        f"dtypes       {', '.join(report['dtypes'])}",
        "parameters   " + ", ".join(f"{name} {count:,}" for name, count in report["parameters"].items()),
    ]
    for what in ("missing", "left_over", "wrong_shape", "not_finite"):
        lines += [f"{what.replace('_', ' '):<12} {name}" for name in report[what]]
    if report["target_assumed_from_config"]:
        lines.append("(sizes of the target were taken from the drafter's config; --target checks them)")
    return "\n".join(lines)
