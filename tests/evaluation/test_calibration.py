"""Sequential temperature scaling: the fit, its file, and what a drafter does with it (CONTRACTS.md §6.1)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from jaxspec import cli
from jaxspec.decoding.generate import generate
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import RoundTrace, SlotRunner
from jaxspec.decoding.sampling import SlotSampling
from jaxspec.drafters.calibration import Calibration
from jaxspec.drafters.markov import calibrate
from jaxspec.errors import ConfigError, DataError
from jaxspec.evaluation.calibration import Rounds, calibration_error, fit_temperatures, reliability, temperature_grid
from tests.drafters import tiny
from tests.drafters.test_proposals import propose
from tests.helpers import worlds

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


def test_rows_come_from_the_rounds_that_looked_at_every_proposal() -> None:
    target = worlds.tiny_target()
    draft = worlds.tiny_draft(target, "dspark")
    rounds = Rounds(draft.drafter)
    runner = SlotRunner(target, draft, num_slots=2, max_context=40, page_size=4, observe=rounds)
    done = generate(runner, [[5, 6, 7], [8, 9], [4] * 9], SamplingParams(max_new_tokens=20, ignore_eos=True))
    logits, accepted = rounds.rows()
    m = draft.drafter.num_proposals
    lengths = [length for one in done for length in one.accepted]
    assert logits.shape == accepted.shape == (len(logits), m)
    assert sorted(accepted.sum(axis=1)) == sorted(lengths)
    assert (np.diff(accepted, axis=1) <= 0).all(), "a prefix stands or it does not"
    assert len(np.unique(logits)) > m, "no logits of the drafter"


def test_rounds_cut_by_the_contexts_end_do_not_count() -> None:
    rounds = Rounds(tiny.dspark())
    whole, cut = (
        RoundTrace(1, 1, verified, {"confidence_logits": np.full(4, float(verified), np.float32)})
        for verified in (4, 2)
    )
    for trace in (cut, whole, cut):
        rounds(trace)
    logits, accepted = rounds.rows()
    np.testing.assert_array_equal(logits, [[4.0] * 4])
    np.testing.assert_array_equal(accepted, [[1, 0, 0, 0]])


def test_only_raw_confidence_of_a_head_is_collected() -> None:
    for drafter in (tiny.dflash(), tiny.dspark(confidence=False)):
        with pytest.raises(ConfigError, match="confidence head"):
            Rounds(drafter)
    with pytest.raises(ConfigError, match="leave the STS file out"):
        Rounds(dataclasses.replace(tiny.dspark(), temperatures=(1.0,) * 4))
    with pytest.raises(DataError, match="no whole round"):
        Rounds(tiny.dspark()).rows()


def test_reliability_by_hand() -> None:
    """Survival .8 and .4 of one slot: Brier (.04 + .16) / 2; of three, one pair of two ranked right and one tied."""
    odds = lambda p: np.log(p / (1 - p))  # noqa: E731
    logits = np.array([[odds(0.8), 0.0], [odds(0.4), 0.0]])
    first, second = reliability(logits, np.array([[1, 1], [0, 0]]))
    assert (first.accepted, first.auroc) == (0.5, 1.0)
    assert first.brier == pytest.approx((0.2**2 + 0.4**2) / 2)
    assert second.brier == pytest.approx((0.6**2 + 0.2**2) / 2)  # survival is the product: .4 and .2
    three = reliability(np.array([[1.0], [2.0], [1.0]]), np.array([[1], [0], [0]]))[0]
    assert three.auroc == pytest.approx(0.25)
    assert reliability(logits, np.ones((2, 2)))[0].auroc is None
    hot = reliability(logits, np.array([[1, 1], [0, 0]]), [1e9, 1.0])[0]
    assert hot.brier == pytest.approx(0.25)


def test_the_command_writes_what_a_server_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = worlds.tiny_target()
    draft = worlds.tiny_draft(target, "dspark")
    monkeypatch.setattr("jaxspec.checkpoints.target.load_target", lambda source, dtype: target)
    monkeypatch.setattr("jaxspec.checkpoints.drafting.open_drafter", lambda source, loaded: (draft, None))
    monkeypatch.setattr("jaxspec.checkpoints.tokenizer.load_tokenizer", lambda directory: None)
    monkeypatch.setattr("jaxspec.checkpoints.tokenizer.chat_ids", lambda tokenizer, text: [len(text), 5])
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "sts.json"
    prompts.write_text('{"prompt": "one"}\n{"prompt": "three"}\n')
    command = ["calibrate", str(prompts), "--target", "t", "--drafter", "d", "--out", str(out)]
    assert cli.main([*command, "--max-new-tokens", "12", "--max-context", "64", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    loaded = Calibration.load(out, draft.drafter.num_proposals)
    assert list(loaded.temperatures) == said["temperatures"]
    assert (loaded.dataset, loaded.num_samples) == ("prompts.jsonl", said["num_samples"])
    assert [one["ece"] for one in said["after"]] == pytest.approx(loaded.ece_after)
    assert [one["ece"] for one in said["before"]] == pytest.approx(loaded.ece_before)
    assert cli.main(command) == 2, "a file that exists is not replaced unasked"
    assert "--force replaces it" in capsys.readouterr().err
    assert cli.main([*command, "--max-new-tokens", "12", "--max-context", "64", "--force"]) == 0
    assert capsys.readouterr().out.count("->") == 1 + 3 + 3 * draft.drafter.num_proposals


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["--out", "nowhere/sts.json"], "found no folder"),
        (["--num-slots", "0"], "--num-slots: found 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens: found 0"),
    ],
)
def test_the_command_refuses_before_it_loads(
    changes: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n')
    base = ["calibrate", str(prompts), "--target", "nowhere", "--drafter", "d", "--out", str(tmp_path / "x.json")]
    assert cli.main([*base, *changes]) == 2
    assert said in capsys.readouterr().err
