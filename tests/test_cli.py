"""The command line: what it prints, where, with which exit code; and the choice of the backend before jax starts."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import jaxspec
from jaxspec import cli, errors, platform
from jaxspec.checkpoints.cache import compilation_cache
from jaxspec.commands import doctor
from tests.helpers.process import run_python


def test_version_and_help_do_not_start_jax() -> None:
    code = """
import sys
from jaxspec.cli import main
for arguments in ([], ["--help"], ["--version"], ["config", "serve", "target.source=a"], ["train", "--help"]):
    try:
        assert main(arguments) == 0
    except SystemExit as end:
        assert end.code == 0, end.code
heavy = {"jax", "flax", "grpc", "transformers", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert f"jaxspec {jaxspec.__version__}" in done.stdout
    for name, (_, summary) in cli.COMMANDS.items():
        assert name in done.stdout and summary in done.stdout
    assert "run.checkpoint_every" in done.stdout


def test_import_jaxspec_does_not_import_jax() -> None:
    done = run_python(
        "-c", "import sys, jaxspec; dir(jaxspec); assert 'jax' not in sys.modules and 'load' in dir(jaxspec)"
    )
    assert done.returncode == 0, done.stderr


def test_unknown_attribute_is_named() -> None:
    with pytest.raises(AttributeError, match="laod"):
        jaxspec.laod  # noqa: B018


@pytest.mark.parametrize("script", [["train.py"], ["serve.py"], ["-m", "jaxspec", "train"], ["-m", "jaxspec", "serve"]])
def test_a_missing_config_is_one_line_and_exit_2(script: list[str]) -> None:
    done = run_python(*script, "--config", "nowhere.yaml")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: config file nowhere.yaml") and done.stderr.count("\n") == 1


def test_entry_points_list_their_keys() -> None:
    train, serve = run_python("train.py", "--help"), run_python("serve.py", "--help")
    assert train.returncode == serve.returncode == 0
    assert "usage: train.py" in train.stdout and "drafter.block_size" in train.stdout
    assert "usage: serve.py" in serve.stdout and "server.port" in serve.stdout


def test_debug_adds_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--debug", "--config", "nowhere.yaml"]) == 2
    shown = capsys.readouterr().err
    assert "Traceback" in shown and shown.splitlines()[-1].startswith("error: ")


def test_overrides_stand_before_and_after_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("version: 1\ntarget: {source: a}\n")
    assert (
        cli.main(["config", "serve", "server.port=1", "--config", str(file), "server.port=2", "--json", "drafter=d"])
        == 0
    )
    shown = json.loads(capsys.readouterr().out)
    assert shown["server"]["port"] == 2 and shown["drafter"] == "d"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bogus"], "'bogus'"),
        (["trian"], "the nearest is train"),
        (["doctor", "extra"], "unknown argument: extra (jaxspec doctor --help"),
        (["doctor", "--jsn"], "unknown argument: --jsn; the nearest is --json"),
        (["client", "hi", "--max-new-token=3"], "the nearest is --max-new-tokens"),
        (["convert", "a", "--target", "t", "--out", "o", "--to", "zlap"], "the nearest is zlab"),
        (["train"], "--config"),
        (["config"], "required"),
        (["config", "srve"], "the nearest is serve"),
        (["train", "--conf", "x"], "--config"),
        (["generate", "--num-slots", "x"], "invalid int value: 'x'"),
        (["--debgu"], "the nearest is --debug"),
    ],
)
def test_usage_errors_are_one_line_with_the_nearest_name(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and shown.count("\n") == 1 and words in shown, shown


def test_doctor_reports_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["jaxspec"] == jaxspec.__version__
    assert report["jax"]["backend"] and report["jax"]["devices"]
    assert set(report["caches"]) == {"compilation", "targets", "hub"}
    assert set(report["caches"]["compilation"]) == {"process", "serve"}
    assert all(entry["chosen"] in entry["available"] for entry in report["kernels"].values())
    assert "array-record" in report["optional"]


def test_doctor_text_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    for heading in ("versions", "optional packages", "machine", "jax", "caches", "kernels"):
        assert f"{heading}\n" in text
    assert cli.main(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == doctor.versions()


def test_doctor_names_the_folder_in_which_serve_keeps_its_executables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli.main(["doctor"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "compilation:" in line]
    assert str(compilation_cache()) in line and str(compilation_cache()).startswith(str(tmp_path))


def test_nothing_of_libtpu_on_a_machine_without_a_tpu() -> None:
    """libtpu writes its complaints from native code, so only a process of its own shows them."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed here")
    if platform.tpu_present():
        pytest.skip("a TPU is attached")
    done = run_python(
        "-m", "jaxspec", "doctor", JAX_PLATFORMS=None, TPU_SKIP_MDS_QUERY=None, TPU_WORKER_HOSTNAMES=None,
        TPU_ACCELERATOR_TYPE=None,
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stderr == ""


def test_conformance_of_an_empty_folder_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["conformance", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "0 passed, 0 failed"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stream", "a", "b"], ["--stream", "2 prompts"]),
        (["a", "--file", "x"], ["--file and PROMPT"]),
        (["--file", "nowhere.jsonl"], ["nowhere.jsonl"]),
        ([], ["PROMPT", "at least one"]),
    ],
)
def test_generate_checks_its_prompts_before_it_loads(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert cli.main(["generate", "--target", "nowhere", *arguments]) == 2
    shown = capsys.readouterr().err
    assert all(word in shown for word in words), shown


@pytest.mark.parametrize(
    ("line", "word"), [("{", "line 2"), ('{"text": 1}', "line 2"), ('{"prompt": 3}', "found 3"), ("[1]", "line 2")]
)
def test_generate_names_the_bad_line(line: str, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n' + line + "\n")
    assert cli.main(["generate", "--target", "nowhere", "--file", str(file)]) == 2
    assert word in capsys.readouterr().err


class Engine:
    """Stands in for a loaded target: answers a prompt with itself in capitals."""

    def generate(self, prompts: list[str], **sampling: object) -> list[SimpleNamespace]:
        assert sampling["max_new_tokens"] == 7 and sampling["seed"] is None
        answer = {"token_ids": (1, 2, 3), "prompt_ids": (9,), "finish_reason": "length", "rounds": 2, "tau": 1.5}
        return [SimpleNamespace(text=prompt.upper(), context_limit="full" in prompt, **answer) for prompt in prompts]

    def stream(self, prompt: str, **sampling: object) -> list[str]:
        return list(prompt.upper())


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    calls: list[dict[str, object]] = []

    def load(target: str, drafter: str | None, **options: object) -> Engine:
        calls.append({"target": target, "drafter": drafter, **options})
        return Engine()

    monkeypatch.setattr("jaxspec.api.load", load)
    return calls


def test_generate_prints_text_json_and_a_stream(
    loaded: list[dict[str, object]], capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["generate", "--target", "t", "--max-new-tokens", "7"]
    assert cli.main([*base, "one"]) == 0
    assert capsys.readouterr().out == "ONE\n"
    assert cli.main([*base, "--drafter", "d", "one", "two"]) == 0
    assert capsys.readouterr().out == "--- one\nONE\n--- two\nTWO\n"
    assert cli.main([*base, "--json", "--drafter", "None", "one"]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == [1, 2, 3]
    assert cli.main([*base, "--stream", "one"]) == 0
    assert capsys.readouterr().out == "ONE\n"
    assert [call["drafter"] for call in loaded] == [None, "d", None, None]
    assert [call["num_slots"] for call in loaded] == [1, 2, 1, 1]


def test_generate_reads_standard_input_and_says_when_the_context_was_full(
    loaded: list[dict[str, object]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = ["generate", "--target", "t", "--max-new-tokens", "7"]
    for arguments in (["-"], []):
        monkeypatch.setattr(sys, "stdin", io.StringIO(" full \n"))
        assert cli.main([*base, *arguments]) == 0
        out, err = capsys.readouterr()
        assert out == " FULL \n" and "context was full after 3 new tokens" in err and err.count("\n") == 1
    assert cli.main([*base, "full", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["context_limit"] is True and err == ""
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert cli.main([*base, "-"]) == 2
    assert "standard input: nothing" in capsys.readouterr().err


def test_generate_refuses_no_slots(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--target", "t", "--num-slots", "0", "one"]) == 2
    assert "--num-slots" in capsys.readouterr().err


def test_interrupt_exits_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "main", interrupted)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_every_error_is_a_jaxspec_error() -> None:
    kinds = [getattr(errors, name) for name in errors.__all__ if name.endswith("Error")]
    assert len(kinds) > 1 and all(issubclass(kind, errors.JaxspecError) for kind in kinds)
    line = errors.problem("run.steps", 0, "a whole number >= 1", "set it")
    assert line == "run.steps: found 0, expected a whole number >= 1; set it"


class Machine:
    """A machine to try quiet_platform on: what is installed and what is plugged in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch
        for name in ("JAX_PLATFORMS", "JAX_FORCE_TPU_INIT", "TPU_LIBRARY_PATH", "TPU_SKIP_MDS_QUERY",
                     "TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE"):  # fmt: skip
            monkeypatch.setenv(name, "")  # so that monkeypatch puts back what quiet_platform sets
            monkeypatch.delenv(name)

    def choose(
        self, *, libtpu: bool = True, tpu: bool = False, nvidia: bool = False, plugins: tuple[str, ...] = ()
    ) -> str | None:
        self.patch.setattr(platform.importlib.util, "find_spec", lambda name: object() if libtpu else None)
        self.patch.setattr(platform, "tpu_present", lambda: tpu)
        self.patch.setattr(platform, "nvidia_present", lambda: nvidia)
        self.patch.setattr(platform, "_plugins", lambda: set(plugins))
        self.patch.delitem(sys.modules, "jax", raising=False)
        return platform.quiet_platform()


def test_quiet_platform_names_the_cpu_when_there_is_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Machine(monkeypatch).choose() == "cpu"
    assert os.environ["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize(
    ("machine", "chosen"),
    [
        ({"tpu": True}, None),
        ({"libtpu": False}, None),
        ({"nvidia": True, "plugins": ("xla_cuda13",)}, "cuda,cpu"),
        ({"nvidia": True}, "cpu"),
        ({"plugins": ("xla_cuda12",)}, "cpu"),
        ({"plugins": ("xla_rocm7",)}, None),
    ],
)
def test_quiet_platform_takes_no_accelerator_away(
    machine: dict, chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Machine(monkeypatch).choose(**machine) == chosen
    assert os.environ.get("JAX_PLATFORMS") == chosen


@pytest.mark.parametrize("explicit", ["", "tpu", "cpu"])
def test_quiet_platform_respects_an_explicit_choice(explicit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    monkeypatch.setenv("JAX_PLATFORMS", explicit)
    assert machine.choose() is None
    assert os.environ["JAX_PLATFORMS"] == explicit
