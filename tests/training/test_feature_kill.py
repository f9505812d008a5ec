"""A trainer and a producer that die at their worst moments: what follows is what would have been."""

from __future__ import annotations

import threading

import jax

from jaxspec.training import main
from jaxspec.training.featurestore import run
from tests.helpers.marks import REPEATS
from tests.training import feature_kills, world
from tests.training.feature_kills import STEPS, Place, check, new_world
from tests.training.test_run import Lines


def train(place: Place):
    return main.run(feature_kills.config(place.path, place.mode), target=world.target(), reporter=Lines())


@REPEATS
def test_a_spool_survives_both_sides(tmp_path):
    """The producer dies in the middle of a shard, the trainer after a checkpoint that nobody acknowledged."""
    new_world(tmp_path)
    (tmp_path / "programs").symlink_to(jax.config.jax_compilation_cache_dir)
    online, spooled = Place(tmp_path / "online", "online"), Place(tmp_path / "spooled", "spool")
    dying = spooled.start("capture", "half")
    assert train(online)["status"] == "finished"
    assert spooled.killed(dying)
    assert [path.name for path in sorted((spooled.path / "features").glob("unit-*.json"))] == ["unit-00000000.json"]
    settings = feature_kills.config(spooled.path, "spool")
    made: list[dict] = []
    capture = lambda: made.append(run.run(settings, target=world.target(), say=lambda line: None))  # noqa: E731
    producer = threading.Thread(target=capture)
    producer.start()
    assert spooled.killed(spooled.start("train", "between"))
    report = train(spooled)
    producer.join(60)
    assert (report["status"], report["resumed_from"], report["step"]) == ("finished", 3, STEPS)
    assert made == [{"status": "finished", "shards": STEPS - 1}]
    assert check(spooled, online)["replayed"] == 1
