"""These tests compile many small programs once each: XLA's optimisations cost more than they save.

The long tests that serve (tests/oracle) and the golden cases run fully optimised programs.
"""

import jax
import pytest


@pytest.fixture(scope="package", autouse=True)
def quick_compilation():
    """Programs of this folder are compiled without most optimisations."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
