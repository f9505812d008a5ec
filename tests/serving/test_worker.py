"""The worker against a scripted runner: whose tokens go where, what cancelling frees, what a failure takes along."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator

import pytest

from jaxspec.decoding.request import SamplingParams
from jaxspec.errors import ServerError
from jaxspec.serving.facts import Loaded
from jaxspec.serving.failure import Failure, Status
from jaxspec.serving.scheduler import AGING_SECONDS, PATIENCE_SECONDS
from jaxspec.serving.worker import State, Stopped, Ticket, Worker
from tests.helpers.scripted_runner import PATIENCE, ScriptedRunner, expected_answer
from tests.serving.harness import facts_of, settle


class Inbox:
    """A sink that a test can wait on."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.items: list = []

    def __call__(self, item) -> None:
        with self.changed:
            self.items.append(item)
            self.changed.notify_all()

    @property
    def over(self) -> bool:
        return bool(self.items) and (isinstance(self.items[-1], Failure) or self.items[-1].reason is not None)

    def wait(self, condition=None):
        with self.changed:
            assert self.changed.wait_for(condition or (lambda: self.over), PATIENCE), self.items
        return self.items[-1]

    @property
    def tokens(self) -> list[int]:
        return [token for item in self.items if not isinstance(item, Failure) for token in item.tokens]


@contextlib.contextmanager
def working(runner: ScriptedRunner, max_queue: int = 64, start=None) -> Iterator[Worker]:
    states: list = []
    changed = threading.Condition()

    def on_state(state, error):
        with changed:
            states.append(state)
            changed.notify_all()

    worker = Worker(
        start or (lambda check: Loaded(runner, None, facts_of(runner))), max_queue=max_queue, on_state=on_state
    )
    worker.states = states
    worker.start()
    try:
        with changed:
            assert changed.wait_for(lambda: states, PATIENCE)
        yield worker
    finally:
        runner.rounds.allow()
        runner.prefills.allow()
        worker.drain(0)
        assert worker.join(PATIENCE)
        assert runner.violations == []


def ask(worker: Worker, prompt=(1, 2, 3), **params):
    inbox = Inbox()
    return worker.submit(prompt, SamplingParams(**params), inbox), inbox


def test_answers_and_usage():
    runner = ScriptedRunner(widths=(3,))
    with working(runner) as worker:
        _, inbox = ask(worker, max_new_tokens=8)
        last = inbox.wait()
        assert inbox.tokens == expected_answer((1, 2, 3), 8)
        assert [len(item.tokens) for item in inbox.items] == [1, 3, 3, 1]
        usage = last.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.rounds) == (3, 8, 3)
        assert (usage.accepted, usage.proposed) == (6, 12)
        assert usage.queue_seconds >= 0 and usage.prefill_seconds >= 0


def test_more_requests_than_slots_each_get_their_own_tokens():
    runner = ScriptedRunner(num_slots=3)
    with working(runner) as worker:
        prompts = [tuple(range(1, 2 + n)) for n in range(20)]
        inboxes = [ask(worker, prompt, max_new_tokens=5 + n)[1] for n, prompt in enumerate(prompts)]
        for n, (prompt, inbox) in enumerate(zip(prompts, inboxes, strict=True)):
            inbox.wait()
            assert inbox.tokens == expected_answer(prompt, 5 + n)
        assert runner.admitted == prompts, "first come, first served"


def test_a_burst_fills_the_free_slots_before_the_next_round():
    runner = ScriptedRunner(widths=(1,))
    with working(runner) as worker:
        runner.rounds.hold()
        _, first = ask(worker, max_new_tokens=50)
        runner.wait(lambda: runner.rounds.waiting)
        others = [ask(worker, (9, n), max_new_tokens=3)[1] for n in range(3)]
        runner.rounds.allow(1)
        runner.wait(lambda: runner.steps == 1 and runner.rounds.waiting)
        assert len(runner.admitted) == 4
        runner.rounds.allow()
        assert all(inbox.wait().reason == "length" for inbox in [first, *others])


