"""The Client class and `jaxspec client` against a running server."""

from __future__ import annotations

import argparse
import io
import json
import sys

import pytest

from jaxspec.cli import main as cli
from jaxspec.errors import RequestError, ServerError
from jaxspec.serving.client import Client
from tests.helpers.scripted_runner import expected_answer
from tests.serving.harness import Served, serving


@pytest.fixture
def command(served: Served, capsys: pytest.CaptureFixture[str]):
    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli(["client", "--address", served.address, *arguments])
        return code, *capsys.readouterr()

    return run


def test_generate_streams_and_complete_collects(client):
    pieces = list(client.generate("hello", max_new_tokens=9))
    answer = client.complete("hello", max_new_tokens=9)
    assert len(pieces) > 1 and "".join(piece.text for piece in pieces) == answer.text
    assert answer.token_ids == expected_answer(b"hello", 9)
    assert answer.usage["prompt_tokens"] == 5 and answer.usage["completion_tokens"] == 9


def test_three_kinds_of_prompt(client):
    chat = [{"role": "user", "content": "hi"}]
    assert client.complete(chat, max_new_tokens=3).token_ids == expected_answer(b"<user>hi\n<assistant>", 3)
    assert client.complete((104, 105), max_new_tokens=3) != client.complete("hi!", max_new_tokens=3)
    assert client.complete([104, 105], max_new_tokens=3).token_ids == expected_answer(b"hi", 3)


def test_errors_are_typed_and_readable(client):
    with pytest.raises(RequestError, match=r"sampling\.temperature"):
        client.complete("hi", temperature=-1.0)
    with pytest.raises(RequestError, match="temprature"):
        client.complete("hi", temprature=1.0)
    with pytest.raises(RequestError, match="wire format"):
        client.complete([1, 2**40])
    for prompt in ([1.5, 2], [1.0], [True], ["1"], 5):
        with pytest.raises(RequestError, match="wire format"):
            client.complete(prompt)
    for wrong in ({"request_id": "\ud800"}, {"request_id": 3}):
        with pytest.raises(RequestError, match="wire format"):
            client.complete("hi", **wrong)
    with pytest.raises(RequestError, match="wire format"):
        client.complete("\ud800")
    with pytest.raises(ServerError, match="DEADLINE_EXCEEDED"):
        client.complete("hi", timeout=1e-9)


def test_no_server_says_how_to_start_one():
    with serving() as served:
        address = served.address
    with Client(address) as client:
        with pytest.raises(ServerError, match=r"no server at .*serve\.py"):
            client.complete("hi")
        with pytest.raises(ServerError, match="not serving after"):
            client.wait_ready(0.05)


def test_command_prints_text_or_json(command):
    expected = expected_answer(b"hello", 9)
    assert command("hello", "--max-new-tokens", "9") == (0, bytes(expected).decode() + "\n", "")
    code, out, _ = command("hello", "--max-new-tokens", "9", "--json")
    answer = json.loads(out)
    assert code == 0 and answer["token_ids"] == expected and answer["finish_reason"] == "length"
    assert answer["text"] == bytes(expected).decode() and answer["usage"]["completion_tokens"] == 9


def test_command_takes_chat_ids_and_sampling(command):
    _, out, _ = command("--chat", "hi", "--system", "be brief", "--max-new-tokens", "4", "--json")
    assert json.loads(out)["token_ids"] == expected_answer(b"<system>be brief\n<user>hi\n<assistant>", 4)
    _, out, _ = command("--ids", "1, 2 3", "--max-new-tokens", "4", "--json")
    assert json.loads(out)["token_ids"] == expected_answer([1, 2, 3], 4)
    stop = expected_answer([1, 2, 3], 9)[2]
    options = [
        "--temperature",
        "0.5",
        "--top-k",
        "3",
        "--top-p",
        "0.9",
        "--min-p",
        "0.1",
        "--seed",
        "3",
        "--ignore-eos",
    ]
    _, out, _ = command("--ids", "1,2,3", *options, "--stop-token-ids", str(stop), "--json")
    assert json.loads(out)["finish_reason"] == "stop" and len(json.loads(out)["token_ids"]) == 3


def test_a_full_context_is_said(command, client):
    """128 tokens of context, 5 of them the prompt's."""
    assert not client.complete("hello", max_new_tokens=123).context_limit
    answer = client.complete("hello", max_new_tokens=124)
    assert answer.context_limit and answer.finish_reason == "length" and len(answer.token_ids) == 123
    code, out, err = command("hello", "--max-new-tokens", "500")
    assert code == 0 and out == answer.text + "\n"
    assert "context was full after 123 new tokens" in err and err.count("\n") == 1
    assert command("hello", "--max-new-tokens", "9")[2] == ""
    assert json.loads(command("hello", "--max-new-tokens", "500", "--json")[1])["context_limit"] is True


