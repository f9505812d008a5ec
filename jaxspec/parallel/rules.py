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


def _tensor_shards() -> int:
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[TENSOR] if TENSOR in mesh.axis_names else 1


def _constrained(x: jax.Array, *spec: str | None) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec, *[None] * (x.ndim - len(spec))))


def whole(x: jax.Array) -> jax.Array:
    """Activations between layers: all of them on every tensor shard. Without a mesh nothing happens, as below."""
    return _constrained(x) if _tensor_shards() > 1 else x


def vocab_apart(x: jax.Array) -> jax.Array:
    """[…, V] as a vocabulary-sharded head gives it. A head that the shards do not divide is whole."""
    shards = _tensor_shards()
    if shards == 1 or x.shape[-1] % shards:
        return whole(x)
    return _constrained(x, *[None] * (x.ndim - 1), TENSOR)


def heads_apart(x: jax.Array, heads: int) -> jax.Array:
    """A cache [pages, page, 2 x kv heads, D], or rows [M, 2 x kv heads, D] on their way to it, by its K/V heads.

    Left to the compiler, whole K/V heads would be cut for the scores, and the cache sent around to make it whole again.
    """
    shards = _tensor_shards()
    if shards == 1 or heads % shards:
        return whole(x)
    return _constrained(x, *[None] * (x.ndim - 2), TENSOR)


def rows_apart(x: jax.Array) -> jax.Array:
    """[R, …]: every row whole on one device, the rows shared out over `tensor` where it divides R.

    What sorts, sums or draws from a row of logits sees it whole and in the order of ids, so that ranks, ties and draws
    are those of a single device.
    """
    shards = _tensor_shards()
    if shards == 1:
        return x
    return _constrained(x, TENSOR if x.shape[0] % shards == 0 else None)


def top_k(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """`jax.lax.top_k`, lowest index first on ties. On a mesh by a sort: the compiler gathers a top-k's operand from all
    devices, those of other data shards included."""
    if TENSOR not in jax.sharding.get_abstract_mesh().axis_names:
        return jax.lax.top_k(x, count)
    index = jax.lax.broadcasted_iota("int32", x.shape, x.ndim - 1)
    order = jax.lax.sort((-x, index), num_keys=2)
    return -order[0][..., :count], order[1][..., :count]


def anywhere(asked: jax.Array) -> jax.Array:
    """Whether any data shard asks: the predicate of work that all of them do together or leave out together.

    One that differed between them would turn the branch into a choice between two results, both of them computed.
    """
    try:
        jax.lax.axis_size(DATA)
    except NameError:  # a single engine: there are no data shards
        return asked
    return jax.lax.pmax(asked.astype(jax.numpy.int32), DATA) > 0
