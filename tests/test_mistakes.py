"""What a user gets wrong is one line that names it, before work is done or anything is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec import cli
from jaxspec.checkpoints.atomic import check_replaceable
from jaxspec.checkpoints.drafter import load_drafter
from jaxspec.checkpoints.target import load_target
from jaxspec.config import ServeConfig, TrainConfig, load_config
from jaxspec.errors import CheckpointError, ConfigError, DataError, RequestError
from jaxspec.evaluation.prompts import read_prompts
from jaxspec.parallel.mesh import tpu_devices
from jaxspec.serving.client import _job, _request
from jaxspec.training import main as training
from jaxspec.training.featurestore.storage import Storage
from tests.helpers.process import run_python
from tests.training import world

LINES = "first\u2028second\u2029third\x85fourth"
RUN = ["target.source=a", "drafter.method=dflash", "data.path=b", "run.directory=out/run", "run.steps=5"]
GOLDEN = Path(__file__).parent / "golden"
LARGE = 2**31


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a command that ends with 2."""
    assert cli.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1, said
    return said


# -- text -------------------------------------------------------------------------------------------------------------


def test_a_prompt_may_hold_every_line_separator_of_unicode(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes("".join(json.dumps({"prompt": p}, ensure_ascii=False) + "\r\n" for p in (LINES, "b")).encode())
    assert read_prompts(file, "--file") == [LINES, "b"]


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_what_a_terminal_cannot_show_is_escaped(encoding: str) -> None:
    code = "import argparse, sys, types; from jaxspec import cli; sys.modules['shown'] = shown = types.ModuleType('s');"
    code += "shown.add_arguments = lambda parser: None; shown.main = lambda args: print('ok \\u65e5 \\U0001f389');"
    code += "cli.COMMANDS['version'] = ('shown', 'x'); sys.exit(cli.main(['version']))"
    done = run_python("-c", code, PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok \\u65e5 \\U0001f389\n", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_finds_no_room_is_one_error() -> None:
    code = "import os, sys; from jaxspec import cli; os.dup2(os.open('/dev/full', os.O_WRONLY), 1);"
    code += "sys.exit(cli.main(['version']))"
    done = run_python("-c", code)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "standard output: No space left" in done.stderr


def test_a_platform_that_is_not_there_is_named_and_the_doctor_still_reports(tmp_path: Path) -> None:
    generate = ["-m", "jaxspec", "generate", "--target", str(GOLDEN / "targets" / "q3a"), "x"]
    done = run_python(*generate, JAX_PLATFORMS="cuda", XLA_FLAGS=None)
    assert done.returncode == 2 and "JAX_PLATFORMS: found cuda, which does not start" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    done = run_python("-m", "jaxspec", "doctor", "--json", JAX_PLATFORMS="cuda", XLA_FLAGS=None)
    assert done.returncode == 0 and json.loads(done.stdout)["jax"]["error"], done.stderr


# -- configs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run.steps", LARGE),
        ("run.steps", 10**30),
        ("optimizer.batch_size", LARGE),
        ("data.max_length", LARGE),
        ("drafter.target_layer_ids", f"[1, {LARGE}]"),
        ("run.seed", 2**32),
        ("run.seed", 10**30),
    ],
)
def test_a_number_that_no_array_can_hold_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}"):
        load_config(TrainConfig, None, [*RUN, f"{key}={value}"])


def test_the_largest_numbers_are_taken() -> None:
    config = load_config(TrainConfig, None, [*RUN, f"run.steps={LARGE - 1}", f"run.seed={2**32 - 1}"])
    assert (config.run.steps, config.run.seed) == (LARGE - 1, 2**32 - 1)
    with pytest.raises(ConfigError, match=r"^engine\.max_context: found 2147483648"):
        load_config(ServeConfig, None, ["target.source=a", f"engine.max_context={LARGE}"])


