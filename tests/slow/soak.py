"""Requests of every kind for a tiny target, and engines of every drafter that serve them beside each other.

The oracle of a greedy request is the same request alone, without a drafter, overlap, prefix cache or a second chunk.
One that is drawn with a seed has its ids from its drafter too: its oracle is alone with that drafter.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import random
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxspec.checkpoints.drafter import Draft
from jaxspec.checkpoints.target import Target
from jaxspec.decoding.processors import LogitRules
from jaxspec.decoding.request import SamplingParams
from jaxspec.decoding.runner import Event, TokenLogprob
from jaxspec.drafters.base import Point
from jaxspec.drafters.block_config import fresh_config
from jaxspec.drafters.ddtree import DDTree
from jaxspec.drafters.dflare import DFlare
from jaxspec.drafters.dflash2 import DFlash2
from jaxspec.drafters.grouped_conv import ConvConfig
from jaxspec.drafters.ngram import NGram
from jaxspec.drafters.selector import SelectorConfig
from jaxspec.drafters.small_model import SmallModel
from jaxspec.serving.engine import Engine
from jaxspec.serving.grammar import Grammar, GrammarCompiler
from jaxspec.serving.text import TokenizerCodec
from tests.drafters import eagle_pairs
from tests.helpers.worlds import MASK_ID, TINY, bigram_draft, loud, tiny_draft, tiny_target

VOCAB, EOS = TINY["vocab_size"], TINY["eos_token_id"]
CONTEXT, SLOTS, PAGE = 72, 4, 8
LETTERS = [chr(code) for code in range(97, 123)]
PIECES = [*LETTERS, *"0123456789", *'{}[]":,.-+_<>/=()', "Ġ", *"ABCDEF"]
MERGES = [("t", "h"), ("e", "r"), ("a", "n")]
GRAMMARS = (
    Grammar("json_schema", '{"type":"object","properties":{"a":{"type":"boolean"}},"required":["a"]}'),
    Grammar("regex", r"(ab|cd|ef)+[0-9]"),
    Grammar("ebnf", 'start: "x" ("," "y")*'),
    Grammar("regex", r"[a-m]{2,9}", marker="<"),
)


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """As many ids as the target has, a letter or two each."""
    vocab = {piece: index for index, piece in enumerate(PIECES)}
    for left, right in MERGES:
        vocab[left + right] = len(vocab)
    made = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<eos>", special=True)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")
    assert (len(wrapped), wrapped.eos_token_id) == (VOCAB, EOS)
    return wrapped


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), VOCAB, [EOS])


# -- drafters ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Hinted:
    """`inner`, told what the target usually says. A greedy request's proposal, or first child in a tree, is replaced by
    `likely`[the token before it] three times of four, as a hash of the inner proposal has it: so all accept lengths
    occur, and they change when the inner drafter's context does."""

    inner: Any
    likely: tuple[int, ...]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, params: Any, shared: Any, state: Any, slots: Any, keys: Any, sampling: Any) -> Any:
        made = self.inner.propose(params, shared, state, slots, keys, sampling)
        likely, row = jnp.asarray(self.likely, jnp.int32), jnp.arange(made.tokens.shape[0])
        said, tokens = [slots.anchors], []
        for index in range(made.tokens.shape[1]):
            own = made.tokens[:, index]
            parent = jnp.full_like(own, index) if made.tree is None else made.tree.parents[:, index]
            first = jnp.ones_like(own, bool)
            if made.tree is not None and index:
                first = ~jnp.any(made.tree.parents[:, :index] == parent[:, None], axis=1)
            mixed = (own + 31 * slots.positions + 7 * index).astype(jnp.uint32) * jnp.uint32(2654435761)
            told = first & ((mixed >> 16) % 4 != 0) & sampling.greedy
            tokens.append(jnp.where(told, likely[jnp.stack(said)[parent, row]], own))
            said.append(tokens[-1])
        tokens = jnp.stack(tokens, axis=1)
        q = Point(tokens, VOCAB) if isinstance(made.q, Point) else made.q
        return dataclasses.replace(made, tokens=tokens, q=q)


@functools.cache
def target() -> Target:
    """Its layers speak softly, so that three of five tokens follow from the one before; the others need the context."""
    of = tiny_target()

    def softer(path: Any, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        return 0.08 * leaf if "o_proj" in name or "down_proj" in name else leaf

    return dataclasses.replace(of, params=jax.tree_util.tree_map_with_path(softer, of.params))


@functools.cache
def likely() -> tuple[int, ...]:
    """What the target says most often behind each id, over random texts."""
    of = target()
    texts = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (64, 64)), jnp.int32)
    hidden = jax.jit(lambda p, x: of.model.forward_sequences(p, x, ()).hidden)(of.params, texts)
    best = np.asarray(jax.jit(of.model.logits)(of.params, hidden)).argmax(-1)
    behind = [collections.Counter(best[np.asarray(texts) == token].tolist()) for token in range(VOCAB)]
    return tuple(counter.most_common(1)[0][0] for counter in behind)


