"""The targets, drafters and prompts of the serving bench: SmolLM2 with trained drafters, or a public shape with random
weights."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.fast import Fast
from jaxspec.decoding.ragged import RaggedProgram
from jaxspec.decoding.simulated import SimulatedProgram
from jaxspec.drafters.block_config import fresh_config
from jaxspec.drafters.dflash import DFlash
from jaxspec.drafters.dspark import DSpark
from jaxspec.drafters.markov import MarkovConfig
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder
from jaxspec.models.packed import pack
from jaxspec.serving.engine import Engine
from tools.bench_round import MASK, Loaded, random_weights
from tools.bench_round import SHAPES as PUBLIC

BLOCK = 7  # proposals a round, of both methods
SHAPES: dict[str, dict[str, Any]] = PUBLIC | {
    "smallest": {
        "model_type": "qwen3",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
    },
}


@dataclasses.dataclass(frozen=True)
class Pairs:
    """A target, its two drafters, what the engine runs, prompts as token ids, and a line that says what they are."""

    target: Any
    drafts: dict[str, Any]  # dflash, dspark
    program: Callable[..., RaggedProgram]
    prompts: list[list[int]]
    about: dict[str, Any]


def trained(source: str, dtype: str, dflash: Path, dspark: Path, sts: Path | None) -> Pairs:
    """A target of a folder or name with exported drafters, and questions of the demo's kinds that it was not trained
    on."""
    from demo.make_answers import chat_ids
    from jaxspec.checkpoints.drafter import load_drafter
    from jaxspec.checkpoints.target import load_target
    from jaxspec.checkpoints.tokenizer import load_tokenizer
    from jaxspec.drafters.calibration import Calibration

    target = load_target(source, dtype=dtype)
    drafts = {"dflash": load_drafter(dflash, target), "dspark": load_drafter(dspark, target)}
    if sts is not None:
        drafter = drafts["dspark"].drafter
        temperatures = Calibration.load(sts, drafter.num_proposals).temperatures
        drafts["dspark"] = dataclasses.replace(
            drafts["dspark"], drafter=dataclasses.replace(drafter, temperatures=temperatures)
        )
    tokenizer = load_tokenizer(target.directory)
    prompts = [ids for ids in (chat_ids(tokenizer, text) for text in split_questions().bench) if len(ids) <= 192]
    about = {
        "target": target.name,
        "revision": target.revision,
        "dtype": dtype,
        "drafters": {name: _said(draft) for name, draft in drafts.items()},
        "prompts": f"{len(prompts)} questions of demo/questions.py that the training did not see",
        "acceptance": "real, greedy",
        "sts": None if sts is None else list(drafts["dspark"].drafter.temperatures),
    }
    return Pairs(target, drafts, RaggedProgram, prompts, about)


@dataclasses.dataclass(frozen=True)
class Questions:
    """Three sets that share no question."""

    train: list[str]
    calibration: list[str]
    bench: list[str]


def split_questions(most: int = 0) -> Questions:
    """Questions of the demo's three kinds, `most` of the training's at least where the kinds have so many."""
    from demo import questions

    rng = random.Random(911)
    bench, calibration, train = [], [], []
    every = [questions.word_problems(384 + most, rng), questions.code_requests(10**6, rng)]
    every.append(questions.chat_requests(10**6, rng))
    for kind, held in zip(every, (192, 96, 32), strict=True):
        bench += kind[:held]
        calibration += kind[held : 2 * held]
        train += kind[2 * held :]
    for part in (bench, calibration, train):
        rng.shuffle(part)
    return Questions(train, calibration, bench)


def lean(engine: Engine) -> Engine:
    """Before its warm-up: only the executables of requests without options, where the device has them apart."""
    shapes = engine.executables.shapes
    engine.executables.shapes = [shape for shape in shapes if shape.bare] or shapes
    return engine


@dataclasses.dataclass(frozen=True)
class Verified:
    """A round of one request in which all proposals were verified."""

    request: int
    confidence: list[float]
    accepted: int


@contextlib.contextmanager
def recorded(engine: Engine) -> Iterator[list[Verified]]:
    """Notes each such round of the engine; the confidence is empty where the drafter has none."""
    note, rows = engine.drafting.note, []

    def record(flight: Any, finished: Any) -> None:
        if flight.drafters:
            said = flight.output.confidence
            said = None if said is None else jax.device_get(said)
            for request, kept, accepted in finished:
                if kept == engine.num_proposals:
                    row = [] if said is None else said[request.slot].tolist()
                    rows.append(Verified(request.handle, row, accepted))
        note(flight, finished)

    engine.drafting.note = record  # type: ignore[method-assign]
    try:
        yield rows
    finally:
        del engine.drafting.note


def random_shape(shape: str, rates: dict[str, tuple[float, ...]], prompt_length: int) -> Pairs:
    """A public target's shape in bfloat16 with random weights; a method's proposals stand at its `rates`."""
    config = ModelConfig.from_hf(SHAPES[shape])
    decoder = Decoder(config)
    base: dict[str, Any] = {"num_layers": min(5, config.num_layers // 3), "mask_token_id": MASK}
    made = {
        "dflash": DFlash(fresh_config(config, block_size=BLOCK + 1, **base)),
        "dspark": DSpark(
            fresh_config(config, block_size=BLOCK, **base), heads=MarkovConfig(rank=min(256, config.hidden_size))
        ),
    }
    drafts = {
        name: Loaded(random_weights(drafter.abstract_params(jnp.bfloat16)), drafter=drafter)
        for name, drafter in made.items()
    }
    weights = random_weights(decoder.abstract_params(jnp.bfloat16))
    if Fast.on(jax.devices()[0]).packed:  # here, once, and not for each of the engines
        weights = pack(weights, config)
    target = Loaded(weights, model=decoder)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, config.vocab_size, prompt_length).tolist() for _ in range(64)]
    about = {
        "target": f"the shape of {shape}, random weights",
        "dtype": "bfloat16",
        "drafters": {name: _said(draft) for name, draft in drafts.items()},
        "prompts": f"random ids, {prompt_length} a prompt",
        "acceptance": "simulated: " + "; ".join(f"{name} {list(of)}" for name, of in rates.items()),
    }
    program = functools.partial(_simulated, rates)
    return Pairs(target, drafts, program, prompts, about)


def _simulated(
    rates: dict[str, tuple[float, ...]], decoder: Any, drafter: Any, *args: Any, **more: Any
) -> RaggedProgram:
    if not drafter.num_proposals:
        return RaggedProgram(decoder, drafter, *args, **more)
    own = rates[drafter.method]
    return SimulatedProgram(decoder, drafter, *args, rates=own, confidence=own, **more)


def _said(draft: Any) -> str:
    weights = sum(leaf.size for leaf in jax.tree.leaves(draft.params))
    return f"{draft.drafter.method}, {draft.drafter.num_proposals} proposals, {weights / 1e6:.1f} M parameters"
