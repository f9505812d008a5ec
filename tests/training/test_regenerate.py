"""`jaxspec regenerate`: every question answered in order, once, whatever the moment of a kill; and what it feeds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from jaxspec import cli
from jaxspec.checkpoints.target import load_target
from jaxspec.decoding.generate import generate
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import Event, SlotRunner
from jaxspec.errors import DataError, ResumeError
from jaxspec.training.data import load_examples
from jaxspec.training.journal import Journal, finished, locked, partial_path
from jaxspec.training.records import BadRow
from jaxspec.training.regenerate import CUT, TOO_LONG, plan, regenerate
from jaxspec.training.templates import QWEN
from jaxspec.training.tokenise import encode
from tests.helpers.marks import REPEATS
from tests.helpers.process import QUICK, environment
from tests.training import world
from tests.training.test_data import write
from tests.training.test_templates import CHATML, make_tokenizer, talk

TOKENIZER = make_tokenizer()
EOT = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
RECORD = {"target": "echo", "seed": 3, "inputs": [1]}


class Killed(BaseException):
    """Stands in for SIGKILL where a process of its own would cost seconds: nothing may catch it."""


class Echo:
    """An engine that answers "re: " and the last question, two tokens a round, later slots first."""

    def __init__(self, slots=3, max_context=400):
        self.max_context, self.slots = max_context, slots
        self.running: dict[int, list[int]] = {}
        self.prompts: list[str] = []
        self.seeds: list[int] = []

    @property
    def free_slots(self):
        return self.slots - len(self.running)

    def admit(self, prompt, params):
        assert len(prompt) < self.max_context and self.free_slots
        text = TOKENIZER.decode(prompt)
        question = text.split("<|im_start|>user\n")[-1].removesuffix("<|im_end|>\n<|im_start|>assistant\n")
        answer = TOKENIZER.encode(f"re: {question}", add_special_tokens=False)
        self.prompts.append(text)
        self.seeds.append(params.seed)
        room = min(params.max_new_tokens, self.max_context - len(prompt))
        handle = len(self.prompts)
        self.running[handle] = ([*answer, EOT])[:room]
        return handle

    def step(self):
        events = []
        for handle in sorted(self.running, reverse=True):
            now, self.running[handle] = self.running[handle][:2], self.running[handle][2:]
            reason = None
            if not self.running[handle]:
                reason = "stop" if now[-1] == EOT else "length"
                del self.running[handle]
            events.append(Event(handle, tuple(now), reason))
        return events


def run(tmp_path, *rows, engine=None, record=RECORD, journal=Journal, **sampling):
    source = write(tmp_path / "in.jsonl", *rows) if rows else tmp_path / "in.jsonl"
    params = SamplingParams(**{"max_new_tokens": 60, **sampling})
    with locked(tmp_path / "out.jsonl"), journal(tmp_path / "out.jsonl", record) as book:
        return regenerate(
            [source], book, engine=engine or Echo(), tokenizer=TOKENIZER, template=QWEN, sampling=params, seed=3,
            about={"target": "echo", "revision": "r"},
        )  # fmt: skip


def read(tmp_path):
    return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]


ROWS = [
    {"messages": talk("old", "older", "oldest", system="be brief")},
    {"prompt": "one?"},
    {"conversations": [{"from": "human", "value": "two\u2603?"}, {"from": "gpt", "value": "old"}]},
    {"instruction": "add", "input": "1 2", "output": "3"},
    *({"prompt": f"number {index}?"} for index in range(5)),
]


def test_every_question_is_answered_in_order_and_in_its_context(tmp_path):
    engine = Echo()
    account = run(tmp_path, *ROWS, engine=engine)
    rows = read(tmp_path)
    assert [row["id"] for row in rows] == list(range(1, 10)) and rows[2]["source"] == "in.jsonl, line 3"
    first = rows[0]["messages"]
    assert [turn["role"] for turn in first] == ["system", *["user", "assistant"] * 3]
    assert [turn["content"] for turn in first[2::2]] == [f"re: question {index} \u2603" for index in range(3)]
    last = next(prompt for prompt in engine.prompts if "question 2" in prompt)
    assert "re: question 0" in last and "re: question 1" in last and "old" not in last
    assert rows[3]["messages"] == [
        {"role": "user", "content": "add\n1 2"},
        {"role": "assistant", "content": "re: add\n1 2", "finish_reason": "stop"},
    ]
    generated = rows[1]["generated"]
    assert generated["sampling"] == {
        "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_new_tokens": 60, "seed": 3,
    }  # fmt: skip
    assert (generated["target"], generated["revision"], generated["ended"]) == ("echo", "r", None)
    assert generated["answers"][0]["finish_reason"] == "stop" and generated["answers"][0]["same_ids"]
    assert (account["rows"], account["answers"], account["finish_reasons"]) == (9, 11, {"stop": 11})
    assert account["answers_with_the_same_ids"] == 11 and account["record"] == RECORD
    assert len(set(engine.seeds)) == 11
    assert {path.name for path in tmp_path.iterdir()} - {".out.jsonl.lock"} == {
        "in.jsonl",
        "out.jsonl",
        "out.jsonl.json",
    }


def test_B53_what_the_target_said_is_what_is_supervised(tmp_path):
    """Prompt and answer as they were in the engine, token by token, are the training example."""
    engine = Echo()
    run(tmp_path, *ROWS, engine=engine)
    examples = load_examples(tmp_path / "out.jsonl", tokenizer=TOKENIZER, template="qwen")
    assert len(examples) == 9 and not examples.statistics.dropped
    row = examples[1]
    ids, mask = row["input_ids"], row["loss_mask"]
    first = int(mask.argmax())
    assert TOKENIZER.decode(ids[:first]) in engine.prompts
    assert ids[first:].tolist() == [*TOKENIZER.encode("re: one?"), EOT, *TOKENIZER.encode("\n")]


def test_a_cut_answer_ends_its_conversation_and_is_named(tmp_path):
    account = run(tmp_path, ROWS[0], {"prompt": "a"}, max_new_tokens=7)
    first, second = read(tmp_path)
    assert first["messages"][-1]["finish_reason"] == "length" and len(first["messages"]) == 3
    assert first["generated"]["answers"][0]["tokens"] == 7 and first["generated"]["ended"] == CUT
    assert account["shortened"] == {CUT: ["in.jsonl, line 1"]} and second["messages"][-1]["finish_reason"] == "stop"
    ids, mask = encode(TOKENIZER, QWEN, first["messages"], 1 << 20)
    assert mask[-1] and EOT not in ids[mask]


def test_rows_that_do_not_fit_or_ask_nothing_are_counted_and_named(tmp_path):
    rows = [
        {"prompt": "long " * 90},
        {"prompt": "fits"},
        {"messages": [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "hi"}]},
        {"messages": [{"role": "system", "content": "hello"}]},
        {"messages": [*talk("a"), {"role": "user", "content": "long " * 90}]},
        {"messages": [{"role": "robot", "content": "x"}]},
    ]
    account = run(tmp_path, *rows, engine=Echo(max_context=200))
    assert account["dropped"] == {
        TOO_LONG: ["in.jsonl, line 1"],
        "an answer before the first question": ["in.jsonl, line 3"],
        "no question": ["in.jsonl, line 4"],
        "unknown role": ["in.jsonl, line 6"],
    }
    assert account["shortened"] == {TOO_LONG: ["in.jsonl, line 5"]}
    kept = read(tmp_path)
    assert [row["id"] for row in kept] == [2, 5] and [len(row["messages"]) for row in kept] == [2, 2]


def test_plans():
    user, answer, system = ({"role": role, "content": role} for role in ("user", "assistant", "system"))
    assert plan([system, user, answer, user]) == [system, user, None, user, None]
    assert plan([user, answer, answer, user, user, answer, system]) == [user, None, user, user, None]
    for turns in ([], [system], [answer, user], [system, answer]):
        with pytest.raises(BadRow):
            plan(turns)


def killing(at, torn=0):
    """A journal that dies behind its `at`-th row, of which `torn` bytes are missing then."""

    class Dying(Journal):
        count = 0

        def append(self, row):
            super().append(row)
            self.count += 1
            if self.count == at:
                if torn:
                    self._file.truncate(self._file.seek(0, os.SEEK_END) - torn)
                raise Killed

    return Dying


@pytest.mark.parametrize("torn", [0, 1, 30])
@pytest.mark.parametrize("at", [1, 4, 9])
def test_B56_a_kill_behind_any_row_loses_nothing_and_repeats_nothing(tmp_path, at, torn):
    (tmp_path / "whole").mkdir()
    expected = run(tmp_path / "whole", *ROWS)
    with pytest.raises(Killed):
        run(tmp_path, *ROWS, journal=killing(at, torn))
    assert not (tmp_path / "out.jsonl").exists() and partial_path(tmp_path / "out.jsonl").exists()
    left = 9 - at + (torn > 0)
    if left > 1:  # a second death, behind what the first one tore
        with pytest.raises(Killed):
            run(tmp_path, journal=killing(1))
        left -= 1
    engine = Echo()
    assert run(tmp_path, engine=engine) == expected
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole" / "out.jsonl").read_bytes()
    assert len({prompt.split("<|im_start|>user\n")[1].split("<|im_end|>")[0] for prompt in engine.prompts}) == left


def test_a_kill_inside_the_record_or_the_finish_starts_or_ends_as_if_there_had_been_none(tmp_path, monkeypatch):
    expected = run(tmp_path, *ROWS)
    whole = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "out.jsonl").unlink()
    partial_path(tmp_path / "out.jsonl").write_bytes(b'{"record": {"tar')
    assert run(tmp_path) == expected
    (tmp_path / "out.jsonl").unlink()

    def finish(self, rows, account):
        with monkeypatch.context() as patch:
            patch.setattr("jaxspec.training.journal.account_path", lambda out: out / "no" / "place")
            return Journal.finish(self, rows, account)

    with pytest.raises(DataError, match="cannot be written"):
        run(tmp_path, journal=type("Torn", (Journal,), {"finish": finish}))
    engine = Echo()
    assert run(tmp_path, engine=engine) == expected and not engine.prompts
    assert (tmp_path / "out.jsonl").read_bytes() == whole and not partial_path(tmp_path / "out.jsonl").exists()


def test_another_record_is_refused_with_what_changed(tmp_path):
    with pytest.raises(Killed):
        run(tmp_path, *ROWS, journal=killing(2))
    other = {**RECORD, "seed": 4, "temperature": 1.0}
    with pytest.raises(ResumeError, match=r"seed: the run has 3, now 4; temperature: .*now 1\.0.*--force"):
        run(tmp_path, record=other)
    run(tmp_path)
    with Journal(tmp_path / "new.jsonl", RECORD) as book:  # no row was made with it
        assert 1 not in book and not len(book)
    with Journal(tmp_path / "new.jsonl", other) as book:
        book.append({"id": 1})
    with pytest.raises(ResumeError, match="seed: the run has 4, now 3"):
        Journal(tmp_path / "new.jsonl", RECORD)
    assert finished(tmp_path / "out.jsonl", RECORD)["rows"] == 9
    with pytest.raises(ResumeError, match="seed: the run has 3, now 4"):
        finished(tmp_path / "out.jsonl", other)
    (tmp_path / "out.jsonl.json").unlink()
    with pytest.raises(ResumeError, match="without a record"):
        finished(tmp_path / "out.jsonl", RECORD)


def test_a_broken_row_and_a_second_process_are_refused(tmp_path):
    with pytest.raises(Killed):
        run(tmp_path, *ROWS, journal=killing(3))
    with locked(tmp_path / "out.jsonl"), pytest.raises(DataError, match="in use by another process"):
        run(tmp_path)
    partial = partial_path(tmp_path / "out.jsonl")
    lines = partial.read_bytes().splitlines(keepends=True)
    partial.write_bytes(b"".join([lines[0], b"{broken}\n", *lines[2:]]))
    with pytest.raises(DataError, match=r"partial, line 2: a broken row"):
        run(tmp_path)


CHILD = """
import os, signal, sys
from pathlib import Path
from tests.training.test_regenerate import Echo, run