def test_priority_then_deadline_then_arrival():
    runner = ScriptedRunner(num_slots=1, widths=(1,))
    with working(runner) as worker:
        runner.rounds.hold()
        holder = ask(worker, (1,), max_new_tokens=3)[1]
        runner.wait(lambda: runner.rounds.waiting)
        soon, late = time.monotonic() + 50, time.monotonic() + 90
        about = {2: {}, 3: {"deadline": late}, 4: {"deadline": soon}, 5: {"priority": 1}, 6: {"priority": -1}}
        inboxes = [holder]
        for prompt, more in about.items():
            inboxes.append(Inbox())
            worker.submit((prompt,), SamplingParams(max_new_tokens=2), inboxes[-1], **more)
        runner.rounds.allow()
        for inbox in inboxes:
            inbox.wait()
        assert runner.admitted == [(1,), (5,), (4,), (3,), (2,), (6,)]
        assert runner.priorities == [0, 1, 0, 0, 0, -1]


def test_waiting_is_worth_priority():
    runner = ScriptedRunner(num_slots=1, widths=(1,))
    with working(runner) as worker:
        runner.rounds.hold()
        inboxes = [ask(worker, (1,), max_new_tokens=3)[1], Inbox(), Inbox()]
        runner.wait(lambda: runner.rounds.waiting)
        params, now = SamplingParams(max_new_tokens=2), time.monotonic()
        worker.submit((2,), params, inboxes[1], priority=1)
        worker.submit((3,), params, inboxes[2], arrived=now - 2.5 * AGING_SECONDS)
        runner.rounds.allow()
        for inbox in inboxes:
            inbox.wait()
        assert runner.admitted == [(1,), (3,), (2,)]


def test_a_deadline_that_cannot_be_met_is_refused_at_once():
    runner = ScriptedRunner(num_slots=1, widths=(1,), seconds_each=10.0)
    with working(runner) as worker:
        params, now, inboxes = SamplingParams(max_new_tokens=2), time.monotonic(), [Inbox(), Inbox()]
        worker.submit((1, 2, 3), params, inboxes[0], deadline=now + 29)
        worker.submit((4, 5, 6), params, inboxes[1], deadline=now + 60)
        refused = inboxes[0].wait()
        assert refused.status is Status.RESOURCE_EXHAUSTED and "deadline" in refused.message
        assert inboxes[1].wait().reason == "length"
        assert runner.admitted == [(4, 5, 6)]
        settle(worker, runner)


def test_a_deadline_that_passes_in_the_queue_is_said_so():
    runner = ScriptedRunner(num_slots=1, widths=(1,))
    with working(runner) as worker:
        runner.rounds.hold()
        holder = ask(worker, (1,), max_new_tokens=3)[1]
        runner.wait(lambda: runner.rounds.waiting)
        late = Inbox()
        worker.submit((2,), SamplingParams(), late, deadline=time.monotonic() + 0.02)
        time.sleep(0.03)
        runner.rounds.allow()
        assert late.wait().status is Status.DEADLINE_EXCEEDED
        assert holder.wait().reason == "length" and runner.admitted == [(1,)]
        settle(worker, runner)


def test_what_has_no_pages_is_overtaken_but_not_for_ever():
    runner = ScriptedRunner(num_slots=3, widths=(1,), room=2)
    with working(runner) as worker:
        runner.rounds.hold()
        inboxes = [ask(worker, (1,), max_new_tokens=40)[1]]
        runner.wait(lambda: runner.rounds.waiting)
        params, now = SamplingParams(max_new_tokens=2), time.monotonic()

        def submit(*asked) -> None:
            for prompt, age in asked:
                inboxes.append(Inbox())
                worker.submit(prompt, params, inboxes[-1], arrived=now - age)

        submit(((2, 2, 2), 0.0), ((3,), 0.0))
        runner.rounds.allow(4)
        runner.wait(lambda: runner.steps == 4 and runner.rounds.waiting)
        assert runner.admitted == [(1,), (3,)]
        submit(((4, 4, 4), PATIENCE_SECONDS), ((5,), 0.0))
        runner.rounds.allow(4)
        runner.wait(lambda: runner.steps == 8 and runner.rounds.waiting)
        assert runner.admitted == [(1,), (3,)]
        runner.room = 3
        runner.rounds.allow()
        for inbox in inboxes:
            inbox.wait()
        assert runner.admitted == [(1,), (3,), (4, 4, 4), (2, 2, 2), (5,)]


