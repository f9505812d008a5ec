"""Trainers and producers as processes that kill themselves with SIGKILL at a named moment, and what must be left.

    python -m tests.training.feature_kills train|capture DIRECTORY MODE MOMENT SEED

DIRECTORY holds data.npz, the folder of compiled programs, and gets `run` and `features`.
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

STEPS, EVERY = 12, 3
TRAINER_MOMENTS = ("before", "during", "between")
EXAMPLES = 16
_PAUSE = 0.02  # seconds of a step and of a shard, so that a random moment lies within the work


def config(place: Path, mode: str) -> Any:
    """A run of 12 steps of two micro-batches of two, a checkpoint every 3 steps."""
    from tests.training import world

    more: dict[str, Any] = {"run__steps": STEPS, "run__checkpoint_every": EVERY, "optimizer__accumulation": 2}
    if mode != "online":
        more |= {"features__mode": mode, "features__path": str(place / "features"), "features__storage": "float32"}
        more |= {"features__shard_examples": 2, "features__shard_batches": 2, "features__spool_shards": 6}
        more |= {"features__lease_seconds": 5.0, "features__wait_seconds": 120.0}
    return world.config(place / "run", place.parent / "data.npz", **more)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(place: Path, mode: str, moment: str, seed: int) -> None:
    """One trainer; prints status, the step it resumed from and its last step."""
    from jaxspec.training import main
    from tests.training import world
    from tests.training.test_run import Lines

    checkpoints = place / "run" / "checkpoints"
    begun = max([int(one.name) for one in checkpoints.glob("*") if one.name.isdigit()], default=0)
    wanted = begun + EVERY  # the next checkpoint of this process

    class Paced(Lines):
        """Sleeps, and kills at the moment that was asked for."""

        def advance(self, step: int) -> None:
            super().advance(step)
            time.sleep(_PAUSE)
            if moment == "before" and step == begun + EVERY - 1:
                kill()
            if moment == "between" and step == wanted + 2:
                while not (checkpoints / str(wanted)).is_dir():
                    time.sleep(0.005)
                kill()

        def start(self, step: int, total: int | None) -> None:
            super().start(step, total)
            if moment == "random":
                delay = random.Random(seed).uniform(0.0, (STEPS - begun) * _PAUSE)
                threading.Timer(delay, kill).start()

    def watch() -> None:
        while not any(checkpoints.glob(f"{wanted}.orbax-checkpoint-tmp*")):
            time.sleep(0)
        kill()

    if moment == "during":
        threading.Thread(target=watch, daemon=True).start()
    if moment == "between" and mode == "spool":
        # the checkpoint is whole, its samples are consumed, and nobody has said that they are acknowledged
        from jaxspec.training.featurestore.consumer import SpoolBatches

        real = SpoolBatches.saved

        def unheard(self: Any, step: int | None) -> None:
            real(self, None if step is not None and step >= wanted else step)

        SpoolBatches.saved = unheard  # type: ignore[method-assign]
    report = main.run(config(place, mode), target=world.target(), reporter=Paced())
    print(report["status"], report["resumed_from"], report["step"], flush=True)


def capture(place: Path, mode: str, moment: str, seed: int) -> None:
    """One producer; prints its status and the shards that it made."""
    from jaxspec.training.featurestore import capture as captures
    from jaxspec.training.featurestore import producer, run
    from jaxspec.training.featurestore.spool import Spool
    from tests.training import world

    real_write, real_claim = captures.write_shard, Spool.claim
    count = 0

    def paced(storage: Any, name: str, records: Any) -> dict[str, Any]:
        nonlocal count
        count += 1
        time.sleep(_PAUSE)
        if count == 1 and moment == "random":
            threading.Timer(random.Random(seed).uniform(0.0, 4 * _PAUSE), kill).start()

        def halved() -> Any:
            for number, record in enumerate(records):
                if number == 1 and count == 2 and moment == "half":
                    kill()
                yield record

        entry = real_write(storage, name, halved())
        if count == 2 and moment == "uncommitted":
            kill()
        return entry

    def claimed(self: Any, number: int) -> bool:
        mine = real_claim(self, number)
        if mine and moment == "claimed":
            kill()
        return mine

    if mode == "offline" and moment == "claimed":  # there are no claims: all is written but the manifest
        real_json = captures.Storage.write

        def last(self: Any, name: str, content: bytes) -> None:
            if name == captures.MANIFEST:
                kill()
            real_json(self, name, content)

        captures.Storage.write = last  # type: ignore[method-assign]
    captures.write_shard = producer.write_shard = paced
    Spool.claim = claimed  # type: ignore[method-assign]
    report = run.run(config(place, mode), target=world.target(), say=lambda line: None)
    print(report["status"], report["shards"], flush=True)


def new_world(place: Path) -> None:
    """The data that the runs of one folder share."""
    from tests.training import world

    world.write_data(place / "data.npz", count=EXAMPLES)


@dataclasses.dataclass
class Place:
    """A run's folder beside the data and the programs that all share."""

    path: Path
    mode: str
    kills: int = 0

    def start(self, role: str, moment: str = "none", seed: int = 0) -> subprocess.Popen[str]:
        """A process of this run."""
        from tests.helpers.process import environment

        command = [sys.executable, "-m", "tests.training.feature_kills", role, str(self.path), self.mode, moment]
        pipe = subprocess.PIPE
        return subprocess.Popen([*command, str(seed)], env=environment(), text=True, stdout=pipe, stderr=pipe)

    def killed(self, process: subprocess.Popen[str]) -> bool:
        """Waits for a process that may kill itself; whether it did. AssertionError for any other bad end."""
        out, err = process.communicate(timeout=240)
        assert process.returncode in (0, -signal.SIGKILL), f"{out}\n{err[-3000:]}"
        self.kills += process.returncode != 0
        return process.returncode != 0

    def finish(self, role: str) -> list[str]:
        """A process that nothing disturbs, to its end; the words that it prints."""
        return said(self.start(role))


