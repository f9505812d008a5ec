"""Methods from other packages: the example of docs/adding-a-drafter.md, installed as it stands there, and faults."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints.drafter import Draft, load_drafter, save_drafter
from jaxspec.checkpoints.drafting import open_drafter
from jaxspec.checkpoints.target import load_target
from jaxspec.decoding.generate import count, generate
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import SlotRunner
from jaxspec.drafters import plugins, registry
from jaxspec.drafters.plugins import Plugin, extended
from jaxspec.errors import ConfigError
from tests.helpers.worlds import GOLDEN, TINY, tiny_target
from tests.oracle import world

ROOT = Path(__file__).resolve().parents[2]
LAG = world.PROPOSALS + 1


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A folder that is searched for packages, and forgotten afterwards."""
    folder = tmp_path / "site"
    folder.mkdir()
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    plugins.installed.cache_clear()
    yield folder
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    plugins.installed.cache_clear()


@pytest.fixture
def window(site: Path, tmp_path: Path) -> Any:
    """The documented package, built and installed by pip; nothing but the two files of the page."""
    text = (ROOT / "docs" / "adding-a-drafter.md").read_text(encoding="utf-8")
    (toml,) = re.findall(r"```toml\n(.*?)```", text, re.S)
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(code.splitlines()) < 90 and sum(bool(line.strip()) for line in code.splitlines()) < 80
    source = tmp_path / "source"
    source.mkdir()
    (source / "pyproject.toml").write_text(toml, encoding="utf-8")
    (source / "window_drafter.py").write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "--target", str(site), str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    importlib.invalidate_caches()
    plugins.installed.cache_clear()
    return registry.methods()["window"]


def hand_made(site: Path, package: str, method: str, code: str) -> None:
    """A distribution without pip: a module and its dist-info."""
    module = package.replace("-", "_")
    (site / f"{module}.py").write_text(code, encoding="utf-8")
    info = site / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[jaxspec.drafters]\n{method} = {module}:Drafter\n", encoding="utf-8")
    importlib.invalidate_caches()
    plugins.installed.cache_clear()


@pytest.mark.ci
def test_the_documented_method_passes_identity_oracle_and_export(window: Any, tmp_path: Path) -> None:
    # identity, with garbage weights
    target = tiny_target()
    drafter = window(TINY["hidden_size"], taps=(0, 1))
    draft = Draft(drafter, jax.tree.map(lambda x: 50 * x, drafter.init(jax.random.key(0))))
    prompts = [[5, 9, 2], [7] * 11]
    greedy = SamplingParams(max_new_tokens=200, ignore_eos=True)
    options = {"num_slots": 2, "max_context": 240, "prefill_chunk": 4, "page_size": 4, "cache_fill": float("nan")}
    plain = generate(SlotRunner(target, None, **options), prompts, greedy)
    served = generate(SlotRunner(target, draft, **options), prompts, greedy)
    assert [one.tokens for one in served] == [one.tokens for one in plain]
    # oracle
    drafter = window(world.HIDDEN, num_proposals=world.PROPOSALS)
    params, accuracy = world.train(drafter, LAG)
    assert accuracy == 1.0
    assert acceptance(drafter, params) == 1.0
    shifted, _ = world.train(drafter, LAG, shift=-1, steps=150)
    assert acceptance(drafter, shifted) < 0.5
    # export
    golden = load_target(GOLDEN / "targets" / "q3a", "float32")
    drafter = window(golden.config.hidden_size, taps=(1, 3), num_proposals=3)
    made = Draft(drafter, drafter.init(jax.random.key(1)))
    again = load_drafter(save_drafter(tmp_path / "out", made), golden)
    assert again.drafter == drafter
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, drafter.width)), jnp.float32)
    for one in (made, again):
        assert one.drafter.logits(one.params, one.shared(golden), rows).shape == (2, 3, golden.config.vocab_size)
    np.testing.assert_array_equal(*(one.drafter.logits(one.params, one.shared(golden), rows) for one in (made, again)))
    opened, rest = open_drafter(tmp_path / "out", golden)
    assert opened.drafter.method == "window" and rest is None


