"""Building blocks whose parameter paths are the checkpoint's tensor names, and the two forms of a layer stack."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxspec.models.quantization import quantised_product
from jaxspec.parallel.rules import vocab_apart, whole

Params = dict[str, Any]


class Linear(nnx.Module):
    """y = x W^T + b with W stored [out, in], as the checkpoints store it."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        self.weight = nnx.Param(jnp.zeros((outputs, inputs)))
        self.bias = nnx.Param(jnp.zeros((outputs,))) if bias else None

    def __call__(self, x: Float[Array, "*rows inputs"]) -> Float[Array, "*rows outputs"]:
        y = project(x, self.weight.get_value())
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square norm in float32, scaled by a learned weight in the input's dtype."""

    def __init__(self, size: int, eps: float):
        self.weight = nnx.Param(jnp.ones((size,)))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
        return rms_norm(x, self.weight[...], self.eps)


class Embedding(nnx.Module):
    """Lookup table [V, H]."""

    def __init__(self, rows: int, size: int):
        self.weight = nnx.Param(jnp.zeros((rows, size)))


class MLP(nnx.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, intermediate: int, bias: bool = False):
        self.gate_proj = Linear(hidden, intermediate, bias)
        self.up_proj = Linear(hidden, intermediate, bias)
        self.down_proj = Linear(intermediate, hidden, bias)

    def __call__(self, x: Float[Array, "*rows hidden"]) -> Float[Array, "*rows hidden"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


def rms_norm(x: Float[Array, "*rows size"], weight: Float[Array, "*w size"], eps: float) -> Float[Array, "*rows size"]:
    """x over its root mean square, in float32; the weight, broadcast, in x's dtype."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return _scaled(normed.astype(x.dtype), weight.astype(x.dtype))


@jax.custom_vjp
def _scaled(x: Array, weight: Array) -> Array:
    """x weight. Left to jax the weight's gradient, a sum over all rows, would be added up in x's dtype."""
    return x * weight


def _scaled_fwd(x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return x * weight, (x, weight)


def _scaled_bwd(operands: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, weight = operands
    products = gradient.astype(jnp.float32) * x.astype(jnp.float32)
    shared = products.ndim - weight.ndim
    repeated = [shared + axis for axis, size in enumerate(weight.shape) if size != products.shape[shared + axis]]
    own = jnp.sum(products, axis=(*range(shared), *repeated)).reshape(weight.shape)
    return gradient * weight, own.astype(weight.dtype)


_scaled.defvjp(_scaled_fwd, _scaled_bwd)


def project(x: Float[Array, "*rows inputs"], weight: Float[Array, "outputs inputs"]) -> Float[Array, "*rows outputs"]:
    """x W^T in x's dtype. The weight may be a quantised one."""
    if hasattr(weight, "qvalue"):
        return quantised_product(x, weight)
    return jax.lax.dot_general(x, weight.astype(x.dtype), (((x.ndim - 1,), (1,)), ((), ())))


@jax.custom_vjp
def _wide_product(x: Array, weight: Array) -> Array:
    """x W^T of two operands of one dtype, in float32. Its gradient's products take the operands' dtype as well: left to
    jax they would have one float32 operand, which is a narrow matrix unit's slow path and a wide copy of the head."""
    return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _wide_product_fwd(x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return _wide_product(x, weight), (x, weight)


def _wide_product_bwd(operands: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, weight = operands
    gradient, rows = gradient.astype(x.dtype), tuple(range(x.ndim - 1))
    return (
        jax.lax.dot_general(gradient, weight, (((x.ndim - 1,), (0,)), ((), ()))),
        jax.lax.dot_general(gradient, x, ((rows, rows), ((), ()))),
    )


_wide_product.defvjp(_wide_product_fwd, _wide_product_bwd)


def unembed(hidden: Float[Array, "*rows hidden"], head: Float[Array, "vocab hidden"]) -> Float[Array, "*rows vocab"]:
    """Logits in float32: argmax and softmax of narrow logits tie where the wide ones do not."""
    return vocab_apart(_wide_product(hidden, head.astype(hidden.dtype)))


def embed(table: Float[Array, "vocab hidden"], tokens: Int[Array, "*rows"]) -> Float[Array, "*rows hidden"]:
    """Rows of the table. Ids must be in range: JAX would clamp or wrap a wrong one without a word."""
    return whole(jnp.take(table, tokens, axis=0, mode="clip"))


@functools.cache
def abstract_module(module: Callable[..., nnx.Module], *arguments: Any) -> tuple[Any, Params]:
    """Static graph definition and abstract float32 parameters (nested ShapeDtypeStructs) of `module(*arguments)`."""
    graph, state = nnx.split(nnx.eval_shape(lambda: module(*arguments)))
    return graph, nnx.to_pure_dict(state)


def bind(graph: Any, params: Params) -> Any:
    """The module with these parameters."""
    return nnx.merge(graph, params)


def run_layers(layer: Callable[..., tuple[Any, Any]], carry: Any, layers: Any, *per_layer: Any) -> tuple[Any, Any]:
    """Runs `layer(carry, params, *per_layer[i]) -> (carry, out)` over a stack.

    A list of layers is unrolled (decoding: a scan would copy every layer's weights on a GPU) and gives a list of outs;
    one dict of arrays with a leading L axis is scanned (training: compile time does not grow with depth) and gives the
    outs stacked. `per_layer` holds one sequence or stacked array of length L each.
    """
    if isinstance(layers, (list, tuple)):
        outs = []
        for index, params in enumerate(layers):
            carry, out = layer(
                carry, params, *(jax.tree.map(lambda x, i=index: x[i], p, is_leaf=_is_sequence) for p in per_layer)
            )
            outs.append(out)
        return carry, outs
    arrays = [jnp.asarray(p) if _is_sequence(p) else p for p in per_layer]
    return jax.lax.scan(lambda c, xs: layer(c, *xs), carry, (layers, *arrays))


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def listify(tree: Any) -> Any:
    """Dicts whose keys are all integers (or digit strings) become lists, recursively."""
    if not isinstance(tree, Mapping):
        return tree
    if tree and all(str(key).isdigit() for key in tree):
        return [listify(tree[key]) for key in sorted(tree, key=int)]
    return {key: listify(value) for key, value in tree.items()}


def flatten(params: Any, prefix: str = "") -> dict[str, Any]:
    """Nested parameters as {"a.b.0.weight": leaf}: the checkpoint's names."""
    if isinstance(params, Mapping):
        items = [(str(key), value) for key, value in params.items()]
    elif isinstance(params, (list, tuple)):
        items = [(str(index), value) for index, value in enumerate(params)]
    else:
        return {prefix: params}
    flat: dict[str, Any] = {}
    for key, value in items:
        flat |= flatten(value, f"{prefix}.{key}" if prefix else key)
    return flat


def unflatten(flat: Mapping[str, Any]) -> Any:
    """Inverse of `flatten`; integer path pieces become lists."""
    tree: dict[str, Any] = {}
    for name, leaf in flat.items():
        *path, last = name.split(".")
        node = tree
        for piece in path:
            node = node.setdefault(piece, {})
        node[last] = leaf
    return listify(tree)


def stack_layers(params: Params, path: tuple[str, ...] = ("model", "layers")) -> Params:
    """Copy with the list of layers at `path` turned into one dict of arrays with a leading L axis."""
    return _replace(params, path, lambda layers: jax.tree.map(lambda *xs: jnp.stack(xs), *layers))


def unstack_layers(params: Params, path: tuple[str, ...] = ("model", "layers")) -> Params:
    """Inverse of `stack_layers` (copies)."""

    def split(stacked: Any) -> list[Any]:
        count = jax.tree.leaves(stacked)[0].shape[0]
        return [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(count)]

    return _replace(params, path, split)


def _replace(tree: Params, path: tuple[str, ...], change: Callable[[Any], Any]) -> Params:
    if not path:
        return change(tree)
    return {**tree, path[0]: _replace(tree[path[0]], path[1:], change)}


def cast(params: Any, dtype: Any) -> Any:
    """Floating leaves in `dtype`; integers and flags, a drafter's vocabulary maps say, stay what they are."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, params)


def split_trainable(params: Any) -> tuple[Any, Any]:
    """(what a gradient can move, the rest): two trees of the same shape with None where the other has the leaf.

    Integers and flags, a drafter's vocabulary maps say, are part of a checkpoint and never trained.
    """
    moving = jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else None, params)
    fixed = jax.tree.map(lambda x: None if jnp.issubdtype(x.dtype, jnp.floating) else x, params)
    return moving, fixed


def join_trainable(moving: Any, fixed: Any) -> Any:
    """Inverse of `split_trainable`."""
    return jax.tree.map(lambda x, y: y if x is None else x, moving, fixed, is_leaf=lambda x: x is None)