def said(process: subprocess.Popen[str]) -> list[str]:
    """Waits for a process that must end well; the words that it printed."""
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, f"{out}\n{err[-3000:]}"
    return out.split()


def undisturbed(place: Place) -> Place:
    """A whole run of this mode."""
    producer = place.start("capture") if place.mode == "spool" else None
    if place.mode == "offline":
        assert place.finish("capture")[0] == "finished"
    assert place.finish("train") == ["finished", "None", str(STEPS)]
    if producer is not None:
        assert said(producer)[0] == "finished"
    return place


def check(place: Place, whole: Place) -> dict[str, int]:
    """The run has the parameters, moments and position of the undisturbed one, and its account is closed: every step
    acknowledged once. Returns the account's counts."""
    from jaxspec.training.featurestore.ledger import audit, read_ledger
    from tests.training.test_run import assert_same

    assert_same(whole.path / "run", place.path / "run", STEPS)
    if place.mode != "spool":
        return {}
    counts = audit(read_ledger(place.path / "features" / "ledger.jsonl"))
    assert counts["steps"] == counts["acknowledged"] == STEPS and not counts["acknowledged_twice"], counts
    assert counts["waiting"] == counts["reopened"] == 0, counts
    assert not list((place.path / "features").glob("unit-*")), "shards were left"
    return counts


def files(place: Place) -> dict[str, bytes]:
    """What a capture left."""
    return {
        path.name: path.read_bytes() for path in (place.path / "features").iterdir() if path.name != ".capture.lock"
    }


if __name__ == "__main__":
    role, directory, mode_, moment_, seed_ = sys.argv[1:]
    import jax

    jax.config.update("jax_compilation_cache_dir", str(Path(directory).parent / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    {"train": train, "capture": capture}[role](Path(directory), mode_, moment_, int(seed_))
