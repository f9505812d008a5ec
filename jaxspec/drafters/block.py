"""The backbone of the block drafters: K/V injection of projected target features, an anchor row and mask rows.

One forward serves training (N blocks a sequence over a dense context) and serving (one block a request over a paged
context): both hand `block_forward` the context K/V of every layer and call the same attention.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxspec.drafters.base import Batch, PrefixUse, Rows, Shared, Slots
from jaxspec.drafters.block_config import BlockConfig
from jaxspec.drafters.fresh import fresh_params
from jaxspec.drafters.ring import Ring, init_context, ring_size
from jaxspec.models import layers as ly
from jaxspec.models.cache import KVPool, gather, write_rows
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import DecoderLayer, Tap
from jaxspec.models.layout import RaggedLayout
from jaxspec.models.rope import rotary
from pallas_kernels.anchor_attention.api import anchor_attention
from pallas_kernels.anchor_attention.reference import block_mask, context_mask
from pallas_kernels.verify_attention.api import verify_attention
from pallas_kernels.verify_attention.rows import VerifyRows

ContextKV = Sequence[tuple[Array, Array]]
Context = KVPool | Ring  # of one layer


@dataclasses.dataclass(frozen=True)
class BlockDrafter:
    """State, commit and the forward that DFlash and its descendants share. `attention` names the verify attention
    (`pallas_kernels.verify_attention`) that a served block runs; the reference gathers its pages."""

    config: BlockConfig
    attention: str = dataclasses.field(default="reference", kw_only=True)

    @property
    def taps(self) -> tuple[Tap, ...]:
        """Target layers whose outputs are the features, in order."""
        return self.config.taps

    @property
    def tree_nodes(self) -> int:
        """A chain."""
        return 0

    @property
    def tree_acceptance(self) -> str:
        """Not used by a chain."""
        return "rejection"

    @property
    def mask_token_id(self) -> int:
        """Id fed on every row but the anchor's."""
        return self.config.mask_token_id

    def layer_module(self) -> tuple[Any, ly.Params]:
        """Static graph and abstract parameters of one layer. A descendant may give a class of its own that is called as
        a DecoderLayer is."""
        return ly.abstract_module(DecoderLayer, self.config.model)

    def abstract_params(self, dtype: Any = jnp.float32) -> ly.Params:
        """Names and shapes of the backbone's tensors, as the public checkpoints have them."""
        model, width = self.config.model, len(self.taps) * self.config.target_hidden_size
        leaf = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
        _, layer = self.layer_module()
        return {
            "fc": {"weight": leaf(model.hidden_size, width)},
            "hidden_norm": {"weight": leaf(model.hidden_size)},
            "layers": [jax.tree.map(lambda x: leaf(*x.shape), layer)] * model.num_layers,
            "norm": {"weight": leaf(model.hidden_size)},
        }

    def init(self, key: Key[Array, ""], dtype: Any = jnp.float32) -> ly.Params:
        """Normal(0, 0.02) matrices, norms at one, biases at zero."""
        return fresh_params(self.abstract_params(dtype), key)

    def init_state(self, num_pages: int, page_size: int, dtype: Any, num_slots: int = 0) -> tuple[Context, ...]:
        """One context K/V pool a layer, or a ring where it slides. Only context rows ever live here: a block's own K/V
        are scratch."""
        model = self.config.model
        return tuple(
            init_context(ring, num_pages, page_size, num_slots, model.num_kv_heads, model.head_dim, dtype)
            for ring in self._rings(num_pages, page_size, num_slots)
        )

    def prefix_use(self, num_pages: int, page_size: int, num_slots: int) -> PrefixUse:
        """What a ring shows of a prompt is not in its pages."""
        rings = self._rings(num_pages, page_size, num_slots)
        windows = [window for ring, (window, *_) in zip(rings, self.config.layer_masks, strict=True) if ring]
        return PrefixUse(recomputed=max([1, *(window - 1 for window in windows)]))

    def _rings(self, num_pages: int, page_size: int, num_slots: int) -> list[int | None]:
        proposals = self.config.block_size - 1
        return [ring_size(window, proposals, num_pages, page_size, num_slots) for window, *_ in self.config.layer_masks]

    def commit(
        self, params: ly.Params, shared: Shared, state: tuple[Context, ...], rows: Rows, layout: RaggedLayout
    ) -> tuple[Context, ...]:
        """Writes the context K/V of committed rows (anchor and accepted tokens; the newest token has no feature
        yet).
        """
        context = self.project_context(params, rows.features)
        return tuple(
            pool.write(keys, values, layout) if isinstance(pool, Ring) else write_rows(pool, keys, values, layout)
            for pool, (keys, values) in zip(state, self.context_kv(params, context, layout.positions), strict=True)
        )

    def project_context(self, params: ly.Params, features: Float[Array, "*rows TH"]) -> Float[Array, "*rows H"]:
        """hidden_norm(fc(features)): computed once, shared by all layers (DFlash section 3; the norm is learned)."""
        weight = params["fc"]["weight"]
        return norm(self.config.model, params["hidden_norm"], ly.project(features.astype(weight.dtype), weight))

    def context_kv(
        self, params: ly.Params, context: Float[Array, "*rows H"], positions: Int[Array, "*rows"]
    ) -> ContextKV:
        """Every layer's K (normed, rotated) and V of the context. It does not pass the layer's input norm."""
        model = self.config.model
        cos, sin = rotary(model.rope, model.head_dim, positions)
        graph, _ = self.layer_module()
        return [ly.bind(graph, layer).self_attn.keys_values(context, cos, sin) for layer in params["layers"]]

    def block_forward(
        self,
        params: ly.Params,
        inputs: Float[Array, "B N block H"],
        context: ContextKV,
        anchors: Int[Array, "B N"],
        keep: Array,
    ) -> tuple[Float[Array, "B N block H"], list[Any]]:
        """Final-normed hidden states of N blocks a sequence over their sequence's context, and what each layer returns
        beside its own."""
        attends = [
            functools.partial(_over_dense, keys, values, anchors, keep, masks)
            for (keys, values), masks in zip(context, self.config.layer_masks, strict=True)
        ]
        return self.block_layers(params, inputs, anchors, attends)

    def block_layers(
        self, params: ly.Params, inputs: Float[Array, "B N block H"], anchors: Int[Array, "B N"], attends: Sequence[Any]
    ) -> tuple[Float[Array, "B N block H"], list[Any]]:
        """`block_forward` with each layer's attention over its context given."""
        model = self.config.model
        positions = anchors[:, :, None] + jnp.arange(self.config.block_size)
        cos, sin = rotary(model.rope, model.head_dim, positions)
        graph, _ = self.layer_module()
        x, notes = inputs, []
        for layer, attend in zip(params["layers"], attends, strict=True):
            x, note = ly.bind(graph, layer)(x, cos, sin, attend)
            notes.append(note)
        return norm(model, params["norm"], x), notes

    # -- serving ------------------------------------------------------------------------------------------------------

    def block_ids(self, anchors: Int[Array, "*rows"]) -> Int[Array, "*rows block"]:
        """[anchor, mask, mask, ...]."""
        rest = jnp.full((*anchors.shape, self.config.block_size - 1), self.mask_token_id, anchors.dtype)
        return jnp.concatenate([anchors[..., None], rest], axis=-1)

    def block_hidden(
        self, params: ly.Params, shared: Shared, state: tuple[Context, ...], slots: Slots
    ) -> Float[Array, "R block H"]:
        """Hidden states of one block a request; context rows t < s come from the pools."""
        dtype = params["norm"]["weight"].dtype
        dtype = params["norm"]["weight"].dtype
        inputs = self.block_inputs(shared, self.block_ids(slots.anchors[:, None]), dtype)
        anchors, live = slots.positions[:, None], slots.live[:, None]
        rows = None if self.attention == "reference" else _block_rows(slots, self.config.block_size)
        attends: list[Any] = []
        for pool, masks in zip(state, self.config.layer_masks, strict=True):
            at = anchors
            if isinstance(pool, Ring):
                keys, values, first = pool.read(slots.positions, masks[0])
                at = anchors - first[:, None]
            elif rows is not None:
                attends.append(functools.partial(_over_pages, pool, rows, masks, self.attention))
                continue
            else:
                keys, values = gather(pool, slots.page_table, slots.positions)
            attends.append(functools.partial(_over_dense, keys.astype(dtype), values.astype(dtype), at, live, masks))
        return self.block_layers(params, inputs, anchors, attends)[0][:, 0]

    def block_inputs(self, shared: Shared, ids: Int[Array, "*rows"], dtype: Any) -> Float[Array, "*rows H"]:
        """Raw embedding rows times input_embedding_scale."""
        scale = jnp.asarray(self.config.input_embedding_scale, dtype)
        return ly.embed(shared.embedding, ids).astype(dtype) * scale

    def block_logits(self, shared: Shared, hidden: Float[Array, "*rows H"]) -> Float[Array, "*rows V"]:
        """Float32 logits through the target's head, then multiplier and softcap."""
        return self.transform_logits(ly.unembed(hidden, shared.head))

    def transform_logits(self, logits: Float[Array, "*rows V"]) -> Float[Array, "*rows V"]:
        """cap * tanh(multiplier * logits / cap); increasing, so it changes no ranking."""
        logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    # -- training -----------------------------------------------------------------------------------------------------

    def noise_ids(self, batch: Batch) -> Int[Array, "B N block"]:
        """Block inputs of a training batch; a dropped block is mask throughout."""
        anchors = jnp.take_along_axis(batch.input_ids, batch.anchors, axis=1)
        return self.block_ids(jnp.where(batch.keep, anchors, self.mask_token_id))

    def training_hidden(self, params: ly.Params, shared: Shared, batch: Batch) -> Float[Array, "B N block H"]:
        """Hidden states of every block of the batch."""
        return self.training_forward(params, shared, batch)[0]

    def training_forward(
        self, params: ly.Params, shared: Shared, batch: Batch
    ) -> tuple[Float[Array, "B N block H"], list[Any]]:
        """`block_forward` of a training batch."""
        context = self.project_context(params, batch.features)
        positions = jnp.broadcast_to(jnp.arange(batch.features.shape[1]), batch.features.shape[:2])
        inputs = self.block_inputs(shared, self.noise_ids(batch), params["norm"]["weight"].dtype)
        return self.block_forward(
            params, inputs, self.context_kv(params, context, positions), batch.anchors, batch.keep
        )

    def layout_trace(self, shared: Shared, batch: Batch, dtype: Any) -> dict[str, Array]:
        """Positions, inputs and masks of a training batch, spelled out [B, 1, N*block, S + N*block] for inspection."""
        size, length = self.config.block_size, batch.input_ids.shape[1]
        batch_size, count = batch.anchors.shape
        rows = batch.anchors[:, :, None] + jnp.arange(size)
        context = jnp.broadcast_to(jnp.arange(length), (batch_size, length))
        trace = {
            "position_ids": jnp.concatenate([context, rows.reshape(batch_size, -1)], axis=1),
            "noise_embedding": self.block_inputs(shared, self.noise_ids(batch), dtype).reshape(
                batch_size, count * size, -1
            ),
        }
        same = jnp.eye(count, dtype=bool)
        for window in {None, *self.config.model.layer_windows}:  # the full mask also where no layer uses it
            masks = self.config.mask_of(window)
            far = context_mask(batch.anchors, batch.keep, size, length, masks[0]).reshape(
                batch_size, count * size, length
            )
            near = block_mask(size, *masks[1:])[None, None, :, None, :] & batch.keep[:, :, None, None, None]
            near = (near & same[None, :, None, :, None]).reshape(batch_size, count * size, count * size)
            kind = "full_attention" if window is None else "sliding_attention"
            trace[f"mask_{kind}"] = jnp.concatenate([far, near], axis=-1)[:, None]
        return trace