@pytest.mark.parametrize("export", ["out/run", "out/run/checkpoints", "out/run/best/x", "out", "out/x/../run"])
def test_an_export_where_the_run_writes_is_refused_at_the_start(export: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.export and run\.directory contradict"):
        load_config(TrainConfig, None, [*RUN, f"run.export={export}"])


@pytest.mark.parametrize("export", ["out/run/export", "out/runs", "out/run2", "elsewhere"])
def test_an_export_beside_or_in_a_folder_of_its_own_is_taken(export: str) -> None:
    assert load_config(TrainConfig, None, [*RUN, f"run.export={export}"]).run.export == export


def test_a_place_that_cannot_be_written_is_seen_before_it_is_needed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="file is no folder that can be written"):
        check_replaceable(tmp_path / "file" / "deep" / "export")
    check_replaceable(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("kernel", ["tpu", "gpu"])
def test_a_kernel_of_another_device_is_refused_before_anything_is_written(kernel: str, tmp_path: Path) -> None:
    config = world.config(tmp_path / "run", tmp_path / "absent.npz", run__anchor_attention=kernel)
    with pytest.raises(ConfigError, match=rf"run\.anchor_attention: {kernel}, on a CPU, expected auto"):
        training.run(config, target=world.target())
    assert not (tmp_path / "run").exists()


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--temperature", "nan"], "--temperature"),
        (["--temperature", "-1"], "--temperature"),
        (["--top-p", "2"], "--top-p"),
        (["--min-p", "1"], "--min-p"),
        (["--seed", "-1"], "--seed"),
        (["--max-new-tokens", "-1"], "--max-new-tokens"),
        (["--num-proposals", "0"], "--num-proposals"),
        (["--max-context", "1"], "--max-context"),
    ],
)
def test_generate_checks_its_options_before_it_loads(
    options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"error: {named}: found" in refused(capsys, "generate", "--target", "/absent", *options, "x")


def test_the_other_commands_check_their_sampling_before_they_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "x"}\n')
    common = [str(prompts), "--target", "/absent", "--temperature", "nan", "--out", str(tmp_path / "new.jsonl")]
    assert "--temperature" in refused(capsys, "calibrate", "--drafter", "/absent", *common)
    assert "--temperature" in refused(capsys, "regenerate", *common)
    assert not (tmp_path / "new.jsonl").exists()


def test_options_of_a_plan_need_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("version: 1\n")
    train = ["train", "--config", str(file), *RUN, "--tpu", "v6e:2x2"]
    assert "--tpu: found without --plan" in refused(capsys, *train)
    serve = ["serve", "--config", str(file), "target.source=a"]
    assert "--tpu: found without --plan" in refused(capsys, *serve, "--tpu", "v6e:2x2")
    assert "--cost-table: found without --plan" in refused(capsys, *serve, "--cost-table", "x.json")


def test_profile_looks_at_its_file_before_it_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, there = tmp_path / "x.yaml", tmp_path / "there.json"
    file.write_text("version: 1\ntarget: {source: /absent}\ndrafter: ngram\n")
    there.write_text("{}")
    asked = ["profile", "--config", str(file), "--out"]
    assert "found a folder" in refused(capsys, *asked, str(tmp_path))
    assert "--force replaces it" in refused(capsys, *asked, str(there))
    assert "found no folder" in refused(capsys, *asked, str(tmp_path / "a" / "b.json"))
    assert "/absent" in refused(capsys, *asked, str(there), "--force")
    assert there.read_text() == "{}"


def test_a_request_that_the_wire_cannot_hold_names_the_field() -> None:
    for sampling, priority, named in (
        ({"temperature": 1.0, "max_new_tokens": 2**40}, None, "max_new_tokens"),
        ({"seed": 2**70}, None, "seed"),
        ({}, 2**40, "priority"),
    ):
        with pytest.raises(RequestError, match=f"^{named}; it does not fit the wire format"):
            _request("x", "id", priority, sampling)


# -- folders ----------------------------------------------------------------------------------------------------------


