"""How a server's parameters and caches are split over its mesh: one table of logical axes, in one place.

Mesh axes: `data` splits the slots and their pages, `tensor` the heads, the MLP's width and the vocabulary. What a name
below does not match is whole on every device.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxspec.errors import ConfigError, problem

DATA, TENSOR = "data", "tensor"

# Weights are [out, in] as checkpoints store them; the first pattern that matches a parameter's name counts.
_PARAMETERS: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"self_attn\.q_proj\.weight", ("heads", None)),
    (r"self_attn\.q_proj\.bias", ("heads",)),
    (r"self_attn\.[kv]_proj(_target)?\.weight", ("kv_heads", None)),
    (r"self_attn\.[kv]_proj(_target)?\.bias", ("kv_heads",)),
    (r"self_attn\.o_proj\.weight", (None, "heads")),
    (r"mlp\.(gate|up)_proj\.weight", ("mlp", None)),
    (r"mlp\.(gate|up)_proj\.bias", ("mlp",)),
    (r"mlp\.down_proj\.weight", (None, "mlp")),
    (r"(embed_tokens|lm_head|markov_w1|markov_w2)\.weight", ("vocab", None)),
    (r"shared\.(embedding|head)", ("vocab", None)),
)


def logical_axes(name: str) -> tuple[str | None, ...] | None:
    """Of the tensor of a dotted name, or of a quantised one's parts; None for what is whole everywhere."""
    for pattern, axes in _PARAMETERS:
        if re.search(rf"(^|\.){pattern}(\.(qvalue|scale))?$", name):
            return axes
    return None


@dataclasses.dataclass(frozen=True)
class ServingRules:
    """Mesh axis of each logical axis (None: whole everywhere) of one model on a mesh with `tensor` shards.

    K/V heads that the shards do not divide are on each of them, in the weights and in the cache; everything else must
    divide.
    """

    heads: str | None = TENSOR
    kv_heads: str | None = TENSOR
    mlp: str | None = TENSOR
    vocab: str | None = TENSOR

    @classmethod
    def of(cls, model: Any, tensor: int, where: str = "target") -> ServingRules:
        """Of a ModelConfig. Raises ConfigError naming mesh.tensor and the size that it does not divide."""
        for name in ("num_heads", "intermediate_size", "vocab_size"):
            size = getattr(model, name)
            if size % tensor:
                raise ConfigError(problem("mesh.tensor", tensor, f"a divisor of the {where}'s {name} {size}"))
        return cls(kv_heads=TENSOR if model.num_kv_heads % tensor == 0 else None)

    def parameter(self, name: str, shape: Sequence[int]) -> PartitionSpec:
        """Of the tensor of a dotted name. A quantised weight's scales follow it along the axis that they have."""
        split = [axis and getattr(self, axis) for axis in logical_axes(name) or ()]
        return PartitionSpec(*(None if size == 1 else one for size, one in zip(shape, split, strict=bool(split))))

    def parameters(self, params: Any) -> Any:
        """A PartitionSpec for each leaf of a parameter tree."""
        return jax.tree_util.tree_map_with_path(lambda path, leaf: self.parameter(dotted(path), leaf.shape), params)

    def pools(self, state: Any, num_pages: int, page_size: int) -> Any:
        """Of caches: arrays [pages, page, 2 x kv heads, D] by their K/V heads; what else a drafter keeps is whole."""

        def spec(leaf: Any) -> PartitionSpec:
            is_pool = leaf.ndim == 4 and leaf.shape[:2] == (num_pages, page_size)
            return PartitionSpec(None, None, self.kv_heads) if is_pool else PartitionSpec()

        return jax.tree.map(spec, state)


def dotted(path: Sequence[Any]) -> str:
    """A tree path as a parameter's name."""
    names = (getattr(part, "key", getattr(part, "idx", getattr(part, "name", None))) for part in path)
    return ".".join(str(name) for name in names)


def rows_apart(x: jax.Array) -> jax.Array:
    """[R, …]: every row whole on one device, the rows shared out over `tensor` where it divides R.

    A row of logits comes out of a vocabulary-sharded head in pieces. What sorts, sums or draws from it must see it
    whole, so that the result is the one of a single device to the last bit. Without a mesh nothing happens.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if TENSOR not in mesh.axis_names or mesh.shape[TENSOR] == 1:
        return x
    rows = TENSOR if x.shape[0] % mesh.shape[TENSOR] == 0 else None
    return jax.lax.with_sharding_constraint(x, PartitionSpec(rows, *[None] * (x.ndim - 1)))
