"""Sequential temperature scaling: the fit, its file, and what a drafter does with it (CONTRACTS.md §6.1)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from jaxspec.decoding.sampling import SlotSampling
from jaxspec.drafters.calibration import Calibration
from jaxspec.drafters.markov import calibrate
from jaxspec.errors import ConfigError, DataError
from jaxspec.evaluation.calibration import calibration_error, fit_temperatures, temperature_grid
from tests.drafters import tiny
from tests.drafters.test_proposals import propose

pytestmark = pytest.mark.ci


def test_published_application() -> None:
    np.testing.assert_allclose(
        calibrate(np.full(3, 2.0, np.float32), np.array([0.5, 1, 2], np.float32)),
        [0.98201379, 0.88079708, 0.73105858],
        rtol=1e-6,
    )


def test_an_overconfident_head_is_brought_back() -> None:
    """Logits that say 2.5 times what is true: T within a factor 1.5 of 2.5, mean error below a quarter."""
    rng = np.random.default_rng(0)
    honest = rng.normal(1.5, 1.0, (20_000, 4))
    stands = np.cumprod(rng.random(honest.shape) < 1 / (1 + np.exp(-honest)), axis=1)
    fitted = fit_temperatures(2.5 * honest, stands, dataset="made up")
    assert all(2.5 / 1.5 < one < 2.5 * 1.5 for one in fitted.temperatures)
    assert np.mean(fitted.ece_after) < 0.25 * np.mean(fitted.ece_before)
    assert (fitted.num_samples, fitted.dataset) == (20_000, "made up")


def test_calibration_error_by_hand() -> None:
    """Bins of a half: |.3 - 1| and |.9 + .5 - 1| over three rows; 1.0 falls into the last bin."""
    assert calibration_error(np.array([0.3, 0.9, 0.5]), np.array([1, 1, 0]), bins=2) == pytest.approx((0.7 + 0.4) / 3)
    assert calibration_error(np.array([1.0]), np.array([1.0])) == 0


def test_the_grid_is_logarithmic_and_the_first_of_equals_wins() -> None:
    grid = temperature_grid()
    assert (len(grid), grid[20]) == (41, 1) and np.allclose([grid[0], grid[-1]], [0.1, 10])
    assert fit_temperatures(np.zeros((3, 1)), np.ones((3, 1))).temperatures == (float(grid[0]),)


def test_no_rows_are_refused() -> None:
    for shapes in (((0, 2), (0, 2)), ((3, 2), (3, 1)), ((3,), (3,))):
        with pytest.raises(DataError, match="calibration rows"):
            fit_temperatures(*map(np.ones, shapes))


def test_the_file_survives_and_wrong_ones_are_one_line(tmp_path: Path) -> None:
    path, made = tmp_path / "sts.json", Calibration((0.5, 2.0), "set", 7, (0.1, 0.2), (0.05, 0.06))
    made.save(path)
    assert Calibration.load(path, 2) == made
    with pytest.raises(ConfigError, match="3 positive numbers"):
        Calibration.load(path, 3)
    good = json.loads(path.read_text())
    for wrong in ({"temperatures": [1.0, 0.0]}, {"temperatures": [1.0, True]}, {"temperatures": None}, {"extra": 1}):
        path.write_text(json.dumps(good | wrong))
        with pytest.raises(ConfigError, match=r"sts\.json") as caught:
            Calibration.load(path, 2)
        assert "\n" not in str(caught.value)
    for text in ("[1]", "{"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"sts\.json"):
            Calibration.load(path, 2)


def test_a_drafter_divides_its_logits_by_its_slots_temperatures() -> None:
    plain = tiny.dspark()
    temperatures = (0.5, 1.0, 2.0, 4.0)
    proposals = [
        propose(drafter, SlotSampling.zeros(2))[0]
        for drafter in (plain, dataclasses.replace(plain, temperatures=temperatures))
    ]
    raw = np.asarray(proposals[0].trace["confidence_logits"])
    np.testing.assert_allclose(proposals[0].confidence, calibrate(raw), rtol=1e-6)
    np.testing.assert_allclose(proposals[1].confidence, calibrate(raw / np.array(temperatures, np.float32)), rtol=1e-6)
    np.testing.assert_array_equal(*(proposal.tokens for proposal in proposals))
    for drafter, count in ((tiny.dspark(confidence=False), 4), (plain, 3)):
        with pytest.raises(ConfigError, match="temperatures"):
            dataclasses.replace(drafter, temperatures=(1.0,) * count)
