"""The cache of converted models: where it is, and one maker at a time even across processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec.checkpoints.cache import cache_root, made_once
from jaxspec.errors import CheckpointError

_MAKER = """
import sys, threading
from pathlib import Path
from jaxspec.checkpoints.cache import made_once

def make(directory):
    with open(sys.argv[2], "a") as log:
        log.write("made\\n")
    threading.Event().wait(0.5)
    directory.mkdir()
    (directory / "config.json").write_text("{}")

made_once(Path(sys.argv[1]), make)
assert (Path(sys.argv[1]) / "config.json").is_file()
"""


def test_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "jaxspec"
    assert cache_root(tmp_path / "mine") == tmp_path / "mine"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "jaxspec"


def test_two_processes_make_it_once(tmp_path: Path, root: Path) -> None:
    command = [sys.executable, "-c", _MAKER, str(tmp_path / "targets" / "x"), str(tmp_path / "log")]
    processes = [subprocess.Popen(command, cwd=root) for _ in range(3)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "made\n"


def test_a_failed_maker_leaves_room_for_the_next(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        raise CheckpointError("no")

    with pytest.raises(CheckpointError, match="no"):
        made_once(tmp_path / "x", fail)

    def make(directory: Path) -> None:
        directory.mkdir()
        (directory / "config.json").write_text("{}")

    assert made_once(tmp_path / "x", make) == tmp_path / "x"


def test_unwritable_cache_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="expected a writable cache; set XDG_CACHE_HOME"):
        made_once(tmp_path / "file" / "x", lambda directory: None)