def test_seconds_of_queue_prefill_and_decoding_add_up():
    runner = ScriptedRunner(num_slots=1, widths=(1,))
    with working(runner) as worker:
        runner.rounds.hold()
        began = time.monotonic()
        _, inbox = ask(worker, max_new_tokens=3)
        runner.wait(lambda: runner.rounds.waiting)
        time.sleep(0.03)
        runner.rounds.allow(1)  # the first token, and one of a round
        inbox.wait(lambda: inbox.items)
        time.sleep(0.02)
        runner.rounds.allow()
        usage = inbox.wait().usage
        assert usage.prefill_seconds > 0.03 and usage.decode_seconds > 0.02
        total = usage.queue_seconds + usage.prefill_seconds + usage.decode_seconds
        assert 0.05 < total <= time.monotonic() - began
        assert usage.decode_seconds < total - 0.03


def test_answers_to_one_request_are_queued_together_or_not_at_all():
    runner = ScriptedRunner(num_slots=2)
    with working(runner, max_queue=1) as worker:
        runner.rounds.hold()
        inboxes = [Inbox() for _ in range(4)]
        params = SamplingParams(max_new_tokens=4)
        tickets = [Ticket((1, 2), params, inbox, sample=index) for index, inbox in enumerate(inboxes)]
        with pytest.raises(Failure) as full:
            worker.submit_all(tickets)
        assert full.value.status is Status.RESOURCE_EXHAUSTED and worker.load() == (0, 0, 0)
        worker.submit_all(tickets[:3])
        runner.rounds.allow()
        for index, inbox in enumerate(inboxes[:3]):
            inbox.wait()
            assert inbox.tokens == expected_answer((1, 2), 4, index)


# -- cancelling --


def test_B33_cancel_while_queued_frees_the_place_at_once():
    runner = ScriptedRunner(num_slots=1)
    with working(runner, max_queue=1) as worker:
        runner.rounds.hold()
        _, running = ask(worker, (1,), max_new_tokens=6)
        runner.wait(lambda: runner.live == 1)
        queued, inbox = ask(worker, (2,))
        with pytest.raises(Failure) as full:
            ask(worker, (3,))
        assert full.value.status is Status.RESOURCE_EXHAUSTED
        worker.cancel(queued)
        _, third = ask(worker, (3,), max_new_tokens=2)
        runner.rounds.allow()
        running.wait(), third.wait()
        assert inbox.items == [] and (2,) not in runner.admitted
        assert third.tokens == expected_answer((3,), 2)


def test_B33_cancel_during_prefill_runs_no_round_for_it():
    runner = ScriptedRunner()
    with working(runner) as worker:
        runner.prefills.hold()
        ticket, inbox = ask(worker)
        runner.wait(lambda: runner.prefills.waiting)
        worker.cancel(ticket)
        runner.prefills.allow()
        runner.wait(lambda: runner.cancelled)
        settle(worker, runner)
        assert runner.steps == 0 and inbox.items == []


def test_B33_cancel_mid_decoding_frees_the_slot_within_two_steps():
    runner = ScriptedRunner(widths=(1,))
    with working(runner) as worker:
        runner.rounds.hold()
        _, neighbour = ask(worker, (7, 7), max_new_tokens=60)
        ticket, inbox = ask(worker, (1, 2), max_new_tokens=100)
        runner.rounds.allow(5)
        runner.wait(lambda: runner.steps == 5 and runner.rounds.waiting)
        assert len(inbox.items) >= 3
        steps, heard = runner.steps, len(inbox.items)
        worker.cancel(ticket)
        runner.rounds.allow(1)
        runner.wait(lambda: runner.cancelled)
        assert runner.steps <= steps + 1
        runner.rounds.allow()
        neighbour.wait()
        assert neighbour.tokens == expected_answer((7, 7), 60)
        assert len(inbox.items) == heard, "a cancelled request hears nothing more"


