"""Two processes in one run directory."""

from __future__ import annotations

import pytest

from jaxspec.errors import ConfigError
from jaxspec.training.directory import locked


def test_a_run_directory_belongs_to_one_process_at_a_time(tmp_path):
    place = tmp_path / "deep" / "run"
    with locked(place), pytest.raises(ConfigError, match=r"run\.directory.*another process"), locked(place):
        raise AssertionError("the second one must not get in")
    with locked(place):  # free again
        assert not place.exists()
