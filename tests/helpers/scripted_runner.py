"""An engine whose tokens are known by hand: the table target and the scripted drafter of the serving tests.

Token i of the answer to a prompt is `answer_token(prompt, i)` unless `answers` scripts it. A round commits `widths`
tokens in turn (accepted = width - 1 of `num_proposals`). Stop rules are the real ones: the first end-of-sequence or
stop id, or max_new_tokens, whichever comes first, cut inside the round.

It records every breach of the runner's contract in `violations`: a second thread, an unknown or finished handle, a slot
too many. `hold()` makes prefills or rounds wait for `allow()`, so that a test stops the world where it wants to.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxspec.decoding.request import validate_prompt
from jaxspec.decoding.runner import Event
from jaxspec.serving.engine import Metrics

VOCAB = 512
EOS = 256
PATIENCE = 20.0  # seconds; a test that waits longer has hung


def answer_token(prompt: Sequence[int], index: int, sample: int = 0) -> int:
    """A printable byte that depends on the whole prompt, the position and the sample; never an end-of-sequence id."""
    text = sum((i + 1) * token for i, token in enumerate(prompt)) * 7 + len(prompt)
    return 32 + (text + index * 13 + sample * 29) % 95


def expected_answer(prompt: Sequence[int], length: int, sample: int = 0) -> list[int]:
    return [answer_token(prompt, index, sample) for index in range(length)]


class Gate:
    """Counts passes; closed, it lets through only as many as `allow` grants."""

    def __init__(self, changed: threading.Condition):
        self._changed = changed
        self._tickets: float = float("inf")
        self.waiting = 0

    def hold(self) -> None:
        with self._changed:
            self._tickets = 0

    def allow(self, passes: float = float("inf")) -> None:
        with self._changed:
            self._tickets += passes
            self._changed.notify_all()

    def enter(self) -> None:
        with self._changed:
            self.waiting += 1
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._tickets > 0, PATIENCE):
                raise TimeoutError("a held gate was never opened")
            self._tickets -= 1
            self.waiting -= 1


@dataclass
class _Row:
    prompt: tuple[int, ...]
    params: object
    sample: int = 0
    first: bool = True
    sent: int = 0


@dataclass
class ScriptedRunner:
    """See the module. `late_events`: a cancelled handle still yields the round that was in flight, as with overlap."""

    num_slots: int = 4
    max_context: int = 128
    num_proposals: int = 4
    widths: Sequence[int] = (3, 1, 5, 2)
    answers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    late_events: bool = False
    room: float = float("inf")  # the longest prompt that fits, as if pages were short
    seconds_each: float = 0.0  # of prefill, for each id of a prompt

    def __post_init__(self) -> None:
        self.changed = threading.Condition()
        self.rounds = Gate(self.changed)
        self.prefills = Gate(self.changed)
        self.violations: list[str] = []
        self.admitted: list[tuple[int, ...]] = []
        self.priorities: list[int] = []
        self.cancelled: list[int] = []
        self.steps = 0
        self.fail_step: BaseException | None = None
        self.fail_admit: BaseException | None = None
        self._rows: dict[int, _Row] = {}
        self._late: list[Event] = []
        self._handles = itertools.count(1)
        self._widths = itertools.cycle(self.widths)
        self._thread: int | None = None

    # -- the engine's interface --

    def warm_up(self, progress=None) -> list[tuple[str, float]]:
        self._on_one_thread()
        stages = [("prefill", 0.0), ("round", 0.0)]
        for stage in stages if progress else ():
            progress(*stage)
        return stages

    vocab_size = VOCAB

    @property
    def free_slots(self) -> int:
        return self.num_slots - len(self._rows)

    def metrics(self) -> Metrics:
        return Metrics(2, 0, 100, len(self._rows), 0, 0, 0, self.steps, self.steps, 5 * self.steps)

    def fits(self, prompt_ids: Sequence[int], params) -> bool:
        return self.free_slots > 0 and len(prompt_ids) <= self.room

    def seconds_to_first_token(self, prompt_ids: Sequence[int], params) -> float:
        return self.seconds_each * len(prompt_ids)

    def admit(self, prompt_ids: Sequence[int], params, sample: int = 0, grammar=None, priority: int = 0) -> int:
        self._on_one_thread()
        self.prefills.enter()
        if self.fail_admit is not None:
            raise self.fail_admit
        params.validate(VOCAB)
        validate_prompt(prompt_ids, VOCAB, self.max_context)
        if not self.free_slots:
            self.violations.append("admit without a free slot")
        handle = next(self._handles)
        with self.changed:
            self._rows[handle] = _Row(tuple(prompt_ids), params, sample)
            self.admitted.append(tuple(prompt_ids))
            self.priorities.append(priority)
            self.changed.notify_all()
        return handle

    def step(self) -> list[Event]:
        self._on_one_thread()
        self.rounds.enter()
        if self.fail_step is not None:
            raise self.fail_step
        events, self._late = self._late, []
        for handle, row in list(self._rows.items()):
            if row.first:
                row.first = False
                events.append(self._commit(handle, row, 1, from_round=False))
            if handle in self._rows:
                events.append(self._commit(handle, row, next(self._widths), from_round=True))
        with self.changed:
            self.steps += 1
            self.changed.notify_all()
        return events

    def cancel(self, handle: int) -> None:
        self._on_one_thread()
        with self.changed:
            row = self._rows.pop(handle, None)
            if row is None:
                self.violations.append(f"cancel of handle {handle}, which is not live")
                return
            if self.late_events:
                self._late.append(
                    Event(
                        handle, (answer_token(row.prompt, row.sent),), "stop", accepted=0, proposed=self.num_proposals
                    )
                )
            self.cancelled.append(handle)
            self.changed.notify_all()

    # -- for the tests --

    @property
    def live(self) -> int:
        return len(self._rows)

    def wait(self, condition) -> None:
        """Waits until `condition()` holds; AssertionError when it never does."""
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE), "the runner never got there"

    def _commit(self, handle: int, row: _Row, width: int, *, from_round: bool) -> Event:
        params = row.params
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
        script = self.answers.get(row.prompt)
        limit = min(params.max_new_tokens, self.max_context - len(row.prompt))
        tokens, reason = [], None if limit else "length"
        for _ in range(width if limit else 0):
            scripted = script is not None and row.sent < len(script)
            token = script[row.sent] if scripted else answer_token(row.prompt, row.sent, row.sample)
            tokens.append(token)
            row.sent += 1
            reason = "stop" if token in stops else "length" if row.sent == limit else None
            if reason:
                break
        if reason:
            with self.changed:
                del self._rows[handle]
                self.changed.notify_all()
        accepted, proposed = (width - 1, self.num_proposals) if from_round else (0, 0)
        return Event(handle, tuple(tokens), reason, from_round, accepted, proposed, by_id=reason == "stop")

    def _on_one_thread(self) -> None:
        me = threading.get_ident()
        if self._thread is None:
            self._thread = me
        elif self._thread != me:
            self.violations.append("the runner was used from two threads")


class ByteCodec:
    """Ids below 256 are bytes, EOS and everything above it has no text."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        text = "".join(f"<{message['role']}>{message['content']}\n" for message in messages)
        return self.encode(text + "<assistant>")

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode("utf-8", "replace")
