"""Record greedy answers of SmolLM2 from transformers on torch, as an independent witness for the decoder.

    python tools/record_transformers_answers.py FOLDER tests/fixtures/smollm2_transformers_answers.json

FOLDER is the converted Hugging Face folder (`jaxspec.checkpoints.smollm2.smollm2()` returns it). Run it in an
environment of its own with `torch==2.13.0` and `transformers==5.24.0`; jaxspec never imports torch. float32, one
sequence at a time, raw argmax of the logits (lowest id on ties), stopping after an end-of-turn token or 48 tokens.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import transformers

QUESTIONS = (
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "How many days are there in a week?",
    "What do bees make?",
    "Write one sentence about rain.",
    "What is the opposite of big?",
    "Which planet do we live on?",
    "Why do people wear coats in winter?",
    "What is 2 plus 3?",
    "Give me a word that rhymes with cat.",
    "What sound does a dog make?",
    "Write a Python function that adds two numbers.",
    "List two animals that can fly.",
    "What is ice made of?",
    "Who wrote Romeo and Juliet?",
    "Translate 'good morning' into Spanish.",
    "What is a triangle?",
    "Tell me a fact about the moon.",
    "How do I boil an egg?",
    "What is the largest ocean on Earth?",
)
MAX_NEW_TOKENS = 48


@torch.inference_mode()
def answer(model: torch.nn.Module, prompt_ids: list[int], stops: set[int]) -> tuple[list[int], float]:
    """Greedy continuation and the smallest gap between the best two logits on the way."""
    tokens: list[int] = []
    cache, rows, smallest = None, torch.tensor([prompt_ids]), float("inf")
    while len(tokens) < MAX_NEW_TOKENS and not (tokens and tokens[-1] in stops):
        out = model(rows, past_key_values=cache, use_cache=True)
        logits, cache = out.logits[0, -1].float(), out.past_key_values
        best = torch.topk(logits, 2).values
        smallest = min(smallest, (best[0] - best[1]).item())
        tokens.append(int((logits == logits.max()).nonzero()[0, 0]))
        rows = torch.tensor([tokens[-1:]])
    return tokens, smallest


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="converted Hugging Face folder of SmolLM2-135M-Instruct")
    parser.add_argument("output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order, whatever the machine
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=torch.float32).eval()
    stops = {tokenizer.eos_token_id}
    records = []
    for question in QUESTIONS:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        prompt_ids = tokenizer.encode(text, add_special_tokens=False)
        tokens, smallest = answer(model, prompt_ids, stops)
        finish = "stop" if tokens[-1] in stops else "length"
        records.append(
            {
                "question": question,
                "prompt_ids": prompt_ids,
                "answer_ids": tokens,
                "answer": tokenizer.decode(tokens),
                "finish_reason": finish,
                "smallest_top2_margin": round(smallest, 6),
            }
        )
        print(f"{smallest:9.5f}  {len(tokens):3d}  {finish:6s}  {question}")
    source = json.loads((arguments.folder / "jaxspec_source.json").read_text())
    header = {
        "model": "SmolLM2-135M-Instruct",
        "revision": source["revision"],
        "dtype": "float32",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "max_new_tokens": MAX_NEW_TOKENS,
        "stop_token_ids": sorted(stops),
    }
    lines = ",\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    head = json.dumps(header, indent=1)[:-2]
    arguments.output.write_text(f'{head},\n "records": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