def test_B33_cancel_after_the_end_and_twice_is_harmless():
    runner = ScriptedRunner(num_slots=1)
    with working(runner) as worker:
        finished, inbox = ask(worker, (1,), max_new_tokens=2)
        inbox.wait()
        runner.rounds.hold()
        _, owner = ask(worker, (2,), max_new_tokens=9)
        runner.wait(lambda: runner.live == 1)
        worker.cancel(finished)  # the slot has a new owner by now
        worker.cancel(finished)
        runner.rounds.allow()
        owner.wait()
        assert owner.tokens == expected_answer((2,), 9) and runner.cancelled == []
        ticket, _ = ask(worker, (3,), max_new_tokens=100)
        runner.wait(lambda: (3,) in runner.admitted)
        worker.cancel(ticket)
        worker.cancel(ticket)
        settle(worker, runner)
        assert len(runner.cancelled) <= 1


def test_B25_round_in_flight_at_a_cancel_does_not_reach_the_next_owner():
    runner = ScriptedRunner(num_slots=1, widths=(1,), late_events=True)
    with working(runner) as worker:
        for n in range(20):
            runner.rounds.hold()
            ticket, inbox = ask(worker, (n + 1,), max_new_tokens=90)
            runner.wait(lambda: runner.rounds.waiting)
            _, owner = ask(worker, (n + 1, 5), max_new_tokens=4)
            worker.cancel(ticket)
            runner.rounds.allow()
            owner.wait()
            assert owner.tokens == expected_answer((n + 1, 5), 4)
            assert inbox.items == []
        assert len(runner.cancelled) == 20


def test_B33_random_cancels_leak_nothing():
    rng = random.Random(7)
    runner = ScriptedRunner(num_slots=3, late_events=True, widths=(1, 4, 2, 5, 3))
    with working(runner, max_queue=200) as worker:
        kept, dropped = [], []
        for n in range(400):
            prompt = tuple(rng.randrange(256) for _ in range(rng.randint(1, 9)))
            length = rng.randint(1, 60)
            ticket, inbox = ask(worker, prompt, max_new_tokens=length)
            if n % 2:
                dropped.append(ticket)
                worker.cancel(ticket) if rng.random() < 0.5 else None
            else:
                kept.append((prompt, length, inbox))
            if dropped and rng.random() < 0.5:
                worker.cancel(rng.choice(dropped))
            if len(kept) - sum(inbox.over for *_, inbox in kept) > 6:
                kept[rng.randrange(len(kept))][2].wait()
        for ticket in dropped:
            worker.cancel(ticket)
        for prompt, length, inbox in kept:
            inbox.wait()
            assert inbox.tokens == expected_answer(prompt, length)
        settle(worker, runner)
        assert len(dropped) == 200 and runner.free_slots == 3


# -- limits and refusals --


def test_full_queue_is_refused_and_drains():
    runner = ScriptedRunner(num_slots=2)
    with working(runner, max_queue=3) as worker:
        runner.prefills.hold()
        inboxes = [ask(worker, (n,), max_new_tokens=3)[1] for n in range(1, 6)]
        with pytest.raises(Failure, match="max_queue") as full:
            ask(worker, (9,))
        assert full.value.status is Status.RESOURCE_EXHAUSTED
        runner.prefills.allow()
        for inbox in inboxes:
            inbox.wait()
        settle(worker, runner)
        assert ask(worker, (9,), max_new_tokens=3)[1].wait().reason == "length"


def test_queue_of_zero_still_serves_the_slots():
    runner = ScriptedRunner(num_slots=1)
    with working(runner, max_queue=0) as worker:
        runner.prefills.hold()
        _, inbox = ask(worker, (1,), max_new_tokens=3)
        with pytest.raises(Failure):
            ask(worker, (2,))
        runner.prefills.allow()
        assert inbox.wait().reason == "length"


def test_what_the_runner_refuses_fails_alone():
    runner = ScriptedRunner(max_context=8)
    with working(runner) as worker:
        _, bad = ask(worker, tuple(range(8)))
        _, good = ask(worker, (1,), max_new_tokens=3)
        assert bad.wait().status is Status.INVALID_ARGUMENT and "prompt" in bad.wait().message
        assert good.wait().reason == "length" and worker.state is State.SERVING


# -- failures --


