"""`jaxspec generate`: the Python API from the command line."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from jaxspec.commands.common import check_sampling
from jaxspec.config.schema import MAX_BLOCK, MAX_CONTEXT, MAX_SLOTS
from jaxspec.errors import DataError, RequestError
from jaxspec.evaluation.prompts import read_prompts
from jaxspec.serving.terminal import context_note, read_prompt

_LIMITS = {
    "num_slots": (1, MAX_SLOTS),
    "max_context": (2, MAX_CONTEXT),
    "num_proposals": (1, MAX_BLOCK),
    "tree_nodes": (1, MAX_BLOCK),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="prompts; - or none (and no --file) reads standard input"
    )
    parser.add_argument(
        "--target", required=True, metavar="SOURCE", help="folder, GGUF file, org/name[@revision] or smollm2"
    )
    parser.add_argument(
        "--drafter",
        metavar="SOURCE",
        default="none",
        help="drafter folder or org/name, a smaller language model, or ngram (default: %(default)s)",
    )
    parser.add_argument("--num-proposals", type=int, metavar="M", help="proposals of a round; default: the drafter's")
    parser.add_argument("--tree-nodes", type=int, metavar="N", help="verify a tree of N nodes (DFlash drafters)")
    parser.add_argument("--file", type=Path, metavar="JSONL", help='one object a line with "prompt"')
    parser.add_argument("--stream", action="store_true", help="print the text as it comes (one prompt)")
    parser.add_argument("--json", action="store_true", help="print one JSON object a prompt")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, else bfloat16")
    parser.add_argument("--num-slots", type=int, default=8, metavar="N", help="prompts decoded together (%(default)s)")
    parser.add_argument(
        "--max-context", type=int, default=2048, metavar="N", help="longest prompt + answer (%(default)s)"
    )
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default %(default)s")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    sampling.add_argument("--top-k", type=int, default=0, metavar="K", help="0 is off (default)")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P", help="default %(default)s")
    sampling.add_argument("--min-p", type=float, default=0.0, metavar="P", help="default %(default)s")
    sampling.add_argument("--seed", type=int, metavar="N", help="makes sampled answers repeatable")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")


def main(args: argparse.Namespace) -> int:
    prompts = _prompts(args)
    if args.stream and (len(prompts) != 1 or args.json):
        raise DataError(
            f"--stream: found {len(prompts)} prompts{' and --json' if args.json else ''}, expected one prompt as text"
        )
    for name, (least, most) in _LIMITS.items():
        value = getattr(args, name)
        if value is not None and not least <= value <= most:
            raise RequestError(f"--{name.replace('_', '-')}: found {value}, expected {least} to {most}")
    check_sampling(args)
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos")
    sampling = {name: getattr(args, name) for name in names}
    from jaxspec.api import load  # after the prompts were read: loading takes seconds

    drafter = None if args.drafter.lower() == "none" else args.drafter
    slots = min(args.num_slots, len(prompts))
    asked = {name: getattr(args, name) for name in ("num_proposals", "tree_nodes") if getattr(args, name) is not None}
    engine = load(args.target, drafter, dtype=args.dtype, num_slots=slots, max_context=args.max_context, **asked)
    if args.stream:
        for piece in engine.stream(prompts[0], **sampling):
            print(piece, end="", flush=True)
        print()
        return 0
    for prompt, answer in zip(prompts, engine.generate(prompts, **sampling), strict=True):
        if args.json:
            print(json.dumps(_record(prompt, answer), ensure_ascii=False))
        else:
            print(answer.text if len(prompts) == 1 else f"--- {prompt}\n{answer.text}")
            if answer.context_limit:
                print(context_note(len(answer.token_ids)), file=sys.stderr)
    return 0


def _record(prompt: str, answer: Any) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "prompt_tokens": len(answer.prompt_ids),
        "finish_reason": answer.finish_reason,
        "context_limit": answer.context_limit,
        "rounds": answer.rounds,
        "tau": answer.tau,
    }


def _prompts(args: argparse.Namespace) -> list[str]:
    if args.prompts and args.file:
        raise DataError("--file and PROMPT: found both, expected one of the two; leave one out")
    if args.file:
        return read_prompts(args.file, "--file")
    prompts = args.prompts or ([] if sys.stdin.isatty() else ["-"])
    if not any(prompts):
        raise DataError(
            "PROMPT: found none, expected at least one; give it as an argument, with --file or on standard input"
        )
    return [read_prompt() if prompt == "-" else prompt for prompt in prompts]