def acceptance(drafter: Any, params: Any) -> float:
    target = world.target(LAG)
    target.params.setdefault("model", {"layers": []})  # the unrolled form, as the runner looks for it
    runner = SlotRunner(
        target, world.Drafted(drafter, params), num_slots=2, max_context=48, prefill_chunk=4, page_size=4
    )
    table = np.asarray(target.params["table"]).tolist()
    one = SamplingParams(max_new_tokens=24, ignore_eos=True)
    counter = count(generate(runner, [table[:length] for length in (6, 9, 13)], one), drafter.num_proposals)
    return sum(counter.accepted_at) / sum(counter.offered_at)


BY_NAME = """
from jaxspec.drafters.ngram import NGram
import dataclasses

@dataclasses.dataclass(frozen=True)
class Drafter(NGram):
    method: str = "echo"
"""


def test_a_method_without_a_checkpoint_is_made_by_its_name(site: Path) -> None:
    hand_made(site, "echo-drafter", "echo", BY_NAME)
    target = tiny_target()
    draft, rest = open_drafter("echo", target)
    assert (draft.drafter.method, draft.params, rest) == ("echo", {}, None)
    with pytest.raises(ConfigError, match=r"architectures: found .*expected one of .*DFlashDraftModel"):
        registry.drafter_from_hf({"architectures": ["Nobody"]}, target.config)


@pytest.mark.parametrize(
    "code, message",
    [
        (
            "raise RuntimeError('no such GPU')",
            r"package broken-one, method 'broken'.*RuntimeError: no such GPU.*uninstall",
        ),
        ("import nothing_of_this_name", r"package broken-one.*ModuleNotFoundError.*mend or uninstall broken-one"),
        ("Other = 1", r"package broken-one.*AttributeError"),
        ("class Drafter: pass", r"package broken-one.*neither ARCHITECTURES nor without_checkpoint"),
        ("class Drafter:\n    ARCHITECTURES = ('X',)", r"package broken-one.*has no from_hf"),
        ("class Drafter:\n    method = 'other'\n    without_checkpoint = print", r"calls itself 'other'"),
    ],
)
def test_a_broken_package_is_named(site: Path, code: str, message: str) -> None:
    hand_made(site, "broken-one", "broken", code)
    with pytest.raises(ConfigError, match=message):
        registry.methods()


class Reader:
    ARCHITECTURES = ("MineModel",)


def test_names_that_clash_are_errors() -> None:
    built_in = ({"dflash": object}, {"DFlashDraftModel": object})
    methods, architectures = extended(*built_in, [Plugin("mine", "mine-package", Reader)])
    assert methods["mine"] is architectures["MineModel"] is Reader
    with pytest.raises(ConfigError, match=r"package p adds method 'dflash', which jaxspec itself has"):
        extended(*built_in, [Plugin("dflash", "p", Reader)])
    claims = type("Claims", (), {"ARCHITECTURES": ("DFlashDraftModel",)})
    with pytest.raises(ConfigError, match=r"package p adds architecture 'DFlashDraftModel', which jaxspec itself has"):
        extended(*built_in, [Plugin("mine", "p", claims)])
    with pytest.raises(
        ConfigError, match=r"package second adds architecture 'MineModel', which package first adds too"
    ):
        extended(*built_in, [Plugin("a", "first", Reader), Plugin("b", "second", Reader)])
    with pytest.raises(ConfigError, match=r"package second adds method 'a', which package first adds too"):
        extended(*built_in, [Plugin("a", "first", Reader), Plugin("a", "second", type("R", (), {}))])


def test_a_package_that_takes_a_built_in_name_stops_every_load(site: Path) -> None:
    hand_made(site, "thief", "dflash", "class Drafter:\n    method = 'dflash'\n    without_checkpoint = print")
    with pytest.raises(ConfigError, match=r"package thief adds method 'dflash', which jaxspec itself has"):
        registry.drafter_from_hf({"architectures": ["DFlashDraftModel"]}, tiny_target().config)
