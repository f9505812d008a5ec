"""`make test-slow-features-kill`: SIGKILL of trainers, of producers and of both, in every feature mode.

Each kill is that of a process of its own. Of the trainers' kills one in five falls before a process's first save, one
inside an asynchronous save, one after a checkpoint that nobody has acknowledged yet (online and offline: some steps
after it), the rest at a random moment; the producers' likewise. Every run must end with the parameters, moments and
input position of an undisturbed one, bit for bit, and every step of a spool acknowledged once.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.slow.identical import Record
from tests.training.feature_kills import (
    STEPS,
    TRAINER_MOMENTS,
    Place,
    check,
    files,
    new_world,
    said,
    undisturbed,
)

KILLS = 20
MODES = ("online", "offline", "spool")
COVERS = ("jaxspec/training", "jaxspec/config")
TRAINER = (*TRAINER_MOMENTS, "random", "random")
PRODUCER = ("half", "uncommitted", "random", "random", "claimed")  # offline the last is all but the manifest


class Campaign:
    """Runs of one mode, two at a time, until so many kills were made; counts them by moment."""

    def __init__(self, mode: str, root: Path):
        self.mode, self.root, self.counts = mode, root, Counter[str]()
        new_world(root)
        self.whole = undisturbed(Place(root / "whole", mode))
        self._lock, self._numbers, self._seeds = threading.Lock(), itertools.count(), itertools.count(1)
        self.runs = self.replayed = 0

    def until(self, kills: int, run: Callable[[Place], None]) -> None:
        """Each worker begins another run while there are kills to make."""

        def work() -> None:
            while self.counts.total() < kills:
                place = Place(self.root / f"run-{next(self._numbers)}" / "a", self.mode)
                place.path.parent.mkdir()
                (place.path.parent / "data.npz").symlink_to(self.root / "data.npz")
                (place.path.parent / "programs").symlink_to(self.root / "programs")
                run(place)
                counts = check(place, self.whole)
                with self._lock:
                    self.runs, self.replayed = self.runs + 1, self.replayed + counts.get("replayed", 0)

        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(work), pool.submit(work)]:
                done.result()

    def kill(self, place: Place, role: str, moment: str) -> bool:
        """One process that kills itself; whether it got to it."""
        killed = place.killed(place.start(role, moment, next(self._seeds)))
        with self._lock:
            self.counts[moment] += killed
        return killed

    def record(self, record_property: Record, who: str) -> None:
        """Counts into the result file."""
        for moment, count in sorted(self.counts.items()):
            record_property(f"{self.mode}_{who}_{moment}", count)
        record_property(f"{self.mode}_{who}_kills", self.counts.total())
        record_property(f"{self.mode}_{who}_runs", self.runs)
        if self.mode == "spool":
            record_property(f"{self.mode}_{who}_steps_replayed", self.replayed)

    def enough(self, moments: tuple[str, ...]) -> None:
        """At least three kills at each named moment."""
        assert self.counts.total() >= KILLS and all(self.counts[moment] >= 3 for moment in moments), self.counts


def ended(place: Place) -> None:
    """The trainer's last process trains to the end."""
    words = place.finish("train")
    assert words[-1] == str(STEPS) and words[0] in ("finished", "already"), words


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.slow("features-kill", covers=COVERS)
@pytest.mark.timeout(1500)
def test_killed_trainers(mode: str, tmp_path: Path, record_property: Record) -> None:
    campaign = Campaign(mode, tmp_path)

    def run(place: Place) -> None:
        producer = place.start("capture") if mode == "spool" else None
        if mode == "offline":
            place.path.mkdir()
            (place.path / "features").symlink_to(campaign.whole.path / "features")
        for moment in TRAINER:
            campaign.kill(place, "train", moment)
        ended(place)
        if producer is not None:
            assert said(producer)[0] == "finished"

    campaign.until(KILLS, run)
    campaign.record(record_property, "trainer")
    campaign.enough(TRAINER_MOMENTS)


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.slow("features-kill", covers=COVERS)
@pytest.mark.timeout(1500)
def test_killed_producers(mode: str, tmp_path: Path, record_property: Record) -> None:
    """Offline: the same bytes in the end. Spool: beside a trainer that lives, and in every second run beside another
    producer."""
    campaign = Campaign(mode, tmp_path)
    wanted = files(campaign.whole) if mode == "offline" else {}

    def run(place: Place) -> None:
        trainer = place.start("train") if mode == "spool" else None
        for moment in PRODUCER:
            campaign.kill(place, "capture", moment)
        second = place.start("capture") if mode == "spool" and int(place.path.parent.name[4:]) % 2 else None
        assert place.finish("capture")[0] == "finished"
        if second is not None:
            assert said(second)[0] == "finished"
        if trainer is not None:
            assert said(trainer) == ["finished", "None", str(STEPS)]
            return
        assert files(place) == wanted
        ended(place)

    campaign.until(KILLS, run)
    campaign.record(record_property, "producer")
    campaign.enough(("half", "uncommitted"))


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.slow("features-kill", covers=COVERS)
@pytest.mark.timeout(1500)
def test_killed_trainers_and_producers(mode: str, tmp_path: Path, record_property: Record) -> None:
    """Both in one run. Spool: the producer dies at the trainer's moment, and only pairs count; offline: one after the
    other, since the files must be whole before a trainer reads them."""
    campaign = Campaign(mode, tmp_path)

    def offline(place: Place) -> None:
        for one in PRODUCER:
            place.killed(place.start("capture", one, next(campaign._seeds)))
        assert place.finish("capture")[0] == "finished"
        died = place.kills
        for one in TRAINER:
            campaign.kill(place, "train", one)
        assert died >= 3
        ended(place)

    def spool(place: Place) -> None:
        for moment in TRAINER:
            producer = place.start("capture")
            died = place.killed(place.start("train", moment, next(campaign._seeds)))
            producer.send_signal(signal.SIGKILL)
            both = place.killed(producer) and died
            with campaign._lock:
                campaign.counts[moment] += both
        last = place.start("capture")
        ended(place)
        assert said(last)[0] == "finished"

    campaign.until(KILLS, offline if mode == "offline" else spool)
    campaign.record(record_property, "both")
    campaign.enough(TRAINER_MOMENTS)
