"""`jaxspec calibrate PROMPTS`: fits a confidence head's temperatures on the rounds that answer the prompts."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec.commands.common import check_new_file, check_sampling
from jaxspec.errors import RequestError
from jaxspec.evaluation.prompts import read_prompts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", type=Path, metavar="JSONL", help='held-out prompts, one object a line with "prompt"')
    parser.add_argument("--target", required=True, metavar="SOURCE", help="folder, GGUF file, org/name or smollm2")
    parser.add_argument("--drafter", required=True, metavar="SOURCE", help="DSpark drafter with a confidence head")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="STS file, for engine.sts_temperatures")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="of an answer (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="of the answers; 0 is greedy")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of sampled answers (%(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, else bfloat16")
    parser.add_argument("--num-slots", type=int, default=8, metavar="N", help="prompts decoded together (%(default)s)")
    parser.add_argument("--max-context", type=int, default=2048, metavar="N", help="longest prompt + answer")
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    for name in ("num_slots", "max_context", "max_new_tokens"):
        if getattr(args, name) < 1:
            raise RequestError(f"--{name.replace('_', '-')}: found {getattr(args, name)}, expected at least 1")
    check_sampling(args)
    check_new_file(args.out, args.force)
    prompts = read_prompts(args.prompts, "PROMPTS")
    import jax  # after the files were looked at: loading takes seconds

    from jaxspec.checkpoints.drafting import open_drafter
    from jaxspec.checkpoints.target import load_target
    from jaxspec.checkpoints.tokenizer import chat_ids, load_tokenizer
    from jaxspec.decoding.generate import generate
    from jaxspec.decoding.request import SamplingParams
    from jaxspec.decoding.runner import SlotRunner
    from jaxspec.evaluation.calibration import Rounds, fit_temperatures, reliability

    target = load_target(args.target, args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16"))
    draft, _ = open_drafter(args.drafter, target)
    rounds = Rounds(draft.drafter)
    slots = min(args.num_slots, len(prompts))
    runner = SlotRunner(target, draft, num_slots=slots, max_context=args.max_context, observe=rounds)
    tokenizer = load_tokenizer(target.directory)
    params = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=args.seed)
    generate(runner, [chat_ids(tokenizer, prompt) for prompt in prompts], params)
    logits, accepted = rounds.rows()
    fitted = fit_temperatures(logits, accepted, dataset=args.prompts.name)
    fitted.save(args.out)
    before, after = reliability(logits, accepted), reliability(logits, accepted, fitted.temperatures)
    if args.json:
        slots_of = lambda reports: [dataclasses.asdict(one) for one in reports]  # noqa: E731
        about = {"out": str(args.out), "before": slots_of(before), "after": slots_of(after)}
        print(json.dumps(dataclasses.asdict(fitted) | about))
    else:
        print(f"{len(logits)} rounds over {len(prompts)} prompts -> {args.out}")
        print(_table(fitted.temperatures, before, after))
    return 0


def _table(temperatures: Sequence[float], before: Sequence[Any], after: Sequence[Any]) -> str:
    lines = ["slot  accepted  temperature  ECE before -> after  Brier before -> after  AUROC before -> after"]
    rank = lambda one: "    -" if one.auroc is None else f"{one.auroc:.3f}"  # noqa: E731
    for slot, (temperature, a, b) in enumerate(zip(temperatures, before, after, strict=True), 1):
        lines.append(
            f"{slot:>4}  {a.accepted:>8.3f}  {temperature:>11.3f}  {a.ece:>10.3f} -> {b.ece:.3f}  "
            f"{a.brier:>12.3f} -> {b.brier:.3f}  {rank(a):>12} -> {rank(b)}"
        )
    return "\n".join(lines)
