"""`jaxspec regenerate INPUT... --target T --out FILE.jsonl`: the target answers the prompts of a data set."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxspec.commands.common import at_least, check_sampling, template_argument

_NAMED = 5  # rows that the text report names of each kind


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "inputs",
        nargs="+",
        type=Path,
        metavar="INPUT",
        help=".jsonl, .json or .parquet: messages, ShareGPT, Alpaca or prompts; answers in it are replaced",
    )
    parser.add_argument(
        "--target", required=True, metavar="SOURCE", help="folder, GGUF file, org/name[@revision] or smollm2"
    )
    parser.add_argument("--out", required=True, type=Path, metavar="FILE.jsonl", help="the same command again goes on")
    parser.add_argument(
        "--drafter",
        metavar="SOURCE",
        default="none",
        help="drafter folder or org/name, or ngram (%(default)s)",
    )
    template_argument(parser)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, else bfloat16")
    parser.add_argument("--num-slots", type=int, default=8, metavar="N", help="answers made together (%(default)s)")
    parser.add_argument(
        "--max-context", type=int, default=4096, metavar="N", help="longest conversation, in tokens (%(default)s)"
    )
    parser.add_argument("--force", action="store_true", help="start anew and replace the output")
    parser.add_argument("--json", action="store_true", help="print the account as JSON")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-new-tokens", type=int, default=1024, metavar="N", help="of an answer (%(default)s)")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    sampling.add_argument("--top-k", type=int, default=0, metavar="K", help="0 is off (default)")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P", help="default %(default)s")
    sampling.add_argument("--min-p", type=float, default=0.0, metavar="P", help="default %(default)s")
    sampling.add_argument("--seed", type=int, default=0, metavar="N", help="of sampled answers (%(default)s)")


def main(args: argparse.Namespace) -> int:
    for name, least in (("num_slots", 1), ("max_context", 2), ("max_new_tokens", 1), ("seed", 0)):
        at_least(args, name, least)
    check_sampling(args)
    from jaxspec.training.journal import Journal, finished, locked, partial_path
    from jaxspec.training.outputs import check_out, writing
    from jaxspec.training.records import conversations

    check_out(args.out, ".jsonl", True, args.inputs)
    total = sum(1 for path in args.inputs for _ in conversations(path, "INPUT", answered=False))
    with locked(args.out):
        make = _Maker(args)
        if args.force:
            with writing(args.out):
                partial_path(args.out).unlink(missing_ok=True)
        account = None if args.force else finished(args.out, make.record)
        if account is None:
            with Journal(args.out, make.record) as journal, _progress(total, len(journal)) as watch:
                account = make(journal, watch)
            said = f"wrote {args.out}"
        else:
            said = f"{args.out} is finished; --force starts anew"
    print(json.dumps(account, indent=1, ensure_ascii=False) if args.json else f"{_text(account)}\n{said}")
    return 0


class _Maker:
    """The loaded target, what the rows are made with, and the making."""

    def __init__(self, args: argparse.Namespace):
        import jax

        from jaxspec.checkpoints.target import load_target
        from jaxspec.checkpoints.tokenizer import load_tokenizer
        from jaxspec.decoding.request import SamplingParams
        from jaxspec.training.packed import vocabulary_hash
        from jaxspec.training.prepare import sha256, template_hash
        from jaxspec.training.regenerate import sampling_record
        from jaxspec.training.templates import choose

        self._args = args
        self._dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
        self._target = load_target(args.target, dtype=self._dtype)
        self._tokenizer = load_tokenizer(self._target.directory)
        self._template = choose(args.template, self._tokenizer)
        names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p")
        self._sampling = SamplingParams(**{name: getattr(args, name) for name in names})
        self._sampling.validate(self._target.config.vocab_size)
        self._about = {"target": self._target.name, "revision": self._target.revision}
        self.record: dict[str, Any] = {
            "version": 1,
            **self._about,
            "dtype": self._dtype,
            "drafter": args.drafter,
            "vocabulary": vocabulary_hash(self._tokenizer),
            "template": self._template.name,
            "template_sha256": template_hash(self._tokenizer, self._template),
            "max_context": args.max_context,
            **sampling_record(self._sampling, args.seed),
            "inputs": [{"file": path.name, "sha256": sha256(path)} for path in args.inputs],
        }

    def __call__(self, journal: Any, watch: Callable[[Any], None]) -> dict[str, Any]:
        from jaxspec.checkpoints.drafting import open_drafter
        from jaxspec.serving.engine import Engine
        from jaxspec.training.regenerate import regenerate

        args = self._args
        draft, proposals = None, None
        if args.drafter.lower() != "none":
            draft, proposals = open_drafter(args.drafter, self._target, dtype=self._dtype)
        engine = Engine(
            self._target, draft, num_proposals=proposals, num_slots=args.num_slots, slot_buckets=(args.num_slots,),
            max_context=args.max_context, prefill_chunk=min(256, args.max_context), rules=False, max_logprobs=None,
        )  # fmt: skip
        return regenerate(
            args.inputs,
            journal,
            engine=engine,
            tokenizer=self._tokenizer,
            template=self._template,
            sampling=self._sampling,
            seed=args.seed,
            about=self._about,
            watch=watch,
        )


@contextlib.contextmanager
def _progress(total: int, done: int) -> Iterator[Callable[[Any], None]]:
    """A bar on stderr's terminal; elsewhere a line every half minute."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    began = said = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("rows", total=total, completed=done)

        def watch(progress: Any) -> None:
            nonlocal said
            now = time.monotonic()
            speed = f"{progress.tokens / max(now - began, 1e-9):.0f} tokens/s"
            bar.update(task, completed=progress.rows, description=speed)
            if not console.is_terminal and now - said >= 30:
                said = now
                console.print(f"{progress.rows} of {total} rows, {speed}", highlight=False, soft_wrap=True)

        yield watch


def _text(account: dict[str, Any]) -> str:
    reasons = ", ".join(f"{count} {reason}" for reason, count in account["finish_reasons"].items()) or "none"
    lines = [
        f"rows         {account['rows']}",
        f"answers      {account['answers']} ({reasons}), {account['tokens']} tokens",
        f"same ids     {account['answers_with_the_same_ids']} of {account['answers']} answers, encoded again",
    ]
    for kind in ("dropped", "shortened"):
        for reason, places in account[kind].items():
            shown = "; ".join(places[:_NAMED]) + (" …" if len(places) > _NAMED else "")
            lines.append(f"{kind:<12} {len(places)} rows: {reason} ({shown})")
    return "\n".join(lines)
