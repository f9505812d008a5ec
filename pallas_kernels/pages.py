"""Writing rows into the pages of a K/V pool, in plain jnp."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

TRASH_PAGE = 0  # belongs to nobody: rows that go nowhere point at it


def write(
    pool: Float[Array, "pages page combined D"],
    page: Int[Array, "M"],
    offset: Int[Array, "M"],
    rows: Float[Array, "M combined D"],
) -> Float[Array, "pages page combined D"]:
    """The pool with each row at its place. Places are in range, and no two rows of other pages than the trash page have
    one.

    The scatter is told that no rows meet at all, which makes it a plain store: a GPU's scatter of 16-bit values that
    may meet is a compare-and-swap loop, in which thousands of padding rows of one place wait for one another. Of rows
    that do meet, in the trash page, XLA leaves open what is there afterwards; nobody reads it.
    """
    return pool.at[page, offset].set(rows.astype(pool.dtype), mode="promise_in_bounds", unique_indices=True)
