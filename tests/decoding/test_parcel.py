"""One array for many: what is packed comes out as it was, and what cannot be packed is named."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxspec.decoding.parcel import Parcel


def test_what_goes_in_comes_out():
    tree = {
        "flags": np.array([True, False, True]),
        "table": np.arange(-3, 3, dtype=np.int32).reshape(2, 3),
        "seeds": np.array([[0xFFFFFFFF, 1]], np.uint32),
        "floats": np.array([np.pi, -0.0, np.inf, np.nan], np.float32),
        "one": np.int32(-7),
        "none": None,
        "empty": np.zeros((2, 0), np.float32),
    }
    parcel = Parcel.pack(tree)
    opened = jax.jit(lambda parcel: parcel.open())(parcel)
    assert jax.tree.structure(opened) == jax.tree.structure(tree)
    for got, wanted in zip(jax.tree.leaves(opened), jax.tree.leaves(tree), strict=True):
        assert (got.shape, got.dtype) == (np.shape(wanted), np.asarray(wanted).dtype)
        assert np.asarray(got).tobytes() == np.asarray(wanted).tobytes()  # bit by bit: NaN and -0.0 too


def test_one_form_is_one_program():
    first, second = (Parcel.pack({"a": np.full(2, value, np.int32)}) for value in (1, 2))
    assert jax.tree.structure(first) == jax.tree.structure(second)
    assert jax.tree.structure(first) != jax.tree.structure(Parcel.pack({"a": np.zeros(2, np.float32)}))


def test_other_words_are_refused():
    with pytest.raises(TypeError, match="dtype: found int64, expected one of bool, int32, uint32, float32"):
        Parcel.pack([np.zeros(2, np.int64)])
