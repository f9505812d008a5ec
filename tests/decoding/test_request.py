"""Requests that no slot may ever see: each is one RequestError that names its field."""

from __future__ import annotations

import numpy as np
import pytest

from jaxspec.decoding.request import SamplingParams, validate_prompt
from jaxspec.decoding.sampling import SlotSampling
from jaxspec.errors import RequestError

VOCAB = 10
BAD = {
    "temperature": (-1, float("nan"), float("inf"), "a", None, True),
    "top_k": (-1, 1.5, None),
    "top_p": (0, 1.1, float("nan"), None),
    "min_p": (-0.1, 1, "x"),
    "seed": (-1, 2**63, 1.0),
    "max_new_tokens": (-1, 2.5, None),
    "stop_token_ids": ((-1,), (VOCAB,), 5, None),
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
def test_bad_sampling_parameters_name_their_field(field, value):
    with pytest.raises(RequestError, match=field):
        SamplingParams(**{field: value}).validate(VOCAB)


@pytest.mark.parametrize("prompt", [[], [-1], [VOCAB], [1.5], [True], ["x"], [1] * 8])
def test_bad_prompts_say_prompt(prompt):
    with pytest.raises(RequestError, match="prompt"):
        validate_prompt(prompt, VOCAB, 8)


def test_numpy_integers_are_integers():
    validate_prompt(np.array([1, 2]), VOCAB, 8)
    SamplingParams(seed=np.int64(3), top_k=np.int32(2), stop_token_ids=(np.int64(1),)).validate(VOCAB)


def test_a_tiny_temperature_is_greedy_not_nan():
    one = np.ones(1, np.float32)
    sampling = SlotSampling(one * 1e-30, np.zeros(1, np.int32), one, 0 * one)
    probs = np.asarray(sampling.probabilities(np.array([[1.0, 90.0, 3.0]], np.float32)))
    np.testing.assert_array_equal(probs, [[0, 1, 0]])


@pytest.mark.parametrize("field", ["num_slots", "max_context", "prefill_chunk", "page_size"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_a_runner_of_no_size_is_refused(field, value):
    from jaxspec.decoding.runner import SlotRunner
    from jaxspec.errors import ConfigError

    with pytest.raises(ConfigError, match=field):
        SlotRunner(object(), **{field: value})  # refused before the target is looked at
