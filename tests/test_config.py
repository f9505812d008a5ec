"""The typed configuration: round trip, overrides, method defaults, and every refusal with the words that help."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from jaxspec.config import DrafterSection, ServeConfig, TrainConfig, build, describe, load_config, render
from jaxspec.config.loading import nearest_key
from jaxspec.config.schema import walk
from jaxspec.errors import ConfigError
from tests.slow import smoke

BASE = ["target.source=smollm2", "data.path=answers.npz", "run.directory=out/run", "run.steps=3"]
DFLASH = [*BASE, "drafter.method=dflash"]
DSPARK = [*BASE, "drafter.method=dspark"]


def refused(*overrides: str, base: list[str] = DFLASH, model: type = TrainConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(model, None, [*base, *overrides])
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("base", [DFLASH, DSPARK, [*DSPARK, "objective.gamma=null", "drafter.target_layer_ids=[1, 5]"]])
def test_resolved_config_loads_back_to_itself(base: list[str], tmp_path: Path) -> None:
    config = load_config(TrainConfig, None, base)
    file = tmp_path / "resolved.yaml"
    file.write_text(render(config))
    assert load_config(TrainConfig, file) == config
    assert hash(config) == hash(load_config(TrainConfig, file))


def test_method_defaults() -> None:
    dflash, dspark = load_config(TrainConfig, None, DFLASH), load_config(TrainConfig, None, DSPARK)
    assert (dflash.drafter.block_size, dflash.drafter.markov_rank, dflash.drafter.confidence_head) == (16, 0, False)
    assert (dspark.drafter.block_size, dspark.drafter.markov_rank, dspark.drafter.confidence_head) == (7, 256, True)
    assert dspark.drafter.confidence_head_with_markov and dspark.drafter.sample_from_anchor
    assert not dflash.drafter.sample_from_anchor
    assert (dspark.objective.ce_alpha, dspark.objective.l1_alpha, dspark.objective.confidence_alpha) == (0.1, 0.9, 1.0)
    assert (dflash.objective.ce_alpha, dflash.objective.l1_alpha, dflash.objective.confidence_alpha) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize(("block", "gamma"), [(16, 7.0), (15, 5.0), (10, 5.0), (9, 4.0), (8, 4.0), (2, 4.0)])
def test_dflash_gamma_follows_the_block_size(block: int, gamma: float) -> None:
    assert load_config(TrainConfig, None, [*DFLASH, f"drafter.block_size={block}"]).objective.gamma == gamma


def test_gamma_of_dspark_and_no_decay() -> None:
    assert load_config(TrainConfig, None, DSPARK).objective.gamma == 4.0
    assert load_config(TrainConfig, None, [*DFLASH, "objective.gamma=null"]).objective.gamma is None


def test_dspark_without_heads_is_allowed() -> None:
    """DeepSpec's dflash_*_block7 checkpoints: DSpark's class, rank 0, no confidence head."""
    config = load_config(TrainConfig, None, [*DSPARK, "drafter.markov_rank=0", "drafter.confidence_head=false"])
    assert not config.drafter.confidence_head_with_markov
    assert config.objective.confidence_alpha == 0.0


def test_overrides_are_yaml_and_later_ones_win() -> None:
    config = load_config(
        TrainConfig,
        None,
        [*DFLASH, "optimizer.learning_rate=6e-4", "optimizer.learning_rate=1e-3", "drafter.target_layer_ids=[1,9]",
         "run.fresh=true", "run.directory=2026", "run.export=null", "optimizer.clip_norm=2"],
    )  # fmt: skip
    assert config.optimizer.learning_rate == 1e-3 and config.optimizer.clip_norm == 2.0
    assert config.drafter.target_layer_ids == (1, 9)
    assert config.run.fresh and config.run.directory == "2026" and config.run.export is None


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.stpes=3", ["run.stpes", "unknown key", "run.steps"]),
        ("drafter.gamma=3", ["drafter.gamma", "objective.gamma"]),
        ("objectve.gamma=1", ["objectve.gamma", "objective.gamma"]),
        ("target.source.x=1", ["target.source.x", "target.source"]),
        ("sede=1", ["sede", "run.seed"]),
        ("run=3", ["run is a section", "run.directory"]),
        ("run.steps", ["section.key=value"]),
        ("run.steps=abc", ["run.steps", "'abc'", "a whole number >= 1"]),
        ("run.steps=0", ["run.steps", "0", ">= 1"]),
        ("run.steps=1.5", ["run.steps", "1.5", "a whole number"]),
        ("run.steps=[", ["run.steps=[", "not valid YAML"]),
        ("run.fresh=yes", ["run.fresh", "'yes'", "true or false"]),
        ("run.seed=true", ["run.seed", "true", "a whole number"]),
        ("optimizer.learning_rate=-1", ["optimizer.learning_rate", "-1", "> 0"]),
        ("optimizer.learning_rate=.nan", ["optimizer.learning_rate", "nan", "a number"]),
        ("optimizer.b1=1", ["optimizer.b1", "< 1"]),
        ("drafter.method=medusa", ["drafter.method", "'medusa'", "dflash or"]),
        ("drafter.target_layer_ids=[1,a]", ["drafter.target_layer_ids", "a non-empty list of int"]),
        ("drafter.target_layer_ids=[]", ["drafter.target_layer_ids", "non-empty"]),
        ("drafter.target_layer_ids=[3,3]", ["drafter.target_layer_ids", "[3, 3]", "once"]),
        ("drafter.target_layer_ids=[-2]", ["drafter.target_layer_ids", "-2"]),
        ("drafter.head_dim=7", ["drafter.head_dim", "7", "even"]),
        ("drafter.layer_types=[sliding]", ["drafter.layer_types", "'sliding'", "sliding_attention"]),
        ("target.dtype=float16", ["target.dtype", "'float16'", "float32 or bfloat16"]),
        ("version=2", ["version", "found 2", "expected 1"]),
    ],
)
def test_wrong_keys_and_values(override: str, words: list[str]) -> None:
    message = refused(override)
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    ("overrides", "base", "first", "second"),
    [
        (["drafter.markov_rank=8"], DFLASH, "drafter.method", "drafter.markov_rank"),
        (["drafter.markov_head_type=rnn"], DFLASH, "drafter.method", "drafter.markov_head_type"),
        (["drafter.confidence_head=true"], DFLASH, "drafter.method", "drafter.confidence_head"),
        (["drafter.sample_from_anchor=true"], DFLASH, "drafter.method", "drafter.sample_from_anchor"),
        (["drafter.block_size=1"], DFLASH, "drafter.method", "drafter.block_size"),
        (["drafter.block_size=1", "drafter.sample_from_anchor=false"], DSPARK,
         "drafter.block_size", "drafter.sample_from_anchor"),
        (["drafter.markov_rank=0", "drafter.markov_head_type=gated"], DSPARK,
         "drafter.markov_head_type", "drafter.markov_rank"),
        (["drafter.markov_rank=0", "drafter.confidence_head_with_markov=true"], DSPARK,
         "drafter.confidence_head_with_markov", "drafter.markov_rank"),
        (["drafter.confidence_head=false", "drafter.confidence_head_with_markov=true"], DSPARK,
         "drafter.confidence_head_with_markov", "drafter.confidence_head"),
        (["drafter.confidence_head=false", "objective.confidence_alpha=1"], DSPARK,
         "objective.confidence_alpha", "drafter.confidence_head"),
        (["drafter.num_layers=1", "drafter.layer_types=[sliding_attention]"], DFLASH,
         "drafter.layer_types", "drafter.sliding_window"),
        (["drafter.sliding_window=8"], DFLASH, "drafter.sliding_window", "drafter.layer_types"),
        (["drafter.layer_types=[full_attention]"], DFLASH, "drafter.layer_types", "drafter.num_layers"),
        (["drafter.num_heads=3", "drafter.num_kv_heads=2"], DFLASH, "drafter.num_heads", "drafter.num_kv_heads"),
        (["objective.l1_alpha=0.9"], DFLASH, "drafter.method", "objective.l1_alpha"),
        (["objective.lk=tv"], DSPARK, "drafter.method", "objective.lk"),
        (["objective.loss_type=dpace"], DSPARK, "drafter.method", "objective.loss_type"),
        (["objective.ce_alpha=0", "objective.l1_alpha=0"], DSPARK, "objective.ce_alpha", "objective.l1_alpha"),
        (["objective.kl_scale=2"], DFLASH, "objective.kl_scale", "objective.lk"),
        (["objective.dpace_alpha=0.2"], DFLASH, "objective.dpace_alpha", "objective.loss_type"),
        (["run.steps=null"], DFLASH, "run.steps", "run.seconds"),
        (["run.eval_every=5"], DFLASH, "run.eval_every", "run.eval_prompts"),
        (["data.max_length=8", "data.min_loss_tokens=9"], DFLASH, "data.min_loss_tokens", "data.max_length"),
        (["data.max_length=8", "data.anchor_rule=legacy"], DFLASH, "data.max_length", "drafter.block_size"),
    ],
)  # fmt: skip
def test_contradictions_name_both_keys(overrides: list[str], base: list[str], first: str, second: str) -> None:
    message = refused(*overrides, base=base)
    assert first in message and second in message, message


def test_dpace_and_lk_may_stand_together() -> None:
    """A published DFlash 2 recipe uses both."""
    config = load_config(
        TrainConfig, None, [*DFLASH, "objective.loss_type=dpace", "objective.lk=lambda", "objective.kl_scale=1.2"]
    )
    assert (config.objective.loss_type, config.objective.lk, config.objective.kl_scale) == ("dpace", "lambda", 1.2)


@pytest.mark.parametrize("limit", ["run.steps=3", "run.epochs=2", "run.seconds=1.5"])
def test_each_limit_is_enough(limit: str) -> None:
    base = [line for line in DFLASH if not line.startswith("run.steps")]
    assert load_config(TrainConfig, None, [*base, "optimizer.schedule=constant", "optimizer.warmup_ratio=0", limit])


@pytest.mark.parametrize("change", ["optimizer.schedule=constant", "optimizer.warmup_ratio=0"])
def test_a_schedule_needs_a_number_of_steps(change: str) -> None:
    message = refused("run.steps=null", "run.seconds=9", change)
    assert "optimizer.schedule" in message and "run.steps" in message


def test_serve_config() -> None:
    config = load_config(ServeConfig, None, ["target.source=smollm2"])
    assert config.drafter is None and config.server.port == 50051 and config.engine.num_slots == 8
    assert load_config(ServeConfig, None, ["target.source=a", "drafter=none"]).drafter is None
    assert load_config(ServeConfig, None, ["target.source=a", "drafter=123"]).drafter == "123"
    base = ["target.source=a"]
    assert "engine.max_context" in refused(
        "engine.prefill_chunk=99", "engine.max_context=64", base=base, model=ServeConfig
    )
    for changes, word in (
        (["engine.cost_table=t", "engine.tree_nodes=4", "drafter=d"], "engine.cost_table"),
        (["engine.cost_table=t", "engine.confidence_threshold=0.5", "drafter=d"], "engine.confidence_threshold"),
        (["engine.cost_table=t"], "drafter"),
        (["engine.min_verify_rows=2"], "engine.cost_table"),
        (
            ["engine.cost_table=t", "engine.min_verify_rows=3", "engine.max_verify_rows=2", "drafter=d"],
            "max_verify_rows",
        ),
        (["engine.grammar=true", "engine.rules=false"], "engine.rules"),
        (["engine.slot_buckets=[9]"], "engine.num_slots"),
        (["engine.confidence_threshold=2"], "engine.confidence_threshold"),
        (["engine.sts_temperatures=f"], "drafter"),
    ):
        assert word in refused(*changes, base=base, model=ServeConfig)
    assert "65535" in refused("server.port=70000", base=base, model=ServeConfig)
    assert "server.port" in refused("port=1", base=base, model=ServeConfig)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("target: {source: a}\n", ["version: missing", "version: 1"]),
        ("version: 3\n", ["version", "found 3", "expected 1"]),
        ("version: 1\ntarget: 3\n", ["target", "found 3", "a section", "source"]),
        ("version: 1\nrun: {steps: 1, steps: 2}\n", ["steps", "given twice", "line 2"]),
        ("version: 1\n3: x\n", ["3: unknown key"]),
        ("version: 1\n[a]: x\n", ["line 2"]),
        ("version: [\n", ["not valid YAML", "line"]),
        ("- 1\n", ["a mapping of sections"]),
        ("", ["null", "a mapping of sections"]),
    ],
)
def test_bad_files(text: str, words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(TrainConfig, file)
    for word in words:
        assert word in str(caught.value), caught.value


def test_missing_file_folder_and_binary(tmp_path: Path) -> None:
    for path, word in ((tmp_path / "none.yaml", "nothing"), (tmp_path, "a folder")):
        with pytest.raises(ConfigError, match=f"{word} there, expected a YAML file"):
            load_config(TrainConfig, path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(TrainConfig, binary)


def test_file_and_overrides_together(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "version: 1\ntarget: {source: a}\ndrafter: {method: dspark}\nobjective:\noptimizer: {learning_rate: 6e-4}\n"
        "data: {path: x.bin}\nrun: {directory: 2026-01-01, epochs: 2}\n"
    )
    config = load_config(TrainConfig, file, ["run.epochs=3", "objective.gamma=2"])
    assert config.run.epochs == 3 and config.objective.gamma == 2.0
    assert config.optimizer.learning_rate == 6e-4 and config.run.directory == "2026-01-01"
    assert load_config(TrainConfig, file).objective.gamma == 4.0


def test_shipped_configs_load(root: Path) -> None:
    files = sorted((root / "configs").rglob("*.yaml"))
    assert len(files) >= 2
    for file in files:
        model = ServeConfig if file.parent.name == "serve" else TrainConfig
        load_config(model, file)
        assert "# command:" in file.read_text() and "# hardware:" in file.read_text(), f"{file}: header"


def test_every_trainable_method_has_a_config_whose_smoke_command_is_whole() -> None:
    """What the header tells a user to type, loaded: the method's own, limited, and away from the full run's folders."""
    trainable = get_args(DrafterSection.model_fields["method"].annotation)
    assert smoke.methods() == sorted(trainable)
    for method in trainable:
        full = load_config(TrainConfig, smoke.CONFIGS / f"{method}.yaml")
        short = load_config(TrainConfig, smoke.CONFIGS / f"{method}.yaml", smoke.overrides(method))
        assert full.drafter.method == short.drafter.method == method
        assert full.run.directory == f"out/smollm2/{method}" and full.run.export == f"out/smollm2/{method}/drafter"
        assert short.run.steps and smoke.ROOT / short.run.directory == smoke.directory(method)
        assert smoke.ROOT / str(short.run.export) == smoke.export(method)


@pytest.mark.parametrize("model", [TrainConfig, ServeConfig])
def test_help_lists_every_key_with_its_meaning(model: type) -> None:
    text = describe(model)
    for name, field in walk(model):
        assert f"  {name}  " in text, name
        assert field.description and field.description in text, name


def test_nearest_key_of_every_key_with_a_letter_dropped() -> None:
    for name, _ in walk(TrainConfig):
        section, dot, leaf = name.rpartition(".")
        if len(leaf) > 5:
            assert nearest_key(TrainConfig, f"{section}{dot}{leaf[:2]}{leaf[3:]}") == name


def test_config_is_frozen_and_build_reads_mappings() -> None:
    config = build(ServeConfig, {"target": {"source": "a"}, "engine": None})
    with pytest.raises(ValueError, match="frozen"):
        config.version = 2  # type: ignore[misc]
