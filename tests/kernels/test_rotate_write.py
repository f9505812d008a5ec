"""Norm, rotation and page write of a joined product: every implementation against a loop over rows and heads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rotate_write import api
from tests.helpers.kernels import assert_close, interpreted
from tests.helpers.scatters import assert_apart, scatters

M, QUERIES, KV, PAGE, PAGES, EPS = 5, 4, 2, 4, 6, 1e-6
NOWHERE = 2  # a padding row


def draw(dim: int, dtype: str, normed: bool) -> dict[str, np.ndarray | None]:
    """Operands; the trash page and the padding row's own values hold NaN."""
    rng = np.random.default_rng(dim)
    heads = rng.normal(size=(M, QUERIES + 2 * KV, dim))
    heads[NOWHERE] = np.nan
    pool = rng.normal(size=(PAGES, PAGE, 2 * KV, dim))
    pool[0] = np.nan
    angles = rng.uniform(0, 6, (M, dim // 2))
    return {
        "heads": heads.astype(jnp.dtype(dtype)), "norm": rng.normal(1, 0.3, (QUERIES + KV, dim)) if normed else None,
        "cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32),
        "page": np.array([3, 5, 0, 3, 1], np.int32), "offset": np.array([1, 3, 0, 2, 0], np.int32),
        "pool": pool.astype(jnp.dtype(dtype)),
    }  # fmt: skip


def by_hand(x: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    heads, pool = np.asarray(x["heads"], np.float64), np.asarray(x["pool"], np.float64).copy()
    half = heads.shape[-1] // 2
    for row in range(M):
        for head in range(QUERIES + KV):
            values = heads[row, head]
            if x["norm"] is not None:
                values = values / np.sqrt((values**2).mean() + EPS) * x["norm"][head]
            c, s, first, second = x["cos"][row], x["sin"][row], values[:half], values[half:]
            heads[row, head] = np.concatenate([first * c - second * s, second * c + first * s])
        if x["page"][row]:
            pool[x["page"][row], x["offset"][row], 0::2] = heads[row, QUERIES : QUERIES + KV]
            pool[x["page"][row], x["offset"][row], 1::2] = heads[row, QUERIES + KV :]
    return heads[:, :QUERIES], heads[:, QUERIES : QUERIES + KV], heads[:, QUERIES + KV :], pool


@pytest.mark.parametrize("name", sorted(api.IMPLEMENTATIONS))
@pytest.mark.parametrize(
    ("dim", "dtype", "normed"), [(8, "float32", True), (6, "float32", False), (16, "bfloat16", True)]
)
def test_rows_are_those_of_a_loop(name, dim, dtype, normed):
    x = draw(dim, dtype, normed)
    call = jax.jit(lambda x: api.rotate_write(**x, eps=EPS, implementation=name, **interpreted(name)))
    found, expected = call(x), by_hand(x)
    real = np.arange(M) != NOWHERE
    for got, wanted in zip(found[:3], expected[:3], strict=True):
        assert got.dtype == jnp.dtype(dtype)
        assert_close(got[real], wanted[real])
    assert_close(found[3][1:], expected[3][1:])  # whatever is in the trash page


def test_no_row_of_the_plain_form_waits_for_another_one():
    x = draw(16, "bfloat16", True)
    assert_apart(scatters(lambda x: api.rotate_write(**x, eps=EPS), x), trash=0)


def test_what_does_not_fit_is_named():
    x = draw(8, "float32", True)
    with pytest.raises(ValueError, match=r"norm: found \(5, 8\), expected \(6, 8\)"):
        api.rotate_write(**{**x, "norm": x["norm"][1:]}, eps=EPS)
    with pytest.raises(ValueError, match="heads, pool: found"):
        api.rotate_write(**{**x, "heads": x["heads"][:, :4]}, eps=EPS)
    with pytest.raises(ValueError, match="implementation: found 'rocm', expected auto or one of"):
        api.rotate_write(**x, eps=EPS, implementation="rocm")
