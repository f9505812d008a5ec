"""The spool: what is promised of its account, of leases, of back-pressure, and of a trainer that comes back."""

from __future__ import annotations

import json
import os
import threading
import time

import numpy as np
import pytest

from jaxspec.errors import DataError, InvariantError
from jaxspec.training.featurestore.codec import Layout
from jaxspec.training.featurestore.consumer import SpoolBatches
from jaxspec.training.featurestore.ledger import Ledger, audit, read_ledger
from jaxspec.training.featurestore.producer import batch_examples, produce
from jaxspec.training.featurestore.spool import Spool
from jaxspec.training.featurestore.storage import Storage
from jaxspec.training.pipeline import Batches
from tests.training import stored
from tests.training.stored import HIDDEN, WIDTH, TokenEncoder

LAYOUT = Layout(WIDTH, HIDDEN, "float32")
BATCH, ACCUMULATION, EACH = 2, 3, 2  # a step is three micro-batches, a shard two: steps begin within shards
STEPS, TOTAL = 6, 9  # of a run: 18 micro-batches


@pytest.fixture
def examples(tmp_path):
    return stored.examples(tmp_path)


def spool(tmp_path, examples, limit=4, lease_seconds=60.0, **changes):
    order = {"seed": 0, "shuffle": True, "batch_size": BATCH, "accumulation": ACCUMULATION, "shard_batches": EACH}
    about = stored.about(examples, LAYOUT, **order) | changes
    return Spool(Storage(tmp_path / "spool"), about, limit, lease_seconds)


def micro(examples):
    return Batches(examples, seq_len=24, batch_size=BATCH)


def make(one, examples, total=TOTAL, stop=lambda: False, pause=None, encoder=None):
    return produce(
        one, micro(examples), lambda: encoder or TokenEncoder(LAYOUT), total=total, say=lambda line: None, stop=stop,
        pause=pause or time.sleep,
    )  # fmt: skip


def trainer(one, examples, step=0, wait=10.0):
    batches = SpoolBatches(one, wait, examples=examples, seq_len=24, batch_size=BATCH, accumulation=ACCUMULATION)
    batches.set_state({**batches.get_state(), "next_index": step})
    batches.begin(step)
    return batches


def events(one):
    return read_ledger(one.storage.local("ledger.jsonl"))


def test_a_micro_batch_is_the_one_that_the_run_takes(examples):
    steps = Batches(examples, seq_len=24, batch_size=BATCH, accumulation=ACCUMULATION)
    for step in range(3):
        ids = next(steps)["example_ids"]
        for part in range(ACCUMULATION):
            made = batch_examples(micro(examples), step * ACCUMULATION + part)
            assert [one["example_id"] for one in made] == ids[part].tolist()


def test_producers_stop_at_the_limit_and_the_trainer_gets_whole_steps(tmp_path, examples):
    one = spool(tmp_path, examples)
    assert make(one, examples, pause=lambda seconds: pytest.fail("waited"), stop=full(one)) == 4
    assert one.missing(TOTAL) == ([], False) and len(one.storage.names("unit-", ".json")) == 4
    batches = trainer(one, examples)
    expected = Batches(examples, seq_len=24, batch_size=BATCH, accumulation=ACCUMULATION)
    for step in (1, 2):
        host, plain = next(batches), next(expected)
        np.testing.assert_array_equal(host["input_ids"], plain["input_ids"])
        length = plain["lengths"][2, 1]
        row = {"input_ids": plain["input_ids"][2, 1, :length], "loss_mask": plain["loss_mask"][2, 1, :length]}
        own = stored.arrays(row, LAYOUT)
        np.testing.assert_array_equal(host["features"][2, 1, :length], own["features"].astype(np.float32))
        batches.trained(step)
    assert not batches.ready() and one.missing(TOTAL)[0] == []  # step 3 needs shard 4, and nothing was acknowledged
    batches.saved(1)  # a checkpoint covers step 1: micro-batches 0 to 2, so shard 1 is still needed
    assert one.cursor() == (1, False) and one.storage.names("unit-", ".json")[0] == "unit-00000001.json"
    assert one.missing(TOTAL)[0] == [4]
    batches.close()
    counts = audit(events(one))
    assert (counts["steps"], counts["acknowledged"], counts["waiting"]) == (2, 1, 1)


