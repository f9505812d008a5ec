"""Writing rows into the pages of a K/V pool, in plain jnp."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

TRASH_PAGE = 0  # belongs to nobody: rows that go nowhere point at it


def write(
    pool: Float[Array, "pages page combined D"],
    page: Int[Array, "M"],
    offset: Int[Array, "M"],
    rows: Float[Array, "M combined D"],
) -> Float[Array, "pages page combined D"]:
    """The pool with each row at its place; rows of the trash page are not written at all.

    No two rows of other pages may have one place: the scatter says so, which makes it a plain store. (A GPU's scatter
    of 16-bit values that may meet is a compare-and-swap loop, in which padding rows of one place wait for one another.)
    A dropped row's index lies behind the last page, another one for each row; a negative one would wrap, dropped or
    not.
    """
    behind = pool.shape[0] + jnp.arange(page.shape[0], dtype=page.dtype)
    kept = jnp.where(page == TRASH_PAGE, behind, page)
    return pool.at[kept, offset].set(rows.astype(pool.dtype), mode="drop", unique_indices=True)
