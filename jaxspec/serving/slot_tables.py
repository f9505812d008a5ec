"""What the host says of each slot, as arrays over all slots, of which a round changes only the rows that are new."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxspec.decoding.processors import LogitRules, rule_rows
from jaxspec.decoding.ragged import RaggedProgram
from jaxspec.serving.requests import Request


class SlotTables:
    """Row i is slot i's: what its request asks for and where its pages are, if it takes part in the round, else
    nobody's. `spare` of a request's rows can be written and never become history.

    Nothing has to say that a row is old: its request and its pages are compared with those of the round.
    """

    def __init__(self, program: RaggedProgram, spare: int):
        slots = program.num_slots
        zeros = lambda dtype=np.int32, *more: np.zeros((slots, *more), dtype)  # noqa: E731
        self._vocab, self._max_context, self._spare = program.decoder.config.vocab_size, program.max_context, spare
        self._arrays = {
            "table": zeros(np.int32, program.pages_per_slot), "limits": zeros(), "pinned": zeros(bool),
            "seeds": zeros(np.uint32, 2), "samples": zeros(), "temperature": zeros(np.float32), "top_k": zeros(),
            "top_p": np.ones(slots, np.float32), "min_p": zeros(np.float32), "logprobs": zeros(bool),
        }  # fmt: skip
        no_rules = rule_rows(LogitRules()) if program.rules else {}
        self._rules = tuple(no_rules)
        self._arrays |= {name: np.repeat(row, slots, 0) for name, row in no_rules.items()}
        self._nobody = {name: array[0].copy() for name, array in self._arrays.items()}
        self._owners: list[Request | None] = [None] * slots
        self._pages: list[list[int]] = [[] for _ in range(slots)]
        self._shown: set[int] = set()

    def show(self, requests: Iterable[Request]) -> None:
        """From now on the rows are those of these requests."""
        here = set()
        for request in requests:
            slot = request.slot
            here.add(slot)
            if self._owners[slot] is not request:
                self._clear(slot)
                self._write(slot, request)
            if self._pages[slot] != request.lease.pages:
                self._move(slot, request)
        for slot in self._shown - here:
            self._clear(slot)
        self._shown = here

    def first(self, slots: int, name: str) -> np.ndarray:
        """A column of the first slots, which later rounds leave alone."""
        return self._arrays[name][:slots].copy()

    def rules(self, slots: int) -> dict[str, np.ndarray]:
        """The columns of `Rules`, of the first slots."""
        return {name: self.first(slots, name) for name in self._rules}

    def _write(self, slot: int, request: Request) -> None:
        arrays, params = self._arrays, request.params
        arrays["pinned"][slot] = request.pinned
        arrays["seeds"][slot] = request.seed & 0xFFFFFFFF, request.seed >> 32
        arrays["samples"][slot] = request.sample
        for name in ("temperature", "top_p", "min_p"):
            arrays[name][slot] = getattr(params, name)
        arrays["top_k"][slot] = min(params.top_k, self._vocab)
        arrays["logprobs"][slot] = params.logprobs is not None
        if request.rules is not None:
            for name in self._rules:
                arrays[name][slot] = getattr(request.rules, name)
        self._owners[slot] = request

    def _move(self, slot: int, request: Request) -> None:
        table = self._arrays["table"]
        table[slot] = request.lease.table_row(table.shape[1])
        # The last token of a round has no row in it, and a tree's nodes beyond its depth never become history.
        room = request.lease.allocated + 1 - self._spare
        self._arrays["limits"][slot] = min(self._max_context, room)
        self._pages[slot] = list(request.lease.pages)

    def _clear(self, slot: int) -> None:
        for name, row in self._nobody.items():
            self._arrays[name][slot] = row
        self._owners[slot], self._pages[slot] = None, []
