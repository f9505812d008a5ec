"""Confidences that are old enough: the budget of round n may only read those of round n - 2 (CONTRACTS.md §6.4).

A budget chosen from the present confidences would know the very tokens that it admits (§6.3).
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

LAG = 2


class ConfidenceRelay:
    """Carries each round's confidences from the device to the host, LAG rounds late.

    `publish` starts a copy that nobody waits for; by the time `resolve` hands it out two rounds have passed.
    """

    def __init__(self, read: Callable[[Any], np.ndarray] = np.asarray):
        self._read = read
        self._rounds: collections.deque[tuple[Any, np.ndarray]] = collections.deque(maxlen=LAG)

    def publish(self, confidence: Any, generations: np.ndarray) -> None:
        """A dispatched round's confidences [R, m] (a device array) and whose they are [R] (0: nobody's)."""
        if hasattr(confidence, "copy_to_host_async"):
            with jax.transfer_guard_device_to_host(
                "allow"
            ):  # a copy that is meant: a guard takes it for an implicit one
                confidence.copy_to_host_async()
        self._rounds.append((confidence, np.array(generations)))

    def resolve(self) -> tuple[np.ndarray, np.ndarray] | None:
        """(confidence, generations) of the round before the last published one; None until there have been two.

        Waits for the copy, so that every process of a sharded server reads the same values.
        """
        if len(self._rounds) < LAG:
            return None
        confidence, generations = self._rounds[0]
        return self._read(confidence), generations


class Carry:
    """Delays per-slot confidences by further steps: a slot reads what it wrote `steps` steps ago or, having sat out
    that step, before.
    """

    def __init__(self, steps: int, slots: int, proposals: int):
        self._confidence = np.zeros((steps, slots, proposals), np.float32)
        self._generations = np.zeros((steps, slots), np.int64)
        self._step = 0

    def exchange(
        self, slots: np.ndarray, confidence: np.ndarray, generations: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Hands this step's values in and the old ones out."""
        steps = len(self._confidence)
        if not steps:
            return confidence, generations
        cell = self._step % steps
        old = self._confidence[cell, slots].copy(), self._generations[cell, slots].copy()
        self._confidence[cell, slots], self._generations[cell, slots] = confidence, generations
        self._step += 1
        return old


def known_survival(confidence: np.ndarray, generations: np.ndarray, current: np.ndarray) -> np.ndarray:
    """Survival [R, m] float32 of each request; ones (optimistic) where the values are of the slot's earlier owner."""
    survival = np.cumprod(confidence.astype(np.float32), axis=1, dtype=np.float32)
    own = (current >= 1) & (generations == current)
    return np.where(own[:, None], survival, np.float32(1))
