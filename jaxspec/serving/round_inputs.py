"""The host's part of a round as arrays: tables over the slots, prompt pieces in a chunk, a grammar's masks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import Array, UInt32

from jaxspec.decoding.parcel import Parcel
from jaxspec.decoding.processors import mask_words
from jaxspec.decoding.ragged import Masks, PrefillRows, RaggedProgram, RoundInput, Rules
from jaxspec.decoding.sampling import SlotSampling
from jaxspec.drafters.base import Tree
from jaxspec.serving.drafting import Drafted
from jaxspec.serving.requests import Chosen, Piece, Request, Shape
from jaxspec.serving.slot_tables import SlotTables


class Home(Protocol):
    """Where a round's inputs go."""

    def inputs(self, shape: Shape, tree: RoundInput) -> Any:
        """What an executable of the shape takes."""
        ...

    def put(self, tree: Any) -> Any:
        """The same of a tree that is sent now and then."""
        ...


@dataclasses.dataclass(frozen=True)
class Resident:
    """One device, where a shape's parcels all lie at one address: a CUDA graph holds addresses, and is written anew,
    node by node, for each that moved."""

    device: Any
    _there: dict[Shape, tuple[np.ndarray, Parcel]] = dataclasses.field(default_factory=dict)

    def inputs(self, shape: Shape, tree: RoundInput) -> Parcel:
        """The parcel on the device; nothing is sent where it is there already."""
        parcel = Parcel.pack(tree)
        words = np.asarray(parcel.words)
        before = self._there.get(shape)
        if before is not None and np.array_equal(before[0], words):
            return before[1]
        place = jax.device_put(words, self.device) if before is None else before[1].words
        moved = dataclasses.replace(parcel, words=_overwrite(place, jax.device_put(words, self.device)))
        self._there[shape] = words, moved
        return moved

    def put(self, tree: Any) -> Any:
        """On the device."""
        return jax.device_put(tree, self.device)


@dataclasses.dataclass(frozen=True)
class RoundInputs:
    """Builds them for one program and `home`. `chunk` rows hold up to `pieces` prompts; a round
    may write `written` rows for a request, of which `rows_each` (m + 1) can become history."""

    program: RaggedProgram
    chunk: int
    pieces: int
    rows_each: int
    written: int
    home: Home
    _tables: SlotTables = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_tables", SlotTables(self.program, self.written - self.rows_each))

    @property
    def _vocab(self) -> int:
        return self.program.decoder.config.vocab_size

    def of(self, shape: Shape, chosen: Chosen, drafted: Drafted, observed: np.ndarray | None) -> Any:
        """`round` of who was chosen, and what of theirs is drafted."""
        return self.round(shape, chosen.decoding, drafted.drafters, chosen.pieces, drafted.budget, observed)

    def round(
        self,
        shape: Shape,
        decoding: Sequence[Request] = (),
        drafters: Sequence[Request] = (),
        pieces: Sequence[Piece] = (),
        budget: int = 0,
        observed: np.ndarray | None = None,
    ) -> Any:
        """`RoundInput` of who decodes, who of them drafts, and whose prompts run, at home; `observed` [R, m] as
        in `RoundInput.confidence`. What was there before it, of the same shape, is no more."""
        slots, tables = shape.slots, self._tables
        tables.show([*decoding, *(piece.request for piece in pieces)])
        of = functools.partial(tables.first, slots)
        alive, proposals = np.zeros(slots, bool), np.zeros(slots, np.int32)
        alive[[request.slot for request in decoding]] = True
        proposals[[request.slot for request in drafters]] = self.rows_each - 1
        top_k, top_p = (None, None) if shape.bare else (of("top_k"), of("top_p"))
        rules: Any = tables.rules(slots) if self.program.rules and not shape.bare else None
        inputs = RoundInput(
            alive, of("table"), of("limits"), proposals, of("pinned"), np.int32(budget), of("seeds"), of("samples"),
            SlotSampling(of("temperature"), top_k, top_p, of("min_p")), None if shape.bare else of("logprobs"),
            observed, None if rules is None else Rules(**rules), self._prefill_rows(pieces) if shape.prefill else None,
        )  # fmt: skip
        return self.home.inputs(shape, inputs)

    def _prefill_rows(self, pieces: Sequence[Piece]) -> PrefillRows:
        tokens, following = np.zeros(self.chunk, np.int32), np.zeros(self.chunk, np.int32)
        answers = np.zeros(self.chunk, bool)
        slots = np.full(self.pieces, self.program.num_slots, np.int32)
        starts, counts = np.zeros(self.pieces, np.int32), np.zeros(self.pieces, np.int32)
        finals, fresh = np.zeros(self.pieces, bool), np.zeros(self.pieces, bool)
        forced = np.full(self.pieces, -1, np.int32)
        for piece in pieces:
            request, end = piece.request, piece.start + piece.count
            behind = request.text[piece.start + 1 : end + 1]
            rows = slice(piece.at, piece.at + piece.count)
            tokens[rows] = request.text[piece.start : end]
            following[piece.at : piece.at + len(behind)] = behind
            answers[rows] = np.arange(piece.start, end) >= len(request.prompt)
            slots[piece.index], starts[piece.index], counts[piece.index] = request.slot, piece.start, piece.count
            finals[piece.index], fresh[piece.index] = piece.final, piece.start == 0
            if request.emitted:
                forced[piece.index] = request.emitted[-1]
        return PrefillRows(tokens, following, slots, starts, counts, finals, forced, fresh, answers)

    def masks(
        self,
        shape: Shape,
        constrained: Sequence[Request] = (),
        pieces: Sequence[Piece] = (),
        drafts: Any = None,
        tree: Tree | None = None,
    ) -> Masks:
        """Of decoding requests with a grammar, and of prompts' ends. `drafts` [R, m] are their proposals, on the host,
        as the shape of a tree is."""
        words = mask_words(self._vocab)
        rows = np.full((shape.slots, self.written if shape.drafting else 1, words), -1, np.int32)
        first = np.full((self.pieces, words), -1, np.int32)
        for request in constrained:
            assert request.constraint is not None
            slot = request.slot
            parents = None if tree is None else np.where(tree.valid[slot], tree.parents[slot], -1).tolist()
            rows[slot] = request.constraint.masks(drafts[slot].tolist(), parents)[:, :words]
        for piece in pieces:
            if piece.final and piece.request.constraint is not None:
                first[piece.index] = piece.request.constraint.masks([])[0, :words]
        return self.home.put(Masks(rows, first))


@functools.partial(jax.jit, donate_argnums=0)
def _overwrite(old: UInt32[Array, "n"], new: UInt32[Array, "n"]) -> UInt32[Array, "n"]:
    return old.at[:].set(new)
