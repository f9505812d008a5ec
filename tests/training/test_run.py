"""Whole runs: training, logging, resuming in one process, finishing, starting anew, stopping, exporting."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints.drafter import load_drafter
from jaxspec.config import TrainConfig, load_config
from jaxspec.errors import ConfigError, DataError, ResumeError
from jaxspec.training import main
from jaxspec.training.checkpoint import Checkpoints
from jaxspec.training.directory import MARKER
from jaxspec.training.progress import Reporter
from jaxspec.training.state import Placement, create
from tests.helpers.guards import count_compiles
from tests.helpers.marks import REPEATS
from tests.training import world


class Lines(Reporter):
    """Keeps what would be printed; `at` maps a step to something to do when it was done."""

    def __init__(self, at=None):
        super().__init__()
        self.lines, self.at = [], at or {}

    def say(self, text):
        self.lines.append(text)

    def advance(self, step):
        super().advance(step)
        self.at.get(step, lambda: None)()

    @property
    def text(self):
        return "\n".join(self.lines)


@pytest.fixture
def data(tmp_path) -> Path:
    return world.write_data(tmp_path / "data.npz")


def train(config, **options):
    reporter = options.pop("reporter", None) or Lines()
    return main.run(config, target=world.target(), reporter=reporter, **options), reporter


def leaves(directory: Path, step: int):
    """Every array of a checkpoint, by path, as NumPy."""
    from jaxspec.training import optimizer as opt
    from jaxspec.training.build import fresh_drafter, initial_params

    config = load_config(TrainConfig, directory / "config.yaml")
    drafter = fresh_drafter(config, world.MODEL)
    key = jax.random.key(0)
    like = create(initial_params(drafter, key, jnp.float32), opt.build(config.optimizer), key)
    checkpoints = Checkpoints(directory / "checkpoints", 3)
    state, meta = checkpoints.restore(step, like, Placement.of().replicated), checkpoints.meta(step)
    checkpoints.close()
    flat = jax.tree_util.tree_leaves_with_path(state)
    raw = lambda leaf: jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf  # noqa: E731
    return {jax.tree_util.keystr(path): np.asarray(raw(leaf)) for path, leaf in flat}, meta


def assert_same(one: Path, other: Path, step: int):
    first, first_meta = leaves(one, step)
    second, second_meta = leaves(other, step)
    assert first.keys() == second.keys() and any("nu" in name and value.any() for name, value in first.items())
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name], err_msg=name)
    assert first_meta["input"] == second_meta["input"] and first_meta["tokens"] == second_meta["tokens"]


@pytest.mark.parametrize(
    ("method", "dtype"), [("dflash", "float32"), pytest.param("dspark", "bfloat16", marks=REPEATS)]
)
def test_run_trains_logs_and_exports(tmp_path, data, method, dtype):
    config = world.config(tmp_path / "run", data, method, run__tensorboard=True, drafter__dtype=dtype)
    report, reporter = train(config)
    assert report["status"] == "finished" and report["step"] == 10 and report["resumed_from"] is None
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(2, 11, 2))
    assert lines[-1]["loss"] < lines[0]["loss"]
    wanted = {"loss", "loss/ce", "accuracy", "accuracy_position/1", "accuracy_position/3"}
    wanted |= {"tokens_per_second", "step_seconds", "data_wait_seconds", "learning_rate", "grad_norm"}
    assert wanted <= lines[-1].keys()
    assert any((tmp_path / "run" / "tensorboard").iterdir())
    assert load_config(TrainConfig, tmp_path / "run" / "config.yaml") == config
    assert "resolved config" in reporter.text and "num_anchors: 5" in reporter.text
    draft = load_drafter(report["export"], world.target())
    kept, _ = leaves(tmp_path / "run", 10)
    trained = kept[".params['fc']['weight']"]
    np.testing.assert_array_equal(np.asarray(draft.params["fc"]["weight"]), trained.astype(dtype).astype(np.float32))
    assert not np.array_equal(trained, np.asarray(draft.drafter.init(jax.random.key(0), jnp.float32)["fc"]["weight"]))


@pytest.mark.parametrize("accumulation", [2, pytest.param(1, marks=REPEATS)])
@pytest.mark.ci
def test_B56_resume_is_bit_exact_in_mid_epoch(tmp_path, data, accumulation):
    """7 examples, 2 or 4 a step: the stop after step 5 lies inside an epoch; a checkpoint is always a whole step."""
    common = {"optimizer__accumulation": accumulation}
    train(world.config(tmp_path / "straight", data, **common))
    stop = Lines({5: lambda: os.kill(os.getpid(), signal.SIGTERM)})
    report, _ = train(world.config(tmp_path / "halves", data, **common), reporter=stop)
    assert (report["status"], report["reason"], report["step"]) == ("stopped", "SIGTERM", 5)
    assert "same command goes on" in stop.text
    report, reporter = train(world.config(tmp_path / "halves", data, **common))
    assert report["resumed_from"] == 5 and "resuming from the checkpoint at step 5 of 10" in reporter.text
    assert_same(tmp_path / "straight", tmp_path / "halves", 10)
    assert_logged_once(tmp_path / "straight", tmp_path / "halves")


def assert_logged_once(straight: Path, resumed: Path):
    """A resumed run logs every step's window once; the odd one is the window that the stop cut short."""
    steps = [
        [json.loads(line)["step"] for line in (place / "metrics.jsonl").read_text().splitlines()]
        for place in (straight, resumed)
    ]
    assert set(steps[0]) <= set(steps[1]) and len(set(steps[1])) == len(steps[1])


