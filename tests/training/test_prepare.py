"""`jaxspec prepare`: what becomes of every row, the token file and its account, and training on it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import tracemalloc

import numpy as np
import pytest

from jaxspec import cli
from jaxspec.errors import DataError
from jaxspec.training import prepare as module
from jaxspec.training.data import load_examples
from jaxspec.training.outputs import account_path
from jaxspec.training.packed import packed
from jaxspec.training.prepare import IN_FULL, SHARED, Settings, prepare
from jaxspec.training.templates import LLAMA3, QWEN, choose
from tests.helpers.process import environment
from tests.training import world
from tests.training.test_data import GOOD, SHAREGPT, write
from tests.training.test_templates import ANSWERS, CHATML, make_tokenizer, talk

TOKENIZER = make_tokenizer()
VOCAB = len(TOKENIZER)


def talks(*answers):
    return {"messages": talk(*answers)}


def run(tmp_path, *rows, template=QWEN, evaluation=(), out="out.npz", **options):
    """Prepares the rows; settings and other options by name."""
    known = {field: options.pop(field) for field in list(options) if field in Settings.__dataclass_fields__}
    source = write(tmp_path / "in.jsonl", *rows)
    files = [write(tmp_path / "eval.jsonl", *evaluation)] if evaluation else []
    options = {"tokenizer": TOKENIZER, "target": "tiny", "vocab_size": VOCAB, **options}
    settings = Settings(**known)
    return prepare([source], tmp_path / out, template=template, settings=settings, evaluation=files, **options)


def texts(path):
    """(whole text, supervised text) of every example of a token file."""
    content = packed(path)
    parts = [slice(*pair) for pair in zip(content.offsets[:-1], content.offsets[1:], strict=True)]
    return [
        (TOKENIZER.decode(content.tokens[one]), TOKENIZER.decode(content.tokens[one][content.loss_mask[one]]))
        for one in parts
    ]


@pytest.mark.parametrize(("template", "eot"), [(QWEN, "<|im_end|>"), (LLAMA3, "<|eot_id|>")])
def test_B53_every_assistant_turn_and_its_end_is_supervised_and_nothing_else(tmp_path, template, eot):
    run(tmp_path, *(talks(answer, answer + "!") for answer in ANSWERS), template=template)
    strip = str.strip if template is LLAMA3 else str
    found = [supervised for _, supervised in texts(tmp_path / "out.npz")]
    assert found == [f"{strip(answer)}{eot}{strip(answer + '!')}{eot}" for answer in ANSWERS]


def test_the_file_trains_as_its_conversations_do(tmp_path):
    rows = [talks("hello"), talks("hello", "world"), SHAREGPT, GOOD | {"system": "be brief"}]
    run(tmp_path, *rows)
    direct = load_examples(tmp_path / "in.jsonl", tokenizer=make_tokenizer, template="qwen", vocab_size=VOCAB)
    told = load_examples(tmp_path / "out.npz", tokenizer=make_tokenizer, template="auto")
    assert direct.content_hash() == told.content_hash() and direct.template == told.template == "qwen"
    report = json.loads(account_path(tmp_path / "out.npz").read_text(encoding="utf-8"))
    assert report["content_sha256"] == told.content_hash() and len(told) == 4


def test_B53_a_cut_answer_has_no_end_of_turn(tmp_path):
    turns = talk("hello", "the rest is mis")
    turns[-1]["finish_reason"] = "length"
    cut = {"messages": [dict(turn) for turn in turns]}
    turns[-1]["finish_reason"] = "stop"
    for template, eot in ((QWEN, "<|im_end|>"), (LLAMA3, "<|eot_id|>"), (None, "<|im_end|>")):
        own = make_tokenizer(CHATML)
        template = template or choose("tokenizer", own)
        run(tmp_path, cut, {"messages": turns}, template=template, tokenizer=own, force=True)
        (whole, supervised), (_, finished) = texts(tmp_path / "out.npz")
        assert supervised == f"hello{eot}the rest is mis" and whole.endswith("the rest is mis")
        assert finished == supervised + eot


def test_B55_short_and_cut_rows_are_counted_by_reason(tmp_path):
    """Lengths around the cut: what is left of a row must hold two supervised tokens in a row."""
    long = talks("hello " * 40)
    mask = masks_of(tmp_path, long)[0]
    first = mask.index(True)
    for length, reason in ((first, "no supervised token"), (first + 1, "no valid anchor"), (first + 2, None)):
        options = {"max_length": length, "max_empty_fraction": 1.0, "force": True}
        if reason is not None:
            with pytest.raises(DataError, match=rf"--min-loss-tokens: no row left of 1.*1 {reason}"):
                run(tmp_path, long, **options)
        else:
            examples, report = run(tmp_path, long, **options)
            stats = report["statistics"]
            assert (stats["kept"], stats["truncated"], stats["longest"]) == (1, 1, length)
            assert stats["cut"] == len(mask) - length and examples.longest == length
    with pytest.raises(DataError, match=r"--max-empty-fraction: 1 of 1 rows"):
        run(tmp_path, long, max_length=first, force=True)


def masks_of(tmp_path, *rows):
    examples, _ = run(tmp_path, *rows, force=True)
    return [examples[i]["loss_mask"].tolist() for i in range(len(examples))]


def test_what_was_dropped_and_why(tmp_path):
    asked = "One two three four five six seven eight nine ten eleven twelve thirteen fourteen?"
    rows = [
        GOOD,
        SHAREGPT,  # the same conversation
        GOOD | {"system": "other"},
        {"prompt": "no answer"},
        {"prompt": f"so: {asked.upper()} yes", "answer": "hello hello"},
        {"prompt": "x", "answer": f"as {asked.removesuffix(' fourteen?')} they say"},
        {"prompt": asked.replace("seven", "7"), "answer": "hello hello"},
        {"messages": [{"role": "robot", "content": "?"}]},
    ]
    _, report = run(tmp_path, *rows, evaluation=[{"prompt": asked}, {"prompt": "never asked"}])
    stats = report["statistics"]
    assert stats["dropped"] == {"duplicate": 1, "no answer": 1, IN_FULL: 1, SHARED: 1, "unknown role": 1}
    assert (stats["rows"], stats["kept"]) == (8, 3)
    assert report["evaluation"]["prompts"] == 2 and report["evaluation"]["found"] == [{"prompt": asked, "rows": 2}]
    assert report["inputs"][0]["rows"] == 8 and report["inputs"][0]["file"] == "in.jsonl"
    assert len(report["inputs"][0]["sha256"]) == len(report["evaluation"]["files"][0]["sha256"]) == 64
    assert packed(tmp_path / "out.npz").about == json.loads(account_path(tmp_path / "out.npz").read_text())
    with pytest.raises(DataError, match=r"INPUT \(in\.jsonl, line 5\): evaluation prompt in full: 'One two"):
        run(tmp_path, *rows, evaluation=[{"prompt": asked}], overlap="refuse", out="other.npz")
    assert not (tmp_path / "other.npz").exists()


def test_scripts_without_blanks_overlap_too(tmp_path):
    asked = "\u4eca\u5929\u5929\u6c14\u600e\u4e48\u6837\u6211\u4eec\u53bb\u516c\u56ed\u5427"
    rows = [GOOD, {"prompt": f"\u8bf7\u95ee\uff1a{asked}\uff01", "answer": "hello hello"}]
    _, report = run(tmp_path, *rows, evaluation=[{"prompt": asked}])
    assert report["statistics"]["dropped"] == {IN_FULL: 1}


def test_duplicates_are_those_of_what_is_left_after_the_cut(tmp_path):
    one, other = talks("hello " * 30 + "a"), talks("hello " * 30 + "b")
    first = masks_of(tmp_path, one, other)[1].index(True)
    assert run(tmp_path, one, other, max_length=first + 9, force=True)[1]["statistics"]["dropped"] == {"duplicate": 1}


def test_ids_outside_the_vocabulary_and_outputs_in_the_way_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"INPUT, row 1: token id .*0 to 99"):
        run(tmp_path, GOOD, vocab_size=100)
    run(tmp_path, GOOD)
    before = (tmp_path / "out.npz").read_bytes()
    with pytest.raises(DataError, match=r"--out: .*out\.npz, which is there.*--force"):
        run(tmp_path, GOOD, talks("world"))
    for name, says in (("out.jsonl", "ending in .npz"), ("in.jsonl/out.npz", "cannot be written")):
        with pytest.raises(DataError, match=says):
            run(tmp_path, GOOD, out=name)
    assert (tmp_path / "out.npz").read_bytes() == before
    write(tmp_path / "x.npz.json", GOOD)
    with pytest.raises(DataError, match=r"--out: .*x\.npz, which would replace the input .*x\.npz\.json"):
        prepare(
            [tmp_path / "x.npz.json"], tmp_path / "x.npz", tokenizer=TOKENIZER, template=QWEN, target="tiny",
            vocab_size=VOCAB, force=True,
        )  # fmt: skip
    run(tmp_path, GOOD, talks("world"), force=True)
    assert len(packed(tmp_path / "out.npz").offsets) == 3


def test_no_account_of_an_earlier_file_stands_beside_a_new_one(tmp_path, monkeypatch):
    """Whatever the moment at which the second run ends, the account that is there is that of the file."""
    run(tmp_path, GOOD)

    def die(path, *more):
        raise KeyboardInterrupt

    for name in ("write_packed", "replacing_file"):
        monkeypatch.setattr(module, name, die)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, GOOD, talks("world"), force=True)
        monkeypatch.undo()
        assert not account_path(tmp_path / "out.npz").exists() and len(packed(tmp_path / "out.npz").about) > 5
    assert len(packed(tmp_path / "out.npz").offsets) == 3
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.npz"}


CHILD = """
import os, signal, sys
from pathlib import Path
import numpy as np
from jaxspec.training import packed