def full(one):
    return lambda: len(one.storage.names("unit-", ".json")) >= one.limit


def test_what_was_consumed_and_not_acknowledged_is_replayed_and_acknowledged_once(tmp_path, examples):
    one = spool(tmp_path, examples, limit=TOTAL)
    make(one, examples)
    first = trainer(one, examples)
    seen = []
    for step in range(1, 5):
        seen.append(next(first)["example_ids"].tolist())
        first.trained(step)
        if step == 2:
            first.saved(2)
    assert one.storage.names("unit-", ".arrayrecord")[0] == "unit-00000003.arrayrecord"
    first.close()  # the process dies with steps 3 and 4 consumed
    with one.storage.local("ledger.jsonl").open("ab") as torn:
        torn.write(b'{"event": "cons')
    second = trainer(one, examples, step=2)
    for step in (3, 4):
        assert next(second)["example_ids"].tolist() == seen[step - 1]
        second.trained(step)
    second.close()
    third = trainer(one, examples, step=4)  # a checkpoint of step 4 was whole, and nobody had said so
    for step in (5, 6):
        next(third)
        third.trained(step)
    third.saved(6)
    third.finish()
    third.close()
    assert audit(events(one)) == {
        "steps": 6, "acknowledged": 6, "acknowledged_twice": 0, "replayed": 2, "waiting": 0, "reopened": 0,
    }  # fmt: skip
    assert one.storage.names("unit-") == [] and one.missing(TOTAL) == ([], True)


def test_a_checkpoint_of_a_step_without_a_line_proves_that_it_was_consumed(tmp_path, examples):
    one = spool(tmp_path, examples, limit=TOTAL)
    make(one, examples)
    first = trainer(one, examples)
    next(first)
    first.close()  # killed after the checkpoint of step 1, before its line
    trainer(one, examples, step=1).close()
    assert audit(events(one))["acknowledged"] == 1


def test_shards_come_again_where_the_newest_checkpoint_was_given_up(tmp_path, examples):
    one = spool(tmp_path, examples, limit=TOTAL)
    make(one, examples)
    first = trainer(one, examples)
    whole = [next(first)["features"] for _ in range(4)]
    first.saved(4)
    first.close()
    second = trainer(one, examples, step=1)
    assert one.missing(TOTAL)[0] == [1, 2, 3, 4, 5]
    make(one, examples)
    for step in (2, 3, 4):
        np.testing.assert_array_equal(next(second)["features"], whole[step - 1])
    second.saved(4)
    second.close()
    counts = audit(events(one))
    assert counts["acknowledged"] == 4 and counts["reopened"] == 3 == counts["acknowledged_twice"]


def test_several_producers_make_every_shard_once(tmp_path, examples):
    spools = [spool(tmp_path, examples, limit=TOTAL) for _ in range(3)]
    made: list[int] = []
    threads = [threading.Thread(target=lambda one=one: made.append(make(one, examples))) for one in spools]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(made) == TOTAL and len(spools[0].storage.names("unit-", ".json")) == TOTAL
    assert not spools[0].storage.names("unit-", ".lease")


def test_a_lease_is_free_when_its_holder_is_gone_or_silent(tmp_path, examples):
    one, other = spool(tmp_path, examples), spool(tmp_path, examples)
    assert one.claim(0) and not other.claim(0) and not one.claim(0)
    one.release(0)
    assert other.claim(0)
    lease = one.storage.local("unit-00000000.lease")
    lease.write_text(json.dumps({"producer": "x", "host": "elsewhere", "pid": 1}))
    assert not one.claim(0)
    os.utime(lease, (time.time() - 61, time.time() - 61))
    assert one.claim(0) and not other.claim(0)
    dead = os.fork()
    if dead == 0:
        os._exit(0)
    os.waitpid(dead, 0)
    lease.write_text(lease.read_text().replace(f'"pid": {os.getpid()}', f'"pid": {dead}'))
    assert other.claim(0)


