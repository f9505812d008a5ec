"""Reading data sets: formats, what is dropped and why, and one clear error for each bad input."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from jaxspec.errors import DataError
from jaxspec.training.data import load_examples
from tests.training.test_templates import make_tokenizer

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello hello"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello hello"}]}


def write(path, *rows):
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def load(path, **options):
    return load_examples(path, tokenizer=make_tokenizer, template="qwen", **options)


def test_messages_and_sharegpt_are_the_same_data(tmp_path):
    one = load(write(tmp_path / "a.jsonl", GOOD, "", GOOD))
    two = load(write(tmp_path / "b.jsonl", SHAREGPT, SHAREGPT))
    assert len(one) == len(two) == 2 and one.content_hash() == two.content_hash() and one.template == "qwen"
    row = one[1]
    assert row["example_id"] == 1 and row["input_ids"].dtype == np.int32 and row["loss_mask"].dtype == bool
    parts = {
        "messages": [GOOD["messages"][0], {"role": "assistant", "content": [{"type": "text", "text": "hello hello"}]}]
    }
    assert load(write(tmp_path / "c.jsonl", parts, parts)).content_hash() == one.content_hash()


def test_dropped_rows_are_counted_by_reason(tmp_path):
    rows = [
        GOOD,
        {"messages": [{"role": "user", "content": "no answer here"}]},
        {"messages": [{"role": "robot", "content": "?"}]},
        {"messages": [{"role": "user", "content": 3}, {"role": "assistant", "content": "x"}]},
        {"messages": ["x"]},
        {"messages": [{"role": "user", "content": "word " * 60}, {"role": "assistant", "content": "cut away"}]},
    ]
    stats = load(write(tmp_path / "a.jsonl", *rows), max_length=60, max_empty_fraction=1.0).statistics
    assert (stats.rows, stats.kept, stats.empty, stats.truncated) == (6, 1, 5, 1)
    assert stats.dropped == {"no answer": 1, "unknown role": 1, "content is not text": 1, "turn is not an object": 1,
                             "no supervised token": 1}  # fmt: skip
    assert "1 of 6 rows" in stats.line() and "1 unknown role" in stats.line()
    report = json.loads(json.dumps(dataclasses.asdict(stats)))  # as a run's report.json has it
    assert report["dropped"] == stats.dropped and report["rows"] == 6


def test_B53_too_many_rows_without_supervision_stop_the_run(tmp_path):
    empty = {"messages": [{"role": "user", "content": "x"}]}
    path = write(tmp_path / "a.jsonl", GOOD, empty, empty)
    assert len(load(path, max_empty_fraction=0.7)) == 1
    with pytest.raises(DataError, match=r"data\.max_empty_fraction.*2 of 3 rows.*data\.template"):
        load(path, max_empty_fraction=0.6)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("absent.jsonl", None, r"data\.path.*no file"),
        ("empty.jsonl", "", r"data\.path.*empty data set"),
        ("broken.jsonl", '{"messages"', r"line 1.*no JSON"),
        ("other.jsonl", '{"text": "x"}\n', r"line 1\): messages"),
        ("list.jsonl", "[1]\n", r"line 1\): messages"),
        ("data.csv", "a,b", r"data\.path.*\.jsonl, .*\.npz"),
        ("broken.npz", "not a zip", r"data\.path.*unreadable"),
    ],
)
def test_bad_files_are_one_clear_error(tmp_path, name, content, named):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=named):
        load(tmp_path / name)


def save(path, lengths, prompts, top=30, **changes):
    tokens = np.arange(sum(lengths), dtype=np.uint16) % top
    arrays = {"tokens": tokens, "offsets": np.cumsum([0, *lengths]), "prompt_lengths": np.array(prompts), **changes}
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def test_B55_packed_lengths_around_the_block(tmp_path):
    """b = 4: lengths 1, b-1, b, b+1, 2b-1, an unsupervised row and one that ends with a lone supervised token."""
    path = save(tmp_path / "a.npz", [1, 3, 4, 5, 7, 6, 9], [0, 0, 1, 2, 3, 6, 8])
    examples = load_examples(path, max_length=6, max_empty_fraction=0.5)
    stats = examples.statistics
    assert [len(examples[i]["input_ids"]) for i in range(len(examples))] == [3, 4, 5, 6]
    assert [int(examples[i]["loss_mask"].sum()) for i in range(len(examples))] == [3, 3, 3, 3]
    assert (
        stats.dropped == {"no valid anchor": 1, "no supervised token": 2}
        and stats.truncated == 2
        and examples.longest == 6
    )


def test_packed_rows_with_too_few_supervised_tokens(tmp_path):
    examples = load_examples(save(tmp_path / "a.npz", [6, 6], [4, 1]), min_loss_tokens=3)
    assert len(examples) == 1 and examples.statistics.dropped == {"too few supervised tokens": 1}
    with pytest.raises(DataError, match=r"data\.min_loss_tokens"):
        load_examples(save(tmp_path / "b.npz", [6, 6], [4, 4]), min_loss_tokens=3)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"prompt_lengths": None}, "neither loss_mask nor prompt_lengths"),
        ({"loss_mask": np.ones(10, bool)}, "both loss_mask and prompt_lengths"),
        ({"prompt_lengths": None, "loss_mask": np.ones(9, bool)}, "loss_mask"),
        ({"prompt_lengths": None, "loss_mask": np.arange(10)}, "each 0 or 1"),
        ({"prompt_lengths": None, "loss_mask": np.ones(10)}, "loss_mask"),
        ({"prompt_lengths": None, "loss_mask": np.ones(10, bool), "offsets": np.array([1, 10])}, "offsets"),
        ({"about": np.frombuffer(b"{", np.uint8)}, "about: no JSON"),
        ({"about": np.frombuffer(b"[]", np.uint8)}, "about"),
        ({"offsets": np.array([0, 4, 9])}, "offsets"),
        ({"offsets": np.array([0, 10])}, "offsets"),
        ({"tokens": np.ones(10)}, "tokens"),
        ({"prompt_lengths": np.array([1, 9])}, "prompt_lengths"),
    ],
)
def test_packed_files_that_contradict_themselves(tmp_path, changes, named):
    with pytest.raises(DataError, match=named):
        load_examples(save(tmp_path / "a.npz", [5, 5], [1, 1], **changes))


def test_a_loss_mask_says_the_same_as_prompt_lengths(tmp_path):
    prompts = save(tmp_path / "a.npz", [6, 5, 7], [4, 1, 0])
    mask = np.concatenate([np.arange(length) >= prompt for length, prompt in ((6, 4), (5, 1), (7, 0))])
    masked = save(tmp_path / "b.npz", [6, 5, 7], [], prompt_lengths=None, loss_mask=mask)
    assert load_examples(prompts).content_hash() == load_examples(masked).content_hash()
    assert load_examples(masked)[1]["loss_mask"].tolist() == [False, True, True, True, True]


def test_B35_ids_outside_the_vocabulary_are_refused(tmp_path):
    path = save(tmp_path / "a.npz", [20, 20], [1, 1])
    assert len(load_examples(path, vocab_size=30)) == 2
    with pytest.raises(DataError, match=r"row 2.*token id 29.*0 to 28"):
        load_examples(path, vocab_size=29)
