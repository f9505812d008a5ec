"""Compiled programs are shared between the tests of this folder: many runs, few different steps."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(scope="package", autouse=True)
def compiled_programs(tmp_path_factory):
    """JAX's compilation cache in a temporary folder, for as long as this folder's tests run."""
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in zip(names, (str(tmp_path_factory.mktemp("programs")), 0.3, -1), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