def test_command_reads_the_prompt_from_standard_input(command, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert command("-", "--max-new-tokens", "9")[1] == bytes(expected_answer(b"hello", 9)).decode() + "\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    code, _, err = command("-")
    assert code == 2 and "standard input: nothing" in err


def test_command_info(command):
    code, out, _ = command("--info")
    assert code == 0 and "target: table" in out and "drafter: scripted" in out
    assert json.loads(command("--info", "--json")[1])["max_context"] == 128


def test_command_status(command):
    assert "state: serving" in command("--status")[1]
    assert json.loads(command("--status", "--json")[1])["compilations"] == 0


def test_command_gives_n_answers(command):
    code, out, _ = command("--ids", "1,2", "--n", "2", "--max-new-tokens", "4", "--json", "--priority", "3")
    answers = json.loads(out)["answers"]
    assert code == 0 and [one["token_ids"] for one in answers] == [expected_answer([1, 2], 4, i) for i in (0, 1)]
    _, out, _ = command("--ids", "1,2", "--n", "2", "--max-new-tokens", "4")
    assert out.splitlines() == [f"[{i}] {bytes(expected_answer([1, 2], 4, i)).decode()}" for i in (0, 1)]


def test_command_sends_rules_and_refuses_what_is_no_rule(command, tmp_path):
    rules = ["--repetition-penalty", "1.5", "--presence-penalty", "0.5", "--frequency-penalty", "0.5"]
    more = ["--logit-bias", "3:1.5,4:-2", "--min-new-tokens", "2", "--logprobs", "1", "--prompt-logprobs", "1"]
    code, out, _ = command(
        "--ids", "1,2", *rules, *more, "--stop", "zz", "--stop", "yy", "--max-new-tokens", "4", "--json"
    )
    assert code == 0 and json.loads(out)["token_ids"] == expected_answer([1, 2], 4)
    for arguments, word in [
        (["--logit-bias", "3"], "--logit-bias"),
        (["--logprobs", "2"], "--logprobs: no --json"),
        (["--prompt-logprobs", "2"], "--prompt-logprobs: no --json"),
        (["--marker", "x"], "--grammar"),
        (["--grammar", "abnf", "x"], "--grammar"),
        (["--grammar", "regex", f"@{tmp_path / 'absent'}"], "absent"),
        (["--grammar", "regex", "a+"], "sampling.grammar"),
        (["--repetition-penalty", "0"], "sampling.repetition_penalty"),
    ]:
        code, _, err = command("hello", *arguments)
        assert code == 2 and word in err and err.count("\n") == 1


def test_command_errors_are_one_line_and_exit_2(command, tmp_path):
    for arguments, word in [
        (["hello", "--temperature", "-1"], "temperature"),
        (["--ids", "1,x"], "--ids"),
        (["--ids", "1,9999"], "token_ids[1]"),
        (["--file", str(tmp_path / "absent.jsonl")], "absent.jsonl"),
    ]:
        code, _, err = command(*arguments)
        assert code == 2 and word in err and err.startswith("error: ") and err.count("\n") == 1


def test_command_needs_exactly_one_prompt(command, capsys):
    for arguments in ([], ["hello", "--ids", "1"], ["--info", "--chat", "x"]):
        with pytest.raises(SystemExit) as stopped:
            command(*arguments)
        assert stopped.value.code == 2
    capsys.readouterr()


def test_file_of_prompts_keeps_the_order(command, tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"id": f"p{n}", "token_ids": [n + 1, 5], "licence": "MIT"} for n in range(12)]
    lines[3] |= {"sampling": {"max_new_tokens": 2}}
    lines[4] = {"prompt": "hello"}
    lines[5] = {"id": 5, "messages": [{"role": "user", "content": "hi"}]}
    lines[6] = {"id": "bad", "token_ids": [1], "sampling": {"temperature": -1}}
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    code, out, _ = command("--file", str(path), "--concurrency", "5", "--max-new-tokens", "7")
    answers = [json.loads(line) for line in out.splitlines()]
    assert code == 2 and len(answers) == 12
    for n in (0, 1, 2, 7, 11):
        assert answers[n]["id"] == f"p{n}" and answers[n]["token_ids"] == expected_answer([n + 1, 5], 7)
    assert answers[3]["token_ids"] == expected_answer([4, 5], 2)
    assert answers[4]["token_ids"] == expected_answer(b"hello", 7) and "id" not in answers[4]
    assert "temperature" in answers[6]["error"]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("not json", "not JSON"),
        ('{"id": 1}', "one of"),
        ('{"prompt": "a", "token_ids": [1]}', "one of"),
        ('{"prompt": "a", "sampling": {"max_tokens": 3}}', "max_new_tokens"),
        ('{"token_ids": "12"}', "token_ids: 12, expected a list"),
        ('{"prompt": [1, 2]}', "expected text"),
    ],
)
def test_bad_lines_stop_before_anything_is_sent(command, served, tmp_path, line, word):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    code, out, err = command("--file", str(path))
    assert code == 2 and out == "" and word in err and "line 2" in err
    assert served.runner.admitted == []


def test_help_lists_every_sampling_parameter():
    from jaxspec.serving import client
    from jaxspec.serving.admission import SUPPORTED

    parser = argparse.ArgumentParser()
    client.add_arguments(parser)
    flags = {action.dest for action in parser._actions}
    assert SUPPORTED["SamplingParameters"] <= flags
