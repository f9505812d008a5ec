"""The demo's shipped data and its overlap check."""

from __future__ import annotations

import numpy as np
import pytest

from jaxspec.training.overlap import find_overlap


@pytest.mark.ci
def test_three_shipped_answers_are_the_targets_own():
    from demo.make_answers import check

    assert check(3)


def test_shipped_data_is_whole():
    from demo.make_answers import DATA

    with np.load(DATA) as data:
        tokens, offsets, prompts = data["tokens"], data["offsets"], data["prompt_lengths"]
    assert tokens.dtype == np.uint16 and offsets[-1] == len(tokens) and len(prompts) == len(offsets) - 1 >= 400
    assert (prompts < np.diff(offsets)).all()


def test_overlap_finds_whole_prompts_and_thirteen_words_in_a_row():
    prompt = "One two three four five six seven eight nine ten eleven twelve thirteen fourteen?"
    close = "x ONE two, three four five six seven eight nine ten eleven twelve thirteen y"
    far = "one two three four five six seven eight nine ten eleven twelve thirty"
    assert find_overlap([prompt], [close]).ngram == (0,)
    assert find_overlap([prompt], [far]).ngram == ()
    assert find_overlap([prompt], [f"so: {prompt.lower()} yes"]).exact == (0,)
    assert find_overlap(["Hi there"], ["well hi there"]).exact == (0,)