def test_half_a_shard_never_counts(tmp_path, examples):
    one = spool(tmp_path, examples)
    with pytest.raises(RuntimeError, match="went away"):
        make(one, examples, encoder=TokenEncoder(LAYOUT, fails=3))
    there = len(one.storage.names("unit-", ".json"))
    assert there < 4
    one.release(there)  # this process is alive, so its lease is
    write = lambda name: one.storage.write(name, b"torn") or {"file": name, "bytes": 9, "sha256": ""}  # noqa: E731
    one.commit(there, write)
    with pytest.raises(DataError, match=r"4 bytes, expected 9; delete unit-0000000\d\.json"):
        one.account(there)


def test_a_file_without_its_account_is_made_again(tmp_path, examples):
    one = spool(tmp_path, examples)
    one.storage.write("unit-00000000.arrayrecord", b"whole, but its producer died before it said so")
    assert one.account(0) is None and one.missing(TOTAL)[0] == [0, 1, 2, 3]
    make(one, examples, stop=full(one))
    assert one.account(0)["bytes"] == one.storage.size("unit-00000000.arrayrecord") > 1000


def test_a_late_producer_leaves_nothing_behind_the_cursor(tmp_path, examples):
    one = spool(tmp_path, examples)
    one.move_cursor(3)
    one.commit(1, lambda name: one.storage.write(name, b"x") or {"file": name, "bytes": 1, "sha256": ""})
    assert one.storage.names("unit-") == []
    one.move_cursor(3, done=True)
    assert one.missing(TOTAL) == ([], True) and make(one, examples) == 0


def test_the_spool_is_one_runs_and_one_trainers(tmp_path, examples):
    one = spool(tmp_path, examples)
    with pytest.raises(DataError, match=r"spool\.json\): seed: the files have 0, the run wants 1"):
        spool(tmp_path, examples, seed=1)
    batches = trainer(one, examples, wait=0.1)
    with pytest.raises(DataError, match="in use by another trainer"):
        trainer(one, examples)
    with pytest.raises(DataError, match=r"no shard \[0, 1\] within 0\.1 s.*start `jaxspec capture --spool`"):
        next(batches)
    batches.close()


def test_the_ledger_keeps_its_order(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.add("consumed", step=1)
    for event, step in (("consumed", 3), ("consumed", 1), ("acknowledged", 2), ("acknowledged", 0), ("lost", 1)):
        with pytest.raises(InvariantError, match="spool ledger"):
            ledger.add(event, step=step)
    ledger.add("acknowledged", step=1, durable=True)
    ledger.close()
    again = Ledger(tmp_path / "ledger.jsonl")
    assert (again.consumed, again.acknowledged) == (1, 1)
    again.close()
    text = (tmp_path / "ledger.jsonl").read_text()
    (tmp_path / "ledger.jsonl").write_text("nonsense\n" + text)
    with pytest.raises(DataError, match="line 1"):
        read_ledger(tmp_path / "ledger.jsonl")


@pytest.mark.parametrize("content", ["{}", '{"shard": "x", "done": false}', '{"shard": -5, "done": false}', "[1]", "{"])
def test_an_odd_cursor_is_one_error(tmp_path, examples, content):
    one = spool(tmp_path, examples)
    one.storage.local("cursor.json").write_text(content)
    with pytest.raises(DataError, match=r"features\.path \(cursor\.json\)"):
        make(one, examples)


@pytest.mark.parametrize("name", ["bytes", "file", "producer", "sha256", "batches"])
def test_an_account_that_lacks_a_field_is_one_error(tmp_path, examples, name):
    one = spool(tmp_path, examples)
    make(one, examples, total=1)
    path = one.storage.local("unit-00000000.json")
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != name}))
    with pytest.raises(DataError, match=rf"unit-00000000\.json\) {name}: None, .* restore the file, or delete it"):
        one.account(0)


@pytest.mark.parametrize("line", ["{}", "3", '{"event": "consumed", "step": "a"}', '{"event": 1}', "x"])
def test_an_odd_line_of_the_ledger_is_one_error(tmp_path, line):
    path = tmp_path / "ledger.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(DataError, match=r"ledger\.jsonl, line 1"):
        read_ledger(path)