@pytest.mark.ci
def test_finished_run_says_so_and_fresh_starts_anew(tmp_path, data):
    config = world.config(tmp_path / "run", data, run__steps=4)
    train(config)
    report, reporter = train(config)
    assert report["status"] == "already finished" and report["step"] == 4
    assert "this run is finished" in reporter.text and "set run.fresh=true to start anew" in reporter.text
    assert "raise" not in reporter.text.split("this run is finished")[1]  # its schedule depends on its steps
    assert Path(report["export"]).is_dir()
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(report["export"], elsewhere)  # somebody's drafter: to be replaced by this run's, not claimed
    (elsewhere / "config.json").write_text((elsewhere / "config.json").read_text() + "\n")
    report, reporter = train(world.config(tmp_path / "run", data, run__steps=4, run__export=str(elsewhere)))
    assert "drafter exported to" in reporter.text
    assert (elsewhere / "config.json").read_bytes() == (tmp_path / "run" / "export" / "config.json").read_bytes()
    report, reporter = train(world.config(tmp_path / "run", data, run__steps=4, run__fresh=True))
    assert report["status"] == "finished" and report["resumed_from"] is None
    assert (tmp_path / "run.previous" / MARKER).exists()
    report, _ = train(world.config(tmp_path / "run", data, run__steps=4, run__fresh=True))
    assert report["status"] == "finished"


@pytest.mark.parametrize("fresh", [False, True])
def test_a_directory_that_is_no_run_is_left_alone(tmp_path, data, fresh):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"run\.directory"):
        train(world.config(tmp_path / "run", data, run__fresh=fresh))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.txt"]


@pytest.mark.ci
def test_bad_data_writes_nothing_and_keeps_the_earlier_run(tmp_path, data):
    with pytest.raises(DataError, match=r"data\.path"):
        train(world.config(tmp_path / "run", tmp_path / "absent.npz"))
    assert not (tmp_path / "run").exists()
    train(world.config(tmp_path / "run", data, run__steps=4))
    with pytest.raises(DataError, match=r"data\.path"):
        train(world.config(tmp_path / "run", tmp_path / "absent.npz", run__fresh=True))
    assert (tmp_path / "run" / "report.json").exists() and not (tmp_path / "run.previous").exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"run__seed": 7}, "run.seed: the run has 42, now 7"),
        ({"drafter__block_size": 5}, "drafter"),
        pytest.param({"data__num_anchors": 6}, "data.num_anchors", marks=REPEATS),
        pytest.param({"optimizer__learning_rate": 2e-2}, "optimizer.learning_rate", marks=REPEATS),
        pytest.param({"run__steps": 12}, "schedule steps", marks=REPEATS),
    ],
)
@pytest.mark.ci
def test_resume_with_a_changed_config_is_refused(tmp_path, data, change, named):
    train(world.config(tmp_path / "run", data, run__steps=4))
    with pytest.raises(ResumeError, match=r"run\.fresh=true") as caught:
        train(world.config(tmp_path / "run", data, **{"run__steps": 4, **change}))
    assert named in str(caught.value)