real = np.savez_compressed
def torn(file, **arrays):
    real(file, **arrays)
    file.seek(200); file.truncate(); file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
np.savez_compressed = torn
from tests.training.test_prepare import GOOD, run
run(Path(sys.argv[1]), GOOD, out=sys.argv[2], force=True)
"""


@pytest.mark.ci
@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
def test_a_kill_inside_the_writing_leaves_the_old_file_or_none(tmp_path):
    run(tmp_path, GOOD, talks("world"))
    before = (tmp_path / "out.npz").read_bytes()
    for out in ("out.npz", "new.npz"):
        command = [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path), out]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert (tmp_path / "out.npz").read_bytes() == before and not (tmp_path / "new.npz").exists()


def test_memory_is_three_bytes_a_token_whatever_the_text(tmp_path, monkeypatch):
    """2,000 conversations of 100 kB each, 4,000 tokens a row: 200 MB of text and 8 million tokens."""
    rows, length = 2000, 4000

    def conversations(path, field):
        for index in range(rows):
            yield f"row {index}", [{"role": "user", "content": f"{index} " + "x" * 100_000}]

    def encoded(turns, tokenizer, template):
        number = int(turns[0]["content"].split()[0])
        return np.full(length, number % VOCAB, np.int32), np.arange(length) > number // VOCAB

    monkeypatch.setattr(module, "conversations", conversations)
    monkeypatch.setattr(module, "encoded", encoded)
    write(tmp_path / "in.jsonl", GOOD)
    tracemalloc.start()
    try:
        _, report = prepare(
            [tmp_path / "in.jsonl"], tmp_path / "out.npz", tokenizer=TOKENIZER, template=QWEN, target="t",
            vocab_size=VOCAB,
        )  # fmt: skip
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    tokens = rows * length
    assert report["statistics"]["tokens"] == tokens
    assert peak < 3.5 * tokens + 20_000_000  # bytearrays grow by an eighth; numpy writes 16 MB at a time


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return world.folder(tmp_path_factory.mktemp("target") / "tiny", make_tokenizer(CHATML))


def command(target, tmp_path, *more):
    return ["prepare", str(tmp_path / "in.jsonl"), "--target", str(target), "--out", str(tmp_path / "out.npz"), *more]


def test_the_command_prints_a_table_and_shows_rows(target, tmp_path, capsys):
    write(tmp_path / "in.jsonl", talks("hello"), talks("world"), {"prompt": "unanswered"})
    assert cli.main(command(target, tmp_path, "--show", "5")) == 0
    shown, errors = capsys.readouterr()
    assert errors == "" and shown.count("--- ") == 2 and "{+hel|lo|<|im_end|>+}" in shown
    assert "dropped: no answer" in shown and "tokenizer" in shown and "tiny" in shown
    assert shown.splitlines()[-1] == f"wrote {tmp_path / 'out.npz'}"
    assert cli.main(command(target, tmp_path)) == 2
    assert "--force" in capsys.readouterr().err
    assert cli.main(command(target, tmp_path, "--force", "--json", "--template", "qwen")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["template"] == "qwen" and report["statistics"]["kept"] == 2
    assert packed(tmp_path / "out.npz").tokens.dtype == np.uint16


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--max-length", "1"], "--max-length: found 1, expected at least 2"),
        (["--max-empty-fraction", "2"], "--max-empty-fraction: found 2.0"),
        (["--show", "1", "--json"], "--show and --json: both"),
        (["--eval", "nowhere.jsonl"], "--eval: no file 'nowhere.jsonl'"),
        (["--template", "llama"], None),
    ],
)
def test_the_commands_errors_are_one_line(target, tmp_path, capsys, more, says):
    write(tmp_path / "in.jsonl", GOOD)
    code = cli.main(command(target, tmp_path, *more))
    shown = capsys.readouterr().err
    assert (code, shown) == (0, "") if says is None else code == 2 and shown.startswith(f"error: {says}"), shown
    assert says is None or shown.count("\n") == 1


def test_a_file_of_another_vocabulary_is_refused_by_the_trainer(tmp_path):
    run(tmp_path, GOOD)
    assert len(load_examples(tmp_path / "out.npz", tokenizer=make_tokenizer(CHATML))) == 1
    assert len(load_examples(tmp_path / "out.npz")) == 1
    other = make_tokenizer()
    other.add_tokens(["<|new|>"])
    with pytest.raises(DataError, match=r"data\.path \(out\.npz\): token ids of another vocabulary, that of 'tiny'"):
        load_examples(tmp_path / "out.npz", tokenizer=other)