def _block(kind: str) -> Draft:
    config = fresh_config(
        target().model.config, num_layers=1, block_size=5, mask_token_id=MASK_ID, target_layer_ids=(0, 1)
    )
    drafter = DFlare(config) if kind == "dflare" else DFlash2(
        config, conv=ConvConfig(2, 4), selector=SelectorConfig(4, 3)
    )  # fmt: skip
    return Draft(drafter, loud(drafter.init(jax.random.key(3), jnp.float32)))


def _small_model() -> Draft:
    """The target with noise: often right, and drawn from where a request is."""
    noisy = jax.tree.map(lambda x: x + 0.02 * jax.random.normal(jax.random.key(1), x.shape), target().params)
    return Draft(SmallModel(target().model, num_proposals=3), noisy)


def _ddtree() -> Draft:
    made = tiny_draft(target())
    return dataclasses.replace(made, drafter=DDTree(made.drafter, 7))


DRAFTS = {
    "none": lambda: None,
    "dflash": lambda: tiny_draft(target()),
    "dspark": lambda: bigram_draft(target()),
    "dflash2": lambda: _block("dflash2"),
    "dflare": lambda: _block("dflare"),
    "eagle_chain": lambda: eagle_pairs.draft(eagle_pairs.eagle(target(), None)),
    "eagle_tree": lambda: eagle_pairs.draft(eagle_pairs.eagle(target(), eagle_pairs.STATIC)),
    "eagle2_tree": lambda: eagle_pairs.draft(eagle_pairs.eagle(target(), eagle_pairs.DYNAMIC)),
    "eagle3_chain": lambda: eagle_pairs.draft(eagle_pairs.eagle3(target(), None)),
    "eagle3_tree": lambda: eagle_pairs.draft(eagle_pairs.eagle3(target(), eagle_pairs.DYNAMIC)),
    "ddtree": _ddtree,
    "ngram": lambda: Draft(NGram(VOCAB, num_proposals=4), {}),
    "small_model": _small_model,
}


def draft_of(name: str) -> Draft | None:
    made = DRAFTS[name]()
    return None if made is None else dataclasses.replace(made, drafter=Hinted(made.drafter, likely()))


def engine(draft: Draft | None, **changes: Any) -> Engine:
    options = {
        "num_slots": SLOTS, "max_context": CONTEXT, "page_size": PAGE, "slot_buckets": (SLOTS,), "max_logprobs": 3,
        "row_shares": (0.5,), "codec": TokenizerCodec(tokenizer()), "grammars": compiler(),
        "cache_fill": float("nan"), "pause_drafting": False,
    }  # fmt: skip
    return Engine(target(), draft, **{**options, **changes})


def lone(draft: Draft | None) -> Engine:
    """One request at a time, its prompt in one chunk, each round read before the next."""
    return engine(
        draft, num_slots=1, slot_buckets=(1,), overlap=False, prefix_cache=False, prefill_chunk=CONTEXT,
        prefill_pieces=1,
    )  # fmt: skip


# -- requests ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request for one answer."""

    prompt: tuple[int, ...]
    params: SamplingParams
    sample: int = 0
    grammar: Grammar | None = None
    priority: int = 0

    @property
    def greedy(self) -> bool:
        return self.params.temperature == 0