def test_crash_in_a_round_ends_every_request_and_nothing_hangs():
    runner = ScriptedRunner(num_slots=2)
    with working(runner) as worker:
        runner.rounds.hold()
        live = [ask(worker, (n,))[1] for n in (1, 2)]
        runner.wait(lambda: runner.rounds.waiting)
        queued = [ask(worker, (n,))[1] for n in (3, 4)]
        runner.fail_step = ZeroDivisionError("device lost")
        runner.rounds.allow()
        assert live[0].wait().status is Status.INTERNAL and "device lost" in live[0].wait().message
        assert worker.join(PATIENCE) and worker.state is State.FAILED
        assert {inbox.wait().status for inbox in [live[1], *queued]} <= {Status.INTERNAL, Status.UNAVAILABLE}
        assert queued[-1].wait().status is Status.UNAVAILABLE
        with pytest.raises(Failure) as refused:
            ask(worker)
        assert refused.value.status is Status.UNAVAILABLE
        assert worker.load() == (0, 0, 0)


def test_crash_in_a_prefill_is_a_failure_of_the_runner():
    runner = ScriptedRunner()
    runner.fail_admit = ValueError("bad buffer")
    with working(runner) as worker:
        _, inbox = ask(worker)
        assert inbox.wait().status is Status.INTERNAL
        assert worker.join(PATIENCE) and worker.state is State.FAILED


def test_lost_slots_are_a_failure_not_a_hang():
    class Leaky(ScriptedRunner):
        free_slots = 0

    with working(Leaky()) as worker:
        _, inbox = ask(worker)
        assert inbox.wait().status is Status.UNAVAILABLE
        assert worker.join(PATIENCE) and worker.state is State.FAILED


def test_failed_start_is_reported():
    def start(check):
        raise ServerError("no such folder")

    runner = ScriptedRunner()
    with working(runner, start=start) as worker:
        assert worker.states == [State.FAILED] and worker.facts is None
        with pytest.raises(Failure, match="failed"):
            ask(worker)


# -- shutting down --


def test_drain_finishes_the_running_and_returns_the_waiting():
    runner = ScriptedRunner(num_slots=1)
    with working(runner) as worker:
        runner.rounds.hold()
        _, running = ask(worker, (1,), max_new_tokens=30)
        runner.wait(lambda: runner.live == 1)
        _, waiting = ask(worker, (2,))
        worker.drain(PATIENCE)
        assert waiting.wait().status is Status.UNAVAILABLE
        with pytest.raises(Failure, match="shutting down") as refused:
            ask(worker, (3,))
        assert refused.value.status is Status.UNAVAILABLE
        runner.rounds.allow()
        assert running.wait().reason == "length"
        assert running.tokens == expected_answer((1,), 30)
        assert worker.join(PATIENCE) and worker.state is State.STOPPED
        assert (2,) not in runner.admitted


def test_drain_cuts_what_does_not_finish_in_time():
    runner = ScriptedRunner(num_slots=1)
    with working(runner) as worker:
        runner.rounds.hold()
        _, running = ask(worker, (1,), max_new_tokens=100)
        runner.rounds.allow(3)
        runner.wait(lambda: runner.steps == 3 and runner.rounds.waiting)
        worker.drain(0)
        runner.rounds.allow()
        assert running.wait().status is Status.UNAVAILABLE
        assert worker.join(PATIENCE) and runner.live == 0 and len(runner.cancelled) == 1


def test_stop_during_start_up_leaves_it():
    runner, entered, leave = ScriptedRunner(), threading.Event(), threading.Event()

    def start(check):
        entered.set()
        assert leave.wait(PATIENCE)
        check()
        raise AssertionError("start-up went on")

    worker = Worker(start, max_queue=1)
    worker.start()
    assert entered.wait(PATIENCE)
    with pytest.raises(Failure, match="warming up"):
        ask(worker)
    worker.drain(5)
    leave.set()
    assert worker.join(PATIENCE) and worker.state is State.STOPPED
    assert issubclass(Stopped, Exception) and runner.steps == 0


def test_the_runner_stays_on_one_thread():
    runner = ScriptedRunner()
    with working(runner) as worker:
        threads = [
            threading.Thread(target=lambda n=n: ask(worker, (n,), max_new_tokens=4)[1].wait()) for n in range(1, 9)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert len(runner.admitted) == 8 and runner.violations == []