def _over_dense(
    keys: Array, values: Array, anchors: Array, keep: Array, masks: tuple[int, bool, int], q: Array, k: Array, v: Array
) -> tuple[Array, None]:
    return anchor_attention(q, keys, values, k, v, anchors, keep, *masks), None


def _over_pages(
    pool: KVPool, rows: VerifyRows, masks: tuple[int, bool, int], name: str, q: Array, k: Array, v: Array
) -> tuple[Array, None]:
    """The same by a kernel that reads the context's pages in place."""
    window, causal, inner = masks
    mask = "causal" if causal else "full"
    q_rows, k_rows, v_rows = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v))
    out = verify_attention(q_rows, k_rows, v_rows, pool, rows, mask, window, inner, implementation=name)
    return out.reshape(q.shape), None


def _block_rows(slots: Slots, block: int) -> VerifyRows:
    """One block a live request, behind its committed slots."""
    index = jnp.arange(slots.positions.shape[0], dtype=jnp.int32)
    lengths = jnp.where(slots.live, block, 0)
    return VerifyRows(
        index * block, lengths, slots.positions, jnp.repeat(index, block), slots.page_table, max_rows=block
    )


def norm(model: ModelConfig, params: ly.Params, x: Float[Array, "*rows H"]) -> Float[Array, "*rows H"]:
    """RMSNorm of the backbone's width."""
    graph, _ = ly.abstract_module(ly.RMSNorm, model.hidden_size, model.rms_norm_eps)
    return ly.bind(graph, params)(x)
