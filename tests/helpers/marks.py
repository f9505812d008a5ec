"""Marks that several suites share."""

import pytest

REPEATS = pytest.mark.slow("repeats", covers=("jaxspec",))
"""Further parameters of a test whose first ones `make test` runs: another family, size or type, the same code."""