class Dying(Echo):
    def step(self):
        if len(self.prompts) >= int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step()

run(Path(sys.argv[1]), engine=Dying())
"""


@pytest.mark.ci
@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
def test_B56_three_sigkills_of_a_real_process(tmp_path):
    (tmp_path / "whole").mkdir()
    expected = run(tmp_path / "whole", *ROWS)
    write(tmp_path / "in.jsonl", *ROWS)
    for prompts in (5, 5, 99):
        command = [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path), str(prompts)]
        quick = environment(XLA_FLAGS=QUICK)
        done = subprocess.run(command, env=quick, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == (0 if prompts == 99 else -signal.SIGKILL), done.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole" / "out.jsonl").read_bytes()
    assert json.loads((tmp_path / "out.jsonl.json").read_text(encoding="utf-8")) == expected


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return world.folder(tmp_path_factory.mktemp("target") / "tiny", make_tokenizer(CHATML))


@pytest.mark.ci
@pytest.mark.parametrize("temperature", [pytest.param("0", marks=REPEATS), "1"])
def test_the_command_answers_as_the_target_does_and_prepare_reads_it(target, tmp_path, capsys, temperature):
    rows = [{"prompt": f"hello {'world ' * index}"} for index in range(5)]
    rows += [{"messages": [*talk("a"), {"role": "user", "content": text}]} for text in "xyz"]
    write(tmp_path / "in.jsonl", *rows)
    command = ["regenerate", str(tmp_path / "in.jsonl"), "--target", str(target), "--out", str(tmp_path / "out.jsonl")]
    command += ["--max-new-tokens", "24", "--max-context", "160", "--num-slots", "3", "--temperature", temperature]
    assert cli.main([*command, "--drafter", "ngram"]) == 0
    shown = capsys.readouterr().out
    assert "rows         8" in shown and f"wrote {tmp_path / 'out.jsonl'}" in shown
    answers = read(tmp_path)
    if temperature == "0":
        loaded, tokenizer = load_target(target, dtype="float32"), make_tokenizer(CHATML)
        runner = SlotRunner(loaded, None, num_slots=1, max_context=160, prefill_chunk=32)
        for row in answers[:3]:
            prompt = tokenizer.apply_chat_template(row["messages"][:1], tokenize=False) + "<|im_start|>assistant\n"
            ids = tokenizer.encode(prompt, add_special_tokens=False)
            (lone,) = generate(runner, [ids], SamplingParams(max_new_tokens=24))
            said = lone.tokens[:-1] if lone.finish_reason == "stop" else lone.tokens
            assert row["messages"][1]["content"] == tokenizer.decode(said)
            assert row["messages"][1]["finish_reason"] == lone.finish_reason
            assert row["generated"]["answers"][0]["tokens"] == len(lone.tokens)
    before = (tmp_path / "out.jsonl").read_bytes()
    assert cli.main([*command, "--drafter", "ngram"]) == 0
    assert "is finished" in capsys.readouterr().out
    assert cli.main([*command, "--drafter", "ngram", "--seed", "1"]) == 2
    assert "seed: the run has 0, now 1" in capsys.readouterr().err
    if temperature == "1":
        assert cli.main([*command, "--drafter", "ngram", "--force", "--num-slots", "2", "--json"]) == 0
        account = json.loads(capsys.readouterr().out)
        assert (tmp_path / "out.jsonl").read_bytes() == before  # whatever runs beside an answer
        assert sum(account["finish_reasons"].values()) == account["answers"] > 8
        assert len(account["finish_reasons"]) == 2
    prepared = ["prepare", str(tmp_path / "out.jsonl"), "--target", str(target), "--out", str(tmp_path / "out.npz")]
    assert cli.main([*prepared, "--max-empty-fraction", "1"]) == 0
    assert "kept" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--num-slots", "0"], "--num-slots: found 0, expected at least 1"),
        (["--max-new-tokens", "0"], "--max-new-tokens: found 0"),
        (["--out", "out.json"], "--out: out.json, expected a name ending in .jsonl"),
        (["--out", "in.jsonl", "--force"], "--out: in.jsonl, which would replace the input in.jsonl"),
        (["--target", "nowhere/at/all"], "target: nowhere/at/all"),
    ],
)
def test_the_commands_errors_are_one_line(tmp_path, capsys, monkeypatch, more, says):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in.jsonl", ROWS[1])
    assert cli.main(["regenerate", "in.jsonl", "--target", "nowhere/at/all", "--out", "out.jsonl", *more]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: {says}") and shown.count("\n") == 1, shown
    assert not (tmp_path / "out.jsonl").exists() and not partial_path(tmp_path / "out.jsonl").exists()


def test_force_with_a_wrong_target_keeps_the_rows_that_are_there(tmp_path, capsys):
    with pytest.raises(Killed):
        run(tmp_path, *ROWS, journal=killing(2))
    before = partial_path(tmp_path / "out.jsonl").read_bytes()
    command = ["regenerate", str(tmp_path / "in.jsonl"), "--target", "nowhere/at/all", "--force"]
    assert cli.main([*command, "--out", str(tmp_path / "out.jsonl")]) == 2
    assert "nowhere/at/all" in capsys.readouterr().err
    assert partial_path(tmp_path / "out.jsonl").read_bytes() == before