def test_features_are_not_written_among_somebody_elses_files(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(DataError, match=r"features\.path: .*'thesis\.txt' in it, expected a spool"):
        Storage(tmp_path).check_ours(("spool.json",), "a spool")
    with pytest.raises(DataError, match=r"features\.path: the file"):
        Storage(tmp_path / "thesis.txt").check_ours(("spool.json",), "a spool")
    Storage(tmp_path / "new").check_ours(("spool.json",), "a spool")
    (tmp_path / "spool.json").write_text("{}")
    Storage(tmp_path).check_ours(("spool.json",), "a spool")


def test_weights_that_were_cut_to_integers_are_refused(tmp_path: Path) -> None:
    draft = GOLDEN / "03_dflash_gen_q3a" / "draft"
    tensors = load_file(draft / "model.safetensors")
    save_file({**tensors, "fc.weight": tensors["fc.weight"].astype(np.int32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((draft / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"tensor 'fc\.weight': found int32 values, expected floats"):
        load_drafter(tmp_path, load_target(GOLDEN / "targets" / "q3a", dtype="float32"))


# -- what a second user met -------------------------------------------------------------------------------------------


def test_one_stop_string_is_not_its_letters() -> None:
    assert list(_request("x", "id", None, {"stop": "abc"}).sampling.stop) == ["abc"]
    assert list(_request("x", "id", None, {"stop": ["a", "bc"]}).sampling.stop) == ["a", "bc"]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ({"messages": [1]}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"token_ids": ["a"]}, "token_ids"),
        ({"token_ids": [True]}, "token_ids"),
    ],
)
def test_a_clients_line_names_its_wrong_field(line: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=rf"p\.jsonl, line 3, {named}: "):
        _job(tmp_path / "p.jsonl", 3, json.dumps(line))
    assert _job(tmp_path, 1, '{"prompt": "x", "sampling": {"stop": "abc"}}')["sampling"] == {"stop": ["abc"]}


@pytest.mark.parametrize("seconds", ["nan", "-1", "0", "inf", "1e300"])
def test_a_time_limit_is_a_number_of_seconds(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "error: --timeout: found" in refused(capsys, "client", "--timeout", seconds, "x")


@pytest.mark.parametrize("shape", ["0x2", "2x0", "2x-2", "x", "2x", "2.5x2"])
def test_a_topology_has_whole_sides(shape: str) -> None:
    with pytest.raises(ConfigError, match="--tpu: found v5e:"):
        tpu_devices(f"v5e:{shape}")


def test_sizes_that_no_machine_holds_are_refused_with_their_limit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"^drafter\.block_size: found 1025, expected .*1024"):
        load_config(TrainConfig, None, [*RUN, "drafter.block_size=1025"])
    for key, most in (("max_context", 2**24), ("prefill_chunk", 2**20), ("num_slots", 2**16)):
        with pytest.raises(ConfigError, match=rf"^engine\.{key}: found {most + 1}, expected .*{most}"):
            load_config(ServeConfig, None, ["target.source=a", f"engine.{key}={most + 1}"])
    asked = ["generate", "--target", "/absent", "--max-context", str(10**12), "x"]
    assert f"--max-context: found {10**12}, expected 2 to {2**24}" in refused(capsys, *asked)


def test_a_server_whose_platform_does_not_start_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(f"version: 1\ntarget: {{source: {GOLDEN / 'targets' / 'q3a'}}}\n")
    serve = ["-m", "jaxspec", "serve", "--config", str(tmp_path / "x.yaml"), "server.port=0"]
    done = run_python(*serve, JAX_PLATFORMS="cuda", XLA_FLAGS=None)
    assert done.returncode == 2 and "JAX_PLATFORMS: found cuda, which does not start" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and "listening" not in done.stdout + done.stderr


def test_a_target_of_integers_is_refused(tmp_path: Path) -> None:
    target = GOLDEN / "targets" / "q3a"
    for file in target.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"].astype(np.int8)}, file)
    with pytest.raises(CheckpointError, match=r"tensor 'model\.norm\.weight': found int8 values, expected floats"):
        load_target(tmp_path, dtype="float32")


def test_an_export_over_somebody_elses_file_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    config = world.config(tmp_path / "run", tmp_path / "absent.npz", run__export=str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"^run\.export: .*found a file"):
        training.run(config, target=world.target())
