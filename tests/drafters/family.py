"""Tiny members of the DFlash family beside `tiny`'s: the configuration that SpecForge tests its DFlash 2 with."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.drafters.dflare import DFlare, DFlareObjective
from jaxspec.drafters.dflash2 import DFlash2, DFlash2Objective
from jaxspec.drafters.grouped_conv import ConvConfig
from jaxspec.drafters.selector import SelectorConfig
from tests.drafters import tiny

CONV, SELECTOR = ConvConfig(2, 4), SelectorConfig(4, 3)


def dflash2(objective: DFlash2Objective | None = None, conv: ConvConfig = CONV, paths: SelectorConfig = SELECTOR,
            draft_sampling: str = "sample", **changes: Any) -> DFlash2:  # fmt: skip
    """Block of 4 rows, 2 taps in groups of 4 channels, rank 4, 3 candidates; `changes` go to the block."""
    return DFlash2(
        tiny.block_config(**({"num_layers": 2} | changes)),
        objective or DFlash2Objective(gamma=2.0),
        draft_sampling,
        conv=conv,
        selector=paths,
    )


def dflare(objective: DFlareObjective | None = None, **changes: Any) -> DFlare:
    """Two layers over three taps."""
    options = {"target_layer_ids": (0, 1, 3), **changes}
    return DFlare(
        tiny.block_config(**({"num_layers": 2} | options)), objective or DFlareObjective(gamma=2.0, gamma_per_epoch=0.0)
    )


def draft2_hf(**nested: Any) -> dict[str, Any]:
    """config.json of a public DFlash 2 of `tiny.TARGET`; a None leaves its key out."""
    section = {
        "mask_token_id": tiny.MASK_ID, "target_layer_ids": [1, 3], "block_size": 4, "conv_kernel_size": 2,
        "conv_group_size": 4, "selector_rank": 4, "selector_top_k": 3, **nested,
    }  # fmt: skip
    config = tiny.draft_hf(architectures=["DFlash2DraftModel"], is_causal=False)
    del config["block_size"]
    return config | {"dflash_config": {name: value for name, value in section.items() if value is not None}}


def random_rows(seed: int, *shape: int) -> jax.Array:
    """Standard normal float32."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def terms(drafter: Any, params: Any, shared: Any, batch: Any) -> tuple[Any, Any, Any]:
    """Objective, terms, and gradients by parameter tree."""

    def scalar(params: Any) -> Any:
        found = drafter.loss(params, shared, batch, jax.random.key(0))
        return drafter.objective(found), found

    (value, found), grads = jax.jit(jax.value_and_grad(scalar, has_aux=True))(params)
    return float(value), found, grads


def assert_close(actual: Any, wanted: Any, name: str) -> None:
    """Two fp32 gradients of the same sum in another order: the rounding of the largest entry is the noise of all."""
    scale = float(np.max(np.abs(np.asarray(wanted)), initial=0.0))
    np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5 * scale + 1e-7, err_msg=name)
