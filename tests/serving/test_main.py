"""`serve.py`: which drafter it takes, what it says, and one whole life with a real (tiny) model."""

from __future__ import annotations

import contextlib
import io
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from jaxspec.config import ServeConfig, load_config
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.serving import main
from jaxspec.serving.client import Client
from jaxspec.serving.progress import Stages
from tests.helpers.marks import REPEATS
from tests.helpers.process import QUICK, environment

GOLDEN = Path(__file__).parents[1] / "golden"
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def config(tmp_path: Path, **values: str) -> ServeConfig:
    path = tmp_path / "serve.yaml"
    given = {
        "target.source": GOLDEN / "targets" / "q3a",
        "server.port": 0,
        "compilation_cache": tmp_path / "xla",
        **values,
    }
    path.write_text("version: 1\ntarget: {source: x, dtype: float32}\n")
    return load_config(ServeConfig, path, [f"{key}={value}" for key, value in given.items()])


def test_untrained_quickstart_serves_plainly_and_names_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main.choose_drafter(main.QUICKSTART_DRAFTER) is None
    said = capsys.readouterr().out
    assert "drafter none" in said and "python train.py --config configs/quickstart.yaml" in said
    Path(main.QUICKSTART_DRAFTER).mkdir(parents=True)
    assert main.choose_drafter(main.QUICKSTART_DRAFTER) == main.QUICKSTART_DRAFTER
    assert capsys.readouterr().out == ""


def test_the_quickstart_config_and_its_training_agree_on_the_path(root):
    serve = load_config(ServeConfig, root / "configs" / "serve" / "quickstart.yaml", [])
    assert serve.drafter == main.QUICKSTART_DRAFTER
    assert main.QUICKSTART_DRAFTER in (root / "configs" / "quickstart.yaml").read_text()


def test_none_is_none():
    assert main.choose_drafter(None) is None and main.choose_drafter("None") is None


def test_a_given_drafter_that_is_absent_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="no-such-drafter"):
        main.run(config(tmp_path, drafter=str(tmp_path / "no-such-drafter")))


def test_stages_are_plain_lines_without_a_terminal():
    out = io.StringIO()
    with Stages(2, Console(file=out, force_terminal=False)) as stages:
        with stages.stage("loading [the] target"):
            pass
        stages.show("compiling")
        stages.done("compiling round", 1.25)
    assert out.getvalue().splitlines() == ["[1/2] loading [the] target: 0.0 s", "[2/2] compiling round: 1.2 s"]


def test_stages_show_a_bar_on_a_terminal():
    out = io.StringIO()
    with Stages(1, Console(file=out, force_terminal=True, width=80)) as stages, stages.stage("loading the target"):
        pass
    assert "loading the target" in out.getvalue() and "1/1" in out.getvalue()


class Process:
    """serve.py as a process; `lines` are those of its stdout."""

    def __init__(self, tmp_path: Path, *arguments: str):
        command = [sys.executable, "-m", "jaxspec", "serve", "--config", str(tmp_path / "serve.yaml"), *arguments]
        env = environment(JAX_PLATFORMS="cpu", XLA_FLAGS=QUICK)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=tmp_path, env=env, **pipes)
        self.errors = ""
        self.lines: list[str] = []
        # stderr is read beside stdout, or a full pipe would stop the server.
        self._reader = threading.Thread(target=lambda: setattr(self, "errors", self.process.stderr.read()))
        self._reader.start()

    def ready(self) -> str:
        """Its address, once it says SERVING."""
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if line.startswith("SERVING on "):
                return line.split()[2]
        raise AssertionError(f"it ended instead: {self.wait()} {self.errors}")

    def wait(self) -> int:
        self.lines += self.process.stdout.read().splitlines()
        code = self.process.wait(60)
        self._reader.join(60)
        return code


@contextlib.contextmanager
def process(tmp_path: Path, *arguments: str) -> Iterator[Process]:
    running = Process(tmp_path, *arguments)
    try:
        yield running
    finally:
        running.process.kill()
        running.wait()
        running.process.stdout.close()
        running.process.stderr.close()


@REPEATS  # `make demo` does it too
def test_served_tokens_with_and_without_a_drafter_are_the_same(tmp_path):
    """Cold start on a folder where nothing was trained, then the same with a drafter; SIGTERM ends both with 0."""
    config(tmp_path)
    common = [f"target.source={GOLDEN / 'targets' / 'q3a'}", "server.port=0", f"compilation_cache={tmp_path / 'xla'}"]
    common += ["engine.num_slots=2", "engine.max_context=64"]
    answers = {}
    for drafter in (main.QUICKSTART_DRAFTER, str(GOLDEN / "03_dflash_gen_q3a" / "draft")):
        with process(tmp_path, *common, f"drafter={drafter}") as running:
            with Client(running.ready()) as client:
                answers[drafter] = client.complete(PROMPT, max_new_tokens=24, ignore_eos=True)
                info = client.info()
            running.process.send_signal(signal.SIGTERM)
            assert running.wait() == 0, running.errors
            assert running.lines[0] == "version: 1" and any("compilation_cache:" in line for line in running.lines)
            assert any("train.py" in line for line in running.lines) == (drafter == main.QUICKSTART_DRAFTER)
            assert "compiling R=2" in running.errors
            assert info.drafter == ("none" if drafter == main.QUICKSTART_DRAFTER else drafter)
    plain, drafted = answers.values()
    assert plain.token_ids == drafted.token_ids and len(plain.token_ids) == 24
    assert plain.usage["proposed"] == 0 and drafted.usage["proposed"] > 0
    assert any((tmp_path / "xla").iterdir()), "the compilation cache holds nothing"


@pytest.mark.ci
def test_a_second_start_compiles_nothing(tmp_path, capsys):
    """Every executable comes out of the cache: ahead-of-time compilation has the same keys in another process."""
    config(tmp_path)
    common = [f"target.source={GOLDEN / 'targets' / 'q3a'}", "server.port=0", f"compilation_cache={tmp_path / 'xla'}"]
    common += ["engine.num_slots=1", "engine.max_context=32", "engine.prefill_chunk=8", "drafter=none"]
    said = []
    for _ in range(2):
        with process(tmp_path, *common) as running:
            running.ready()
            said += [line for line in running.lines if "compilation cache" in line]
            running.process.send_signal(signal.SIGTERM)
            assert running.wait() == 0, running.errors
    assert said[0] == "2 executables are ready, 0 of them from the compilation cache"
    assert said[1] == "2 executables are ready, 2 of them from the compilation cache"


@pytest.mark.ci
def test_keys_that_need_files_and_heads_are_refused_by_name(tmp_path):
    drafter = str(GOLDEN / "03_dflash_gen_q3a" / "draft")
    for changes, message in (
        ({"engine.cost_table": str(tmp_path / "absent.json")}, "cost table"),
        ({"engine.sts_temperatures": str(tmp_path / "absent.json")}, "engine.sts_temperatures"),
        ({"engine.grammar": "true"}, "engine.grammar"),
    ):
        with pytest.raises(ConfigError, match=message):
            main.load(config(tmp_path, drafter=drafter, **changes), lambda: None)


@pytest.mark.ci
def test_sigterm_during_warm_up_ends_with_0(tmp_path):
    config(tmp_path)
    common = [f"target.source={GOLDEN / 'targets' / 'q3a'}", "server.port=0", f"compilation_cache={tmp_path / 'xla'}"]
    with process(tmp_path, *common, "drafter=none") as running:
        for line in running.process.stdout:
            if line.startswith("listening on "):
                break
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == 0, running.errors
        assert not any(line.startswith("SERVING") for line in running.lines)
