"""The guards that other tests lean on must themselves notice what they are for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.guards import count_compiles, no_compiles, no_implicit_transfers
from tests.helpers.process import run_on_devices


def test_a_compilation_is_counted_once_and_a_cached_call_is_not() -> None:
    step = jax.jit(lambda x: x * 3 + 1)
    x = jnp.arange(7.0)
    with count_compiles() as compiled:
        step(x).block_until_ready()
    assert compiled.count == 1
    with no_compiles():
        step(x).block_until_ready()
    other_shape = jnp.arange(8.0)
    with pytest.raises(AssertionError, match="1 compilations"), no_compiles():
        step(other_shape).block_until_ready()


def test_an_implicit_transfer_raises() -> None:
    step = jax.jit(lambda x: x + 1)
    on_host = np.arange(3.0, dtype=np.float32)
    on_device = jax.device_put(on_host)
    step(on_device)
    with no_implicit_transfers():
        step(on_device)
        jax.device_get(on_device)
    with pytest.raises(Exception, match=r"Disallowed host-to-device transfer"), no_implicit_transfers():
        step(on_host)


def test_devices_are_faked_in_a_process_of_their_own() -> None:
    assert run_on_devices("import jax\nprint(jax.device_count())", 3).strip() == "3"
