"""Two processes in one run directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxspec.errors import ConfigError
from jaxspec.training.directory import locked


def test_a_run_directory_belongs_to_one_process_at_a_time(tmp_path):
    place = tmp_path / "deep" / "run"
    with locked(place), pytest.raises(ConfigError, match=r"run\.directory.*another process"), locked(place):
        raise AssertionError("the second one must not get in")
    with locked(place):  # free again
        assert not place.exists()


def test_the_current_folder_can_be_a_run_directory(tmp_path, monkeypatch):
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    with locked(Path(".")):
        assert (tmp_path / "here.lock").exists()
