"""`jaxspec regenerate`: the target itself answers the questions of a data set, turn by turn, in its own words.

A drafter learns what its target says, so its training data should be the target's. Each answer has a seed of its own,
folded from the run's seed, the row and the turn: answers do not depend on what runs beside them, nor on how often the
work was interrupted.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import Event
from jaxspec.training.journal import Journal
from jaxspec.training.records import BadRow, conversations
from jaxspec.training.templates import ChatTemplate, TemplateMismatch

__all__ = ["Answerer", "Progress", "plan", "regenerate", "sampling_record"]

TOO_LONG = "the prompt does not fit the context"
CUT = "the answer was cut"
MISFIT = "template does not fit"
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "max_new_tokens")


class Answerer(Protocol):
    """What is needed of an engine; it runs nothing else meanwhile."""

    @property
    def free_slots(self) -> int: ...

    @property
    def max_context(self) -> int: ...

    def admit(self, prompt: Sequence[int], params: SamplingParams) -> int: ...

    def step(self) -> list[Event]: ...


@dataclasses.dataclass(frozen=True)
class Progress:
    """Rows that are done, those of earlier runs included, and tokens of this run."""

    rows: int
    tokens: int


@dataclasses.dataclass
class _Talk:
    """A conversation on its way. `turns` is what is left of its plan; `ended` says why some of it is left out."""

    id: int
    source: str
    turns: deque[dict[str, str] | None]
    messages: list[dict[str, str]] = dataclasses.field(default_factory=list)
    answers: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)
    ended: str | None = None


def plan(turns: Sequence[dict[str, str]]) -> list[dict[str, str] | None]:
    """The conversation with None where the target has to answer: in place of each answer, and after a last question.

    Raises BadRow for a conversation that asks nothing or begins with an answer.
    """
    result: list[dict[str, str] | None] = []
    for turn in turns:
        if turn["role"] != "assistant":
            result.append(turn)
        elif not any(one is not None and one["role"] == "user" for one in result):
            raise BadRow("an answer before the first question")
        elif result[-1] is not None:
            result.append(None)
    asks = [index for index, turn in enumerate(result) if turn is None or turn["role"] == "user"]
    if not asks:
        raise BadRow("no question")
    del result[asks[-1] + 1 :]
    return result if result[-1] is None else [*result, None]


def sampling_record(sampling: SamplingParams, seed: int) -> dict[str, Any]:
    """What the answers are drawn with."""
    return {**{name: getattr(sampling, name) for name in _SAMPLING}, "seed": seed}


def regenerate(
    inputs: Sequence[Path],
    journal: Journal,
    *,
    engine: Answerer,
    tokenizer: Any,
    template: ChatTemplate,
    sampling: SamplingParams,
    seed: int,
    about: dict[str, Any],
    watch: Callable[[Progress], None] = lambda progress: None,
) -> dict[str, Any]:
    """Answers every row that the journal lacks, then finishes it. Returns the account.

    A row that cannot be asked is left out and named in the account; a conversation ends at an answer that was cut
    (by max_new_tokens or the context) and before a question that no longer fits.

    Args:
      about: what each row says of its target.

    Raises:
      DataError: an input is broken or the output cannot be written.
    """
    waiting = _talks(inputs, journal)
    ready: deque[_Talk] = deque()
    running: dict[int, _Talk] = {}
    record = {**about, "sampling": sampling_record(sampling, seed)}
    made = 0

    def close(talk: _Talk) -> None:
        journal.append(_row(talk, record))
        watch(Progress(len(journal), made))

    def admit(talk: _Talk) -> None:
        prompt = _next_prompt(talk, tokenizer, template, engine.max_context)
        if prompt is None:
            close(talk)
            return
        own = dataclasses.replace(sampling, seed=_seed(seed, talk.id, len(talk.answers)))
        running[engine.admit(prompt, own)] = talk

    while True:
        while engine.free_slots and (talk := ready.popleft() if ready else next(waiting, None)) is not None:
            admit(talk)
        if not running:
            break
        for event in engine.step():
            talk = running[event.handle]
            talk.tokens += event.tokens
            made += len(event.tokens)
            if event.finish_reason is not None:
                del running[event.handle]
                _answered(talk, event.finish_reason, tokenizer)
                if talk.turns:
                    ready.append(talk)
                else:
                    close(talk)
    account: dict[str, Any] = {}
    return journal.finish(_kept(journal, account), account)


def _talks(inputs: Sequence[Path], journal: Journal) -> Iterator[_Talk]:
    """The conversations that are still to do; those that cannot be asked are written off."""
    number = 0
    for path in inputs:
        for place, turns in conversations(path, "INPUT", answered=False):
            number += 1
            if number in journal:
                continue
            try:
                if isinstance(turns, BadRow):
                    raise turns
                yield _Talk(number, place, deque(plan(turns)))
            except BadRow as bad:
                journal.append({"id": number, "source": place, "dropped": bad.reason})


def _next_prompt(talk: _Talk, tokenizer: Any, template: ChatTemplate, max_context: int) -> list[int] | None:
    """Ids up to the next answer; None where it cannot be asked for: then the conversation is over."""
    asked = len(talk.messages)
    while (turn := talk.turns.popleft()) is not None:
        talk.messages.append(turn)
    try:
        ids = tokenizer.encode(template.prompt(talk.messages), add_special_tokens=False)
        if len(ids) < max_context:
            return list(ids)
        talk.ended = TOO_LONG
    except TemplateMismatch:
        talk.ended = MISFIT
    del talk.messages[asked:]
    talk.turns.clear()
    return None


def _answered(talk: _Talk, reason: str, tokenizer: Any) -> None:
    """Takes up the answer. Its text holds every token but the one that it stopped at."""
    ids, talk.tokens = talk.tokens, []
    said = ids[:-1] if reason == "stop" else ids
    text = tokenizer.decode(said, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    talk.messages.append({"role": "assistant", "content": text, "finish_reason": reason})
    same = tokenizer.encode(text, add_special_tokens=False) == said
    talk.answers.append({"finish_reason": reason, "tokens": len(ids), "same_ids": same})
    if reason == "length" and talk.turns:
        talk.turns.clear()
        talk.ended = CUT


def _row(talk: _Talk, record: dict[str, Any]) -> dict[str, Any]:
    head = {"id": talk.id, "source": talk.source}
    if not talk.answers:
        return {**head, "dropped": talk.ended}
    generated = {**record, "answers": talk.answers, "ended": talk.ended}
    return {**head, "messages": talk.messages, "generated": generated}


def _kept(journal: Journal, account: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows with answers; what they are, and where the others were, goes to the account."""
    reasons, dropped, shortened = Counter[str](), dict[str, list[str]](), dict[str, list[str]]()
    rows = tokens = same = 0
    for row in journal.rows():
        if "dropped" in row:
            dropped.setdefault(row["dropped"], []).append(row["source"])
            continue
        generated = row["generated"]
        if generated["ended"] is not None:
            shortened.setdefault(generated["ended"], []).append(row["source"])
        rows += 1
        for answer in generated["answers"]:
            reasons[answer["finish_reason"]] += 1
            tokens += answer["tokens"]
            same += answer["same_ids"]
        yield row
    account |= {
        "rows": rows, "answers": reasons.total(), "tokens": tokens, "finish_reasons": dict(sorted(reasons.items())),
        "answers_with_the_same_ids": same, "dropped": dropped, "shortened": shortened,
    }  # fmt: skip


def _seed(seed: int, row: int, turn: int) -> int:
    """63 bits of an answer's own."""
    digest = hashlib.blake2b(f"{seed}/{row}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
