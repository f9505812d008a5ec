"""`make test-slow-identity` and its kin: 8 prompts x 512 tokens of SmolLM2, with and without drafters, token for token.

    identity         fresh DFlash and DSpark drafts (nearly all rejected), and one that recites the answer with one
                     mistake a round, so that every accept length occurs
    identity-blocks  DFlash 2, DFlare and DSpark as their smoke runs train them
    identity-others  DDTree over the smoke run's DFlash, n-gram lookup, a small model
    identity-eagle   EAGLE as its smoke run trains it: a chain, a fixed tree, a grown one (EAGLE-2)
    identity-eagle3  EAGLE-3 as its smoke run trains it: a chain and a grown tree

Training comes first where it was not done before; a drafter that is never right would prove nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspec.checkpoints.drafter import Draft, load_drafter
from jaxspec.checkpoints.target import Target
from jaxspec.drafters.ddtree import DDTree
from jaxspec.drafters.draft_tree import DynamicTree, StaticTree
from jaxspec.drafters.ngram import NGram
from jaxspec.drafters.small_model import SmallModel
from tests.decoding.smollm2_pair import fresh_draft
from tests.helpers.worlds import reciter
from tests.slow import smoke
from tests.slow.identical import COVERS, Plain, Record, printing

SEED, BLOCK = 0, 5
CHAIN, NODES = 3, 5
GROWN = DynamicTree(top_k=2, depth=3, nodes=NODES)
FIXED = StaticTree(((0,), (1,), (0, 0), (0, 1), (0, 0, 0)))
NOISE = 0.1  # of a matrix's own standard deviation: such a copy of the target is right more often than not


@pytest.fixture(scope="module")
def plain() -> Plain:
    """Decoded once for all drafters of a check."""
    return Plain.of()


@pytest.mark.parametrize("name", ["dflash", "dspark", "reciter"])
@pytest.mark.slow("identity", covers=COVERS)
def test_B14_identity_on_a_real_model(name: str, plain: Plain, record_property: Record) -> None:
    record_property("seed", SEED)
    if name != "reciter":
        plain.check(name, fresh_draft(plain.target, name, BLOCK, SEED), printing(record_property))
        return
    known = [[*one.prompt_ids, *one.tokens] for one in plain.answers]
    draft = reciter(plain.target.config.vocab_size, BLOCK, known)
    accepted = plain.check(name, draft, printing(record_property))
    assert all(accepted[r] for r in range(BLOCK + 1)), accepted


def trained(method: str, target: Target, **changes: Any) -> Draft:
    """The drafter of a method's smoke run."""
    smoke.train(method)
    draft = load_drafter(smoke.export(method), target)
    return dataclasses.replace(draft, drafter=dataclasses.replace(draft.drafter, **changes))


def ddtree(target: Target) -> Draft:
    """The smoke run's DFlash, asked for a tree."""
    draft = trained("dflash", target)
    return dataclasses.replace(draft, drafter=DDTree(draft.drafter, NODES))


def noisy_copy(target: Target) -> Draft:
    """The target as its own small model, with noise on its layers' matrices."""
    leaves, structure = jax.tree.flatten(target.params["model"]["layers"])
    keys = jax.random.split(jax.random.key(SEED), len(leaves))
    noisy = [
        leaf + NOISE * jnp.std(leaf) * jax.random.normal(key, leaf.shape) if leaf.ndim > 1 else leaf
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    params = {**target.params, "model": {**target.params["model"], "layers": jax.tree.unflatten(structure, noisy)}}
    return Draft(SmallModel(target.model, num_proposals=CHAIN), params)


def recurrent(method: str, tree: Any) -> Callable[[Target], Draft]:
    return lambda target: trained(method, target, tree=tree, chain_length=CHAIN)


CHECKS: dict[str, dict[str, Callable[[Target], Draft]]] = {
    "identity-blocks": {
        "dflash2": lambda target: trained("dflash2", target),
        "dflare": lambda target: trained("dflare", target),
        "dspark": lambda target: trained("dspark", target),
    },
    "identity-others": {
        "ddtree": ddtree,
        "ngram": lambda target: Draft(NGram(target.config.vocab_size, num_proposals=CHAIN), {}),
        "small_model": noisy_copy,
    },
    "identity-eagle": {
        "eagle_chain": recurrent("eagle", None),
        "eagle_tree": recurrent("eagle", FIXED),
        "eagle2_tree": recurrent("eagle", GROWN),
    },
    "identity-eagle3": {
        "eagle3_chain": recurrent("eagle3", None),
        "eagle3_tree": recurrent("eagle3", GROWN),
    },
}


@pytest.mark.parametrize(
    ("name", "make"),
    [
        pytest.param(name, make, id=name, marks=pytest.mark.slow(check, covers=(*COVERS, "configs/smollm2")))
        for check, drafts in CHECKS.items()
        for name, make in drafts.items()
    ],
)
def test_B14_identity_with_a_drafter_that_is_sometimes_right(
    name: str, make: Callable[[Target], Draft], plain: Plain, record_property: Record
) -> None:
    record_property("seed", SEED)
    accepted = plain.check(name, make(plain.target), printing(record_property))
    assert accepted[0] and sum(accepted[r] for r in accepted if r), f"{name} was always or never right: {accepted}"