@pytest.mark.ci
def test_resume_with_other_data_is_refused_and_free_keys_may_change(tmp_path, data):
    train(world.config(tmp_path / "run", data, run__steps=4))
    with pytest.raises(ResumeError, match=r"data\.content"):
        train(world.config(tmp_path / "run", world.write_data(tmp_path / "other.npz", seed=5), run__steps=4))
    moved = data.rename(tmp_path / "moved.npz")
    free = {"run__log_every": 1, "run__keep": 2, "objective__chunk_blocks": 3}
    report, _ = train(world.config(tmp_path / "run", moved, run__steps=4, **free))
    assert report["status"] == "already finished"


@pytest.mark.ci
def test_seconds_end_a_run_early_and_count_across_processes(tmp_path, data):
    report, _ = train(world.config(tmp_path / "run", data, run__steps=100000, run__seconds=0.3))
    assert report["reason"] == "seconds" and 0 < report["step"] < 100000 and report["status"] == "finished"
    report, reporter = train(world.config(tmp_path / "run", data, run__steps=100000, run__seconds=0.3))
    assert report["status"] == "already finished" and "or raise run.seconds" in reporter.text


def test_a_schedule_needs_a_number_of_steps(tmp_path, data):
    with pytest.raises(ConfigError, match=r"run\.steps"):
        train(world.config(tmp_path / "run", data, run__steps=None, run__seconds=1.0))
    assert not (tmp_path / "run").exists()


@pytest.mark.ci
def test_epochs_set_the_number_of_steps(tmp_path, data):
    report, _ = train(world.config(tmp_path / "run", data, run__steps=None, run__epochs=1))
    assert report["step"] == 4  # ceil(7 examples / 2): the last batch is half padding


@pytest.mark.ci
def test_B66_nothing_compiles_after_the_first_steps(tmp_path, data):
    marks = {}
    with count_compiles() as compiled:
        counts = {step: lambda step=step: marks.update({step: compiled.count}) for step in (3, 10)}
        train(world.config(tmp_path / "run", data, run__checkpoint_every=5), reporter=Lines(counts))
    assert marks[10] == marks[3] > 0


@pytest.mark.ci
def test_evaluation_hook_is_called_with_the_parameters(tmp_path, data):
    seen = []

    def evaluate(target, drafter, shared):
        assert drafter.method == "dflash" and shared.embedding.shape == (world.VOCAB, 16)
        return lambda params: seen.append(float(params["fc"]["weight"][0, 0])) or {"tau": 1.0 + len(seen)}

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "x"}\n')
    config = world.config(tmp_path / "run", data, run__eval_every=5, run__eval_prompts=str(prompts))
    train(config, evaluate=evaluate)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["eval/tau"]) for line in lines if "eval/tau" in line] == [(5, 2.0), (10, 3.0)]
    assert len(set(seen)) == 2


@pytest.mark.ci
def test_starting_from_weights_is_not_resuming(tmp_path, data):
    first, _ = train(world.config(tmp_path / "one", data, run__steps=4))
    report, _ = train(world.config(tmp_path / "two", data, run__steps=4, drafter__source=first["export"],
                                   optimizer__learning_rate=1e-9))  # fmt: skip
    assert report["step"] == 4 and report["resumed_from"] is None
    one, _ = leaves(tmp_path / "one", 4)
    two, _ = leaves(tmp_path / "two", 4)
    name = ".params['fc']['weight']"
    np.testing.assert_allclose(one[name], two[name], atol=1e-7)


@pytest.mark.ci
def test_drafter_of_another_method_is_refused(tmp_path, data):
    first, _ = train(world.config(tmp_path / "one", data, "dspark", run__steps=4))
    with pytest.raises(ConfigError, match=r"drafter\.method"):
        train(world.config(tmp_path / "two", data, drafter__source=first["export"]))