def random_requests(rng: random.Random, count: int, grammars: bool = True, drawn_grammars: bool = True) -> list[Asked]:
    """So many answers, some of them to one request, prompts often with a beginning in common."""
    roots = [[rng.randrange(VOCAB - 1) for _ in range(CONTEXT)] for _ in range(3)]
    asked: list[Asked] = []
    while len(asked) < count:
        length = rng.choice([1, 2, PAGE, CONTEXT - 1, *[rng.randint(1, CONTEXT - 1)] * 12])
        shared = rng.choice([0, 0, length // 2, length])
        prompt = (*rng.choice(roots)[:shared], *(rng.randrange(VOCAB - 1) for _ in range(length - shared)))
        params, grammar = _params(rng), rng.choice(GRAMMARS) if rng.random() < 0.3 else None
        if not grammars or (params.temperature > 0 and not drawn_grammars):
            grammar = None
        priority = rng.choice([0, 0, 1, -1])
        for sample in range(rng.choice([1, 1, 1, 3])):
            own = params if sample == 0 else dataclasses.replace(params, prompt_logprobs=False)
            asked.append(Asked(prompt, own, sample, grammar, priority))
    return asked[:count]


def _params(rng: random.Random) -> SamplingParams:
    most = rng.choice([0, 1, 2, CONTEXT, *[rng.randint(1, CONTEXT)] * 8])
    rules = LogitRules()
    if rng.random() < 0.4:
        rules = LogitRules(
            repetition_penalty=rng.choice([1.0, 1.3]),
            presence_penalty=rng.choice([0.0, 0.5]),
            frequency_penalty=rng.choice([0.0, 0.8]),
            logit_bias={rng.randrange(VOCAB): rng.uniform(-4, 4) for _ in range(rng.choice([0, 3]))},
            min_tokens=rng.choice([0, min(5, most)]),
        )
    drawn: dict[str, Any] = {}
    if rng.random() < 0.3:
        drawn = {
            "temperature": rng.uniform(0.3, 1.5), "seed": rng.getrandbits(62), "top_k": rng.choice([0, 5]),
            "top_p": rng.choice([1.0, 0.8]), "min_p": rng.choice([0.0, 0.1]),
        }  # fmt: skip
    logprobs = rng.choice([None, None, 0, 3])
    texts = ("".join(rng.choice(LETTERS) for _ in range(rng.choice([1, 2]))) for _ in range(2))
    return SamplingParams(
        max_new_tokens=most,
        stop=tuple(texts) if rng.random() < 0.3 else (),
        stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 2]))),
        ignore_eos=rng.random() < 0.5,
        rules=rules,
        logprobs=logprobs,
        prompt_logprobs=logprobs is not None and most > 0 and rng.random() < 0.5,
        **drawn,
    )


# -- answers ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Heard:
    """What came back of one request."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    reason: str | None = None
    by_id: bool = False
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    accepted: list[int] = dataclasses.field(default_factory=list)  # of each round

    def add(self, event: Event) -> None:
        assert self.reason is None, "an ended request was heard of"
        self.tokens += event.tokens
        self.text += event.text
        self.reason, self.by_id = event.finish_reason, event.by_id
        self.logprobs += event.logprobs
        self.prompt_logprobs += event.prompt_logprobs
        if event.from_round:
            self.accepted.append(event.accepted)


def alone(engine: Engine, asked: Asked) -> Heard:
    """The request by itself."""
    heard = Heard()
    engine.admit(asked.prompt, asked.params, asked.sample, asked.grammar)
    while engine.live:
        for event in engine.step():
            heard.add(event)
    return heard


def together(engine: Engine, asked: Sequence[Asked], rng: random.Random, cancel: float) -> dict[int, Heard]:
    """Random arrivals and cancels; what was heard, by index, of the requests that came to their end."""
    waiting, owners, heard = list(range(len(asked))), {}, {}
    gone: set[int] = set()
    pace = 0.5
    while waiting or engine.live:
        pace = rng.choice([0.02, 0.2, 0.9]) if rng.random() < 0.05 else pace  # bursts, and lulls
        while waiting and rng.random() < pace and engine.fits(asked[waiting[0]].prompt, asked[waiting[0]].params):
            index = waiting.pop(0)
            one = asked[index]
            handle = engine.admit(one.prompt, one.params, one.sample, one.grammar, one.priority)
            owners[handle], heard[handle] = index, Heard()
        for event in engine.step():
            assert event.handle not in gone, "a cancelled request was heard of"
            heard[event.handle].add(event)
        if rng.random() < cancel and (running := [h for h in owners if heard[h].reason is None and h not in gone]):
            gone.add(rng.choice(running))
            for handle in gone:  # those of before too: it must not hurt
                engine.cancel(handle)
    assert all(one.reason is not None for handle, one in heard.items() if handle not in gone)
    return {owners[handle]: one for handle, one in heard.items() if handle not in gone}


def compare(found: Heard, oracle: Heard) -> None:
    """Ids, text, reason and log probabilities (1e-4)."""
    assert (found.tokens, found.reason, found.by_id) == (oracle.tokens, oracle.reason, oracle.by_id)
    assert found.text == oracle.text
    for ours, theirs in ((found.logprobs, oracle.logprobs), (found.prompt_logprobs, oracle.prompt_logprobs)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert one.token == other.token
            np.testing.assert_allclose(one.logprob, other.logprob, atol=1e-4)
            values = [[value for _, value in each.top] for each in (one, other)]
            np.testing.assert_allclose(*values, atol=1e-4)
            apart = not values[1] or min(np.abs(np.diff(values[1])), default=1.0) > 1e-4
            if apart:  # ids in the order of values that rounding cannot swap
                assert [token for token, _ in one.top] == [token for token, _ in other.top]
