"""The demo: train, export, reload, measure and serve a drafter for a real model."""

from jaxspec.platform import quiet_platform

quiet_platform()  # before anything imports jax
