"""`jaxspec profile`: measures what a server's rounds cost on this device, as the table that plans its budgets."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from jaxspec.commands.common import add_config_arguments, check_new_file
from jaxspec.config import ServeConfig, load_config
from jaxspec.errors import ConfigError, RequestError, problem


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, ServeConfig)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the table, for engine.cost_table")
    parser.add_argument(
        "--form", choices=("additive", "steps"), default="additive", help="seconds by R and M, or steps per second by M"
    )
    parser.add_argument("--context", type=int, metavar="N", help="tokens of each request (half of what fits)")
    parser.add_argument("--steps", type=int, default=32, metavar="N", help="rounds a probe (%(default)s)")
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON")


def main(args: argparse.Namespace) -> int:
    if args.steps < 1:
        raise RequestError(f"--steps: found {args.steps}, expected at least 1")
    config = load_config(ServeConfig, args.config, args.overrides)
    if config.drafter is None:
        raise ConfigError(problem("drafter", "none", "a drafter: without proposals there is no budget to plan"))
    check_new_file(args.out, args.force)
    # what would choose for itself, or compile more, is left out
    plain = {"grammar": False, "cost_table": None, "pause_drafting": False}
    config = config.model_copy(update={"engine": config.engine.model_copy(update=plain)})
    manifest = profile(config, args)
    print(json.dumps(manifest, indent=1) if args.json else _text(args.out, manifest))
    return 0


def profile(config: ServeConfig, args: argparse.Namespace) -> dict[str, Any]:
    """Measures, fits and writes; returns the manifest."""
    from jaxspec.serving.cost import unmeasured
    from jaxspec.serving.cost_fit import Cell, fit
    from jaxspec.serving.cost_origin import save_profile
    from jaxspec.serving.main import load
    from jaxspec.serving.profiling import measure, nothing_stands

    with contextlib.redirect_stdout(sys.stderr):  # the server's own lines
        loaded = load(config, lambda: None, program=nothing_stands, cost_table=unmeasured(1))

    def show(cell: Cell) -> None:
        kind = "draft" if cell.drafting else "plain"
        line = f"R={cell.requests} M={cell.rows} ({kind}, {cell.prefill} prefill rows): {1e3 * cell.seconds:.3f} ms"
        print(line, file=sys.stderr, flush=True)

    if loaded.made_for is None:
        raise ConfigError(problem("drafter", f"{config.drafter}, which is not there yet", "a trained drafter"))
    cells = measure(loaded.runner, context=args.context, steps=args.steps, progress=show)
    table = fit(cells, args.form)
    return save_profile(table, cells, loaded.made_for, args.out, form=args.form, context=args.context)


def _text(path: Path, manifest: dict[str, Any]) -> str:
    lines = [f"{'R':>5} {'M':>6} {'C':>5}  {'kind':<6} {'ms':>9}"]
    for cell in manifest["cells"]:
        kind = "draft" if cell["drafting"] else "plain"
        milliseconds = 1e3 * cell["seconds"]
        lines.append(f"{cell['requests']:>5} {cell['rows']:>6} {cell['prefill']:>5}  {kind:<6} {milliseconds:>9.3f}")
    misfit = manifest["misfit"]
    lines.append(f"{manifest['form']} table: off by {misfit['median']:.1%} (median), {misfit['worst']:.1%} (worst)")
    lines.append(f"wrote {path}, for {manifest['made_for']['device']}: serve.py engine.cost_table={path}")
    return "\n".join(lines)
