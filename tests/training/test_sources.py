"""Files of rows: every format gives the same rows one at a time; a broken file is one error that names the place."""

from __future__ import annotations

import json
import sys

import pytest

from jaxspec.errors import DataError
from jaxspec.training import sources
from jaxspec.training.records import BadRow, conversations, prompts
from jaxspec.training.sources import rows

ROWS = [{"prompt": f"question {index} é", "answer": "a" * index, "n": [index]} for index in range(9)]


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def read(path):
    return [row for _, row in rows(path, "INPUT")]


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_of_any_layout_is_read_element_by_element(tmp_path, monkeypatch, chunk, indent):
    monkeypatch.setattr(sources, "_CHUNK", chunk)
    path = write(tmp_path / "a.json", "\ufeff \n" + json.dumps(ROWS, indent=indent, ensure_ascii=False) + "\n\n")
    found = list(rows(path, "INPUT"))
    assert [row for _, row in found] == ROWS and found[4][0] == "a.json, row 5"
    assert read(write(tmp_path / "b.json", " [ ] ")) == []


def test_an_array_is_never_whole_in_memory(tmp_path, monkeypatch):
    """The text at hand stays near one element's, whatever the array's length."""
    monkeypatch.setattr(sources, "_CHUNK", 64)
    longest = 0

    class Decoder(json.JSONDecoder):
        def raw_decode(self, text, idx=0):
            nonlocal longest
            longest = max(longest, len(text))
            return super().raw_decode(text, idx)

    monkeypatch.setattr(sources.json, "JSONDecoder", Decoder)
    assert len(read(write(tmp_path / "a.json", ROWS * 200))) == 1800
    assert longest < 4 * 64 + 2 * len(json.dumps(ROWS[-1]))


def test_json_that_is_no_array_holds_one_object_a_line(tmp_path):
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    assert read(write(tmp_path / "a.json", lines)) == read(write(tmp_path / "a.jsonl", "\n" + lines)) == ROWS


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('[{"a": 1} {"a": 2}]', "no comma"),
        ('[{"a": 1}, {"a": 2}', "no end"),
        ('[{"a": 1}, {"a": ', "broken JSON array"),
        ("[1] [2]", "behind its end"),
        ("[1,]", "broken JSON array"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_broken_arrays_name_the_file(tmp_path, content, says):
    with pytest.raises(DataError, match=rf"INPUT \(a\.json\).*{says}"):
        read(write(tmp_path / "a.json", content))


def test_files_that_are_not_rows_are_refused(tmp_path):
    (tmp_path / "latin.json").write_bytes(b'["\xe9"]')
    for name, says in (("absent.jsonl", "no file"), ("a.csv", "ending in"), ("latin.json", "UTF-8")):
        if name == "a.csv":
            write(tmp_path / name, "a,b")
        with pytest.raises(DataError, match=rf"INPUT.*{says}"):
            read(tmp_path / name)


def test_parquet_gives_the_same_rows(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow (extra `data`)")
    parquet = pytest.importorskip("pyarrow.parquet")
    talks = [
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": f"hello {index}"}], "other": None}
        for index in range(700)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(talks), tmp_path / "a.parquet", row_group_size=90)
    write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in talks))
    one, other = (list(conversations(tmp_path / name)) for name in ("a.parquet", "a.jsonl"))
    assert [turns for _, turns in one] == [turns for _, turns in other] and one[299][0] == "a.parquet, row 300"
    (tmp_path / "torn.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    with pytest.raises(DataError, match=r"torn\.parquet\): unreadable"):
        read(tmp_path / "torn.parquet")


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    write(tmp_path / "a.parquet", "x")
    with pytest.raises(DataError, match=r"pyarrow is not installed.*jaxspec-decoding\[data\]"):
        read(tmp_path / "a.parquet")


TALK = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TALK},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
        {"instruction": "q", "input": "", "output": "a", "system": "s", "messages": None},
        {"prompt": "q", "answer": "a", "system": "s"},
        {"prompt": "q", "response": "a", "answer": None, "system": "s"},
        {"prompt": "q", "completion": "a", "system": "s", "id": 3},
        {"messages": [{**turn, "from": None, "name": None} for turn in TALK], "system": None},
    ],
)
def test_every_shape_is_the_same_conversation(tmp_path, row):
    path = write(tmp_path / "a.jsonl", row)
    assert list(conversations(path)) == [("a.jsonl, line 1", TALK)]


def test_an_alpaca_input_follows_its_instruction(tmp_path):
    path = write(tmp_path / "a.jsonl", {"instruction": "Add.", "input": "1 2", "output": "3"})
    ((_, turns),) = conversations(path)
    assert turns == [{"role": "user", "content": "Add.\n1 2"}, {"role": "assistant", "content": "3"}]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "q"}, "no answer"),
        ({"instruction": "q", "input": ["x"], "output": "a"}, "content is not text"),
        ({"prompt": ["q"], "answer": "a"}, "content is not text"),
        ({"messages": [{**TALK[2], "finish_reason": "length"}, *TALK]}, "a cut answer before the last turn"),
        ({"messages": [{"role": "tool", "content": "x"}, *TALK]}, "unknown role"),
    ],
)
def test_rows_that_cannot_be_used_say_why(tmp_path, row, reason):
    ((_, bad),) = conversations(write(tmp_path / "a.jsonl", row))
    assert isinstance(bad, BadRow) and bad.reason == reason


def test_a_question_without_an_answer_is_one_where_that_is_asked_for(tmp_path):
    ((_, turns),) = conversations(write(tmp_path / "a.jsonl", {"prompt": "q"}), answered=False)
    assert turns == [{"role": "user", "content": "q"}]


def test_prompts_of_evaluation_sets(tmp_path):
    lines = [
        {"prompt": "p"},
        {"question": "g", "answer": "4"},
        {"turns": ["t", "u"]},
        "s",
        {"messages": [*TALK, *TALK]},
    ]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in lines))
    assert list(prompts(path, "--eval")) == ["p", "g", "t", "u", "s", "q", "q"]
    for row in ({"prompt": 3}, {"turns": []}, {"messages": [{"role": "robot", "content": "x"}]}, 3):
        with pytest.raises(DataError, match=r"--eval \(b\.jsonl, line 1\)"):
            list(prompts(write(tmp_path / "b.jsonl", row), "--eval"))
