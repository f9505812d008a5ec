"""`make test-slow-identity`: 8 prompts x 512 tokens of SmolLM2, with and without drafters, token for token.

    identity         fresh DFlash and DSpark drafts (nearly all rejected), and one that recites the answer with one
                     mistake a round, so that every accept length occurs
    identity-blocks  DFlash 2, DFlare, DDTree and DSpark as their smoke runs train them, n-gram lookup, a small model
    identity-eagle   EAGLE and EAGLE-3 as their smoke runs train them: chains, a fixed tree, grown trees

Training comes first where it was not done before; a drafter that is never right would prove nothing.
"""

from __future__ import annotations

import dataclasses
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


def fresh(plain: Plain) -> None:
    """Drafters that know nothing, and one that knows everything but says it wrong once a round."""
    for method in ("dflash", "dspark"):
        plain.check(method, fresh_draft(plain.target, method, BLOCK, SEED))
    known = [[*one.prompt_ids, *one.tokens] for one in plain.answers]
    accepted = plain.check("reciter", reciter(plain.target.config.vocab_size, BLOCK, known))
    assert all(accepted[r] for r in range(BLOCK + 1)), accepted


def trained(method: str, target: Target, **changes: Any) -> Draft:
    """The drafter of a method's smoke run."""
    smoke.train(method)
    draft = load_drafter(smoke.export(method), target)
    return dataclasses.replace(draft, drafter=dataclasses.replace(draft.drafter, **changes))


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


def sometimes_right(plain: Plain, drafts: dict[str, Draft]) -> None:
    """Every drafter must have accepted and refused proposals."""
    for name, draft in drafts.items():
        accepted = plain.check(name, draft)
        assert accepted[0] and sum(accepted[r] for r in accepted if r), f"{name}: {accepted}"


@pytest.mark.slow("identity", covers=COVERS)
def test_B14_identity_on_a_real_model(record_property: Record) -> None:
    record_property("seed", SEED)
    fresh(Plain.of(printing(record_property)))


@pytest.mark.slow("identity-blocks", covers=(*COVERS, "configs/smollm2"))
def test_B14_block_drafters_lookup_and_a_small_model(record_property: Record) -> None:
    record_property("seed", SEED)
    plain = Plain.of(printing(record_property))
    target = plain.target
    blocks = {method: trained(method, target) for method in ("dflash2", "dflare", "dspark")}
    dflash = trained("dflash", target)
    blocks["ddtree"] = dataclasses.replace(dflash, drafter=DDTree(dflash.drafter, NODES))
    blocks["ngram"] = Draft(NGram(target.config.vocab_size, num_proposals=CHAIN), {})
    sometimes_right(plain, {**blocks, "small_model": noisy_copy(target)})


@pytest.mark.slow("identity-eagle", covers=(*COVERS, "configs/smollm2"))
def test_B14_eagle_chains_and_trees(record_property: Record) -> None:
    record_property("seed", SEED)
    plain = Plain.of(printing(record_property))
    eagle, eagle3 = (trained(method, plain.target, chain_length=CHAIN) for method in ("eagle", "eagle3"))
    of = lambda draft, tree: dataclasses.replace(draft, drafter=dataclasses.replace(draft.drafter, tree=tree))  # noqa: E731
    drafts = {"eagle_chain": of(eagle, None), "eagle_tree": of(eagle, FIXED), "eagle2_tree": of(eagle, GROWN)}
    sometimes_right(plain, drafts | {"eagle3_chain": of(eagle3, None), "eagle3_tree": of(eagle3, GROWN)})
