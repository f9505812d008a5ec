"""The server over loopback: health, reflection, streams, cancelling by clients, drain, failure."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jaxspec.errors import CheckpointError, RequestError, ServerError
from jaxspec.serving import server as server_module
from jaxspec.serving.client import Client
from jaxspec.serving.protos.jaxspec.v1 import jaxspec_pb2 as pb
from jaxspec.serving.service import SERVICE_NAME
from tests.helpers.scripted_runner import EOS, PATIENCE, VOCAB, ScriptedRunner, expected_answer
from tests.serving.harness import serving, settle, stub, until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def check(address: str, service: str = "") -> int:
    with grpc.insecure_channel(address) as channel:
        return (
            health_pb2_grpc.HealthStub(channel)
            .Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE)
            .status
        )


def request(prompt, **sampling) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=pb.SamplingParameters(**sampling))


def ids_of(responses) -> list[int]:
    return [token for response in responses for token in response.token_ids]


def status_of(call) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value.code(), caught.value.details()


# -- health, reflection, info --


def test_health_is_not_serving_during_warm_up_then_serving_then_not():
    entered, leave = threading.Event(), threading.Event()

    def start(_):
        entered.set()
        assert leave.wait(PATIENCE)

    with serving(start=start, ready=False) as served:
        assert entered.wait(PATIENCE)
        for service in ("", SERVICE_NAME):
            assert check(served.address, service) == NOT_SERVING
        with stub(served.address) as generation:
            code, details = status_of(generation.Generate(request([1])))
            assert code is grpc.StatusCode.UNAVAILABLE and "warming up" in details
        with Client(served.address) as client, pytest.raises(ServerError, match="warming up"):
            client.info()
        with Client(served.address) as client, pytest.raises(ServerError, match="not serving after"):
            client.wait_ready(0.1)
        assert not any(line.startswith("SERVING") for line in served.lines)
        with grpc.insecure_channel(served.address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
            seen = [next(watch).status]
            leave.set()
            seen.append(next(watch).status)
            assert check(served.address, SERVICE_NAME) == SERVING
            served.server.stop()
            seen.append(next(watch).status)
            assert seen == [NOT_SERVING, SERVING, NOT_SERVING]
        assert served.wait() == 0


def test_ready_line_and_free_port(served):
    port = served.address.rpartition(":")[2]
    assert served.address.startswith("127.0.0.1:") and int(port) > 0
    assert served.lines[0].startswith(f"listening on 127.0.0.1:{port}")
    assert served.lines[1] == f"SERVING on 127.0.0.1:{port} target=table drafter=scripted"


def test_reflection_lists_the_services(served):
    with grpc.insecure_channel(served.address) as channel:
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="jaxspec.v1.Generation"),
        ]
        listed, described = reflection.ServerReflectionInfo(iter(asked), timeout=PATIENCE)
    names = {service.name for service in listed.list_services_response.service}
    assert {SERVICE_NAME, "grpc.health.v1.Health"} <= names
    assert described.file_descriptor_response.file_descriptor_proto[0] == pb.DESCRIPTOR.serialized_pb


def test_model_info(client):
    info = client.info()
    assert (info.target, info.drafter, info.method) == ("table", "scripted", "script")
    assert (info.vocab_size, info.max_context, info.slots, info.num_proposals) == (VOCAB, 128, 4, 4)
    assert info.format_version == 1 and {"jaxspec", "jax", "python"} <= set(info.versions)


def test_model_info_of_another_format(served):
    with stub(served.address) as generation, pytest.raises(grpc.RpcError) as caught:
        generation.GetModelInfo(pb.GetModelInfoRequest(format_version=9))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "format_version" in caught.value.details()


# -- streams --


def test_concurrent_clients_get_their_own_tokens(served):
    prompts = [[n, *range(n)] for n in range(1, 25)]

    def ask(prompt):
        with Client(served.address) as client:
            return client.complete(prompt, max_new_tokens=10 + len(prompt), request_id=f"r{prompt[0]}")

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == expected_answer(prompt, 10 + len(prompt))
        assert answer.text == bytes(answer.token_ids).decode()
        assert answer.request_id == f"r{prompt[0]}" and answer.finish_reason == "length"
        assert answer.usage["prompt_tokens"] == len(prompt)
        assert answer.usage["completion_tokens"] == len(answer.token_ids)


def test_responses_stream_as_rounds_end():
    runner = ScriptedRunner(widths=(3,))
    with serving(runner) as served, stub(served.address) as generation:
        runner.rounds.hold()
        call = generation.Generate(request([1, 2], max_new_tokens=7), timeout=PATIENCE)
        runner.rounds.allow(1)
        first, second = next(call), next(call)
        assert runner.steps == 1 and [len(first.token_ids), len(second.token_ids)] == [1, 3]
        assert first.request_id and first.request_id == second.request_id
        assert not first.HasField("usage") and first.finish_reason == pb.FINISH_REASON_UNSPECIFIED
        runner.rounds.allow()
        (last,) = call
        assert last.finish_reason == pb.FINISH_REASON_LENGTH and last.usage.rounds == 2 and last.usage.proposed == 8


def test_text_is_streamed_in_whole_characters():
    text = "a😀é日 👩‍👧!"
    for widths in ((1,), (2, 3), (7,)):
        runner = ScriptedRunner(widths=widths, answers={(1,): [*text.encode(), EOS]})
        with serving(runner) as served, stub(served.address) as generation:
            pieces = [response.text for response in generation.Generate(request([1]), timeout=PATIENCE)]
        assert "".join(pieces) == text
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_without_a_tokenizer_ids_are_served_and_text_is_refused():
    with serving(codec=None) as served, Client(served.address) as client:
        answer = client.complete([1, 2], max_new_tokens=5)
        assert answer.token_ids == expected_answer([1, 2], 5) and answer.text == ""
        with pytest.raises(RequestError, match="token_ids"):
            client.complete("hello")


def test_n_answers_are_told_apart(client):
    answers = client.complete_all([1, 2, 3], n=3, max_new_tokens=9)
    for index, answer in enumerate(answers):
        assert answer.index == index and answer.token_ids == expected_answer([1, 2, 3], 9, index)
        assert answer.text == bytes(answer.token_ids).decode()
        assert answer.usage["completion_tokens"] == 9 and answer.usage["prompt_tokens"] == 3
    with pytest.raises(RequestError, match="complete_all"):
        client.complete([1, 2, 3], n=3)


def test_status_in_every_state(served, client):
    status = client.status()
    assert (status.state, status.waiting, status.running, status.executables) == ("serving", 0, 0, 2)
    entered, leave = threading.Event(), threading.Event()

    def start(_):
        entered.set()
        assert leave.wait(PATIENCE)

    with serving(start=start, ready=False) as starting, Client(starting.address) as early:
        assert entered.wait(PATIENCE)
        assert early.status().state == "warming up"
        leave.set()


# -- the end of an answer --


@pytest.mark.parametrize(
    ("script", "limit", "length", "reason"),
    [
        ([65, 66, EOS, 67, 68, 69], 5, 3, "stop"),
        ([65, 66, 67, 68, 69, EOS], 5, 5, "length"),
        ([65, 66, 67, 68, EOS, 69], 5, 5, "stop"),
        ([65, 66, 67, 68, 69, 70], 1, 1, "length"),
        ([EOS, 66, 67], 5, 1, "stop"),
        ([EOS, 66, 67], 1, 1, "stop"),
        ([65, 66, 67], 0, 0, "length"),
    ],
)
def test_B17_stop_and_limit_in_one_round(script, limit, length, reason):
    for widths in ((6,), (1,), (2, 3)):
        runner = ScriptedRunner(widths=widths, answers={(9,): script})
        with serving(runner) as served, Client(served.address) as client:
            answer = client.complete([9], max_new_tokens=limit)
        assert (answer.token_ids, answer.finish_reason) == (script[:length], reason)
        assert answer.usage["completion_tokens"] == length
        assert answer.text == bytes(token for token in script[:length] if token != EOS).decode()


def test_B19_stop_ids_and_ignore_eos():
    script = [65, EOS, 66, 67, 90, 68, EOS]
    runner = ScriptedRunner(widths=(4,), answers={(9,): script, (8,): list(b"abc")})
    with serving(runner) as served, Client(served.address) as client:
        assert client.complete([9]).token_ids == [65, EOS]
        ignoring = client.complete([9], ignore_eos=True, max_new_tokens=7)
        assert (ignoring.token_ids, ignoring.finish_reason, ignoring.text) == (script, "length", "ABCZD")
        stopped = client.complete([9], ignore_eos=True, stop_token_ids=[90])
        assert (stopped.token_ids, stopped.finish_reason) == (script[:5], "stop")
        assert stopped.text == "ABC", "the text of the stopping token is not sent"
        neighbour = client.complete([8], stop_token_ids=[ord("c")])
        assert (neighbour.token_ids, neighbour.text) == (list(b"abc"), "ab")


def test_B21_answer_ends_at_the_context_limit():
    with serving(ScriptedRunner(max_context=32)) as served, Client(served.address) as client:
        for length in range(20, 32):
            answer = client.complete([1] * length, max_new_tokens=100)
            assert length + len(answer.token_ids) == 32 and answer.finish_reason == "length"
        for length in (32, 33):
            with pytest.raises(RequestError, match=f"{length} tokens"):
                client.complete([1] * length)


# -- refusals --


def test_bad_input_is_invalid_argument_and_the_server_goes_on(served, client):
    with stub(served.address) as generation:
        for bad, field in [
            (request([1], temperature=-1.0), "temperature"),
            (request([1, -1]), "token_ids[1]"),
            (request([1] * 500), "500 tokens"),
            (request([1], allowed_token_ids=[1]), "sampling.allowed_token_ids"),
            (pb.GenerateRequest(), "prompt"),
        ]:
            code, details = status_of(generation.Generate(bad, timeout=PATIENCE))
            assert code is grpc.StatusCode.INVALID_ARGUMENT and field in details
    assert client.complete([1], max_new_tokens=3).token_ids == expected_answer([1], 3)


def test_full_server_says_resource_exhausted():
    runner = ScriptedRunner(num_slots=1)
    with serving(runner, max_queue=1) as served, stub(served.address) as generation:
        runner.rounds.hold()
        calls = [generation.Generate(request([n], max_new_tokens=4), timeout=PATIENCE) for n in (1, 2)]
        until(served, lambda worker: worker.load() == (1, 1, 0))
        code, details = status_of(generation.Generate(request([3]), timeout=PATIENCE))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "max_queue" in details
        runner.rounds.allow()
        assert [ids_of(call) for call in calls] == [expected_answer([n], 4) for n in (1, 2)]


# -- cancelling --


def test_B33_client_cancel_and_disconnect_free_the_slot():
    runner = ScriptedRunner(num_slots=2, widths=(1,))
    with serving(runner) as served, stub(served.address) as generation:
        runner.rounds.hold()
        neighbour = generation.Generate(request([5, 5], max_new_tokens=40), timeout=PATIENCE)
        runner.wait(lambda: runner.live == 1)
        call = generation.Generate(request([1], max_new_tokens=100), timeout=PATIENCE)
        until(served, lambda worker: worker.load().waiting == 1)
        runner.rounds.allow(3)
        assert next(call).token_ids == expected_answer([1], 1)
        call.cancel()
        call.cancel()
        until(served, lambda worker: worker.load().cancelling == 1)
        runner.rounds.allow(2)
        runner.wait(lambda: len(runner.cancelled) == 1)
        with stub(served.address) as other:  # leaving this block closes the connection
            gone = other.Generate(request([2], max_new_tokens=100), timeout=PATIENCE)
            until(served, lambda worker: worker.load().waiting == 1)
            runner.rounds.allow(2)
            assert next(gone).token_ids == expected_answer([2], 1)
        until(served, lambda worker: worker.load().cancelling == 1)
        runner.rounds.allow(2)
        runner.wait(lambda: len(runner.cancelled) == 2)
        runner.rounds.allow()
        assert ids_of(neighbour) == expected_answer([5, 5], 40)
        settle(served.server.worker, runner)


def test_a_deadline_that_a_prompt_alone_would_miss_is_resource_exhausted():
    runner = ScriptedRunner(num_slots=1, widths=(1,), seconds_each=10.0)
    with serving(runner) as served, stub(served.address) as generation:
        code, details = status_of(generation.Generate(request([1] * 9, max_new_tokens=5), timeout=60.0))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "deadline" in details and "90 s" in details
        assert ids_of(generation.Generate(request([3], max_new_tokens=4), timeout=60.0)) == expected_answer([3], 4)
        settle(served.server.worker, runner)


@pytest.mark.parametrize("phase", ["queued", "prefill", "decoding"])
def test_B33_deadline_is_a_cancel(phase):
    runner = ScriptedRunner(num_slots=1, widths=(1,))
    with serving(runner) as served, stub(served.address) as generation:
        gate = runner.prefills if phase == "prefill" else runner.rounds
        gate.hold()
        if phase == "queued":
            holder = generation.Generate(request([7], max_new_tokens=5), timeout=PATIENCE)
            runner.wait(lambda: runner.live == 1)
        code, _ = status_of(generation.Generate(request([1], max_new_tokens=100), timeout=0.8))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        if phase == "queued":
            until(served, lambda worker: worker.load() == (0, 1, 0))
            gate.allow()
            assert ids_of(holder) == expected_answer([7], 5) and [1] not in map(list, runner.admitted)
        else:
            until(served, lambda worker: worker.load().cancelling == 1)
            gate.allow(2)
            settle(served.server.worker, runner)
            assert runner.steps <= 2
        gate.allow()
        assert ids_of(generation.Generate(request([3], max_new_tokens=4), timeout=PATIENCE)) == expected_answer([3], 4)


def test_B33_leaving_the_iteration_cancels(served):
    runner = served.runner
    runner.rounds.hold()
    with Client(served.address) as client:
        answer = client.generate([1], max_new_tokens=100)
        runner.rounds.allow(1)
        next(answer)
        answer.close()
        until(served, lambda worker: worker.load().cancelling == 1)
        runner.rounds.allow(2)
        runner.wait(lambda: len(runner.cancelled) == 1)
        settle(served.server.worker, runner)


def test_keep_alive_lets_quiet_clients_ping():
    options = dict(server_module.OPTIONS)
    assert options["grpc.keepalive_permit_without_calls"] == 1
    assert options["grpc.http2.min_ping_interval_without_data_ms"] < 10_000
    assert options["grpc.http2.min_recv_ping_interval_without_data_ms"] < 10_000
    assert options["grpc.http2.max_ping_strikes"] == 0


# -- the end of a server --


def test_drain_finishes_running_answers_and_refuses_new_ones():
    runner = ScriptedRunner(num_slots=1)
    with serving(runner) as served, stub(served.address) as generation:
        runner.rounds.hold()
        running = generation.Generate(request([1], max_new_tokens=30), timeout=PATIENCE)
        runner.wait(lambda: runner.live == 1)
        waiting = generation.Generate(request([2], max_new_tokens=30), timeout=PATIENCE)
        until(served, lambda worker: worker.load() == (1, 1, 0))
        served.server.stop()
        assert status_of(waiting)[0] is grpc.StatusCode.UNAVAILABLE
        assert check(served.address) == NOT_SERVING
        code, details = status_of(generation.Generate(request([3]), timeout=PATIENCE))
        assert code is grpc.StatusCode.UNAVAILABLE and "shutting down" in details
        runner.rounds.allow()
        assert ids_of(running) == expected_answer([1], 30)
        assert served.wait() == 0 and (2,) not in runner.admitted


def test_drain_has_a_limit():
    runner = ScriptedRunner(num_slots=1, widths=(1,))
    with serving(runner, drain_seconds=0.0) as served, stub(served.address) as generation:
        runner.rounds.hold()
        running = generation.Generate(request([1], max_new_tokens=100), timeout=PATIENCE)
        runner.rounds.allow(2)
        runner.wait(lambda: runner.steps == 2 and runner.rounds.waiting)
        served.server.stop()
        until(served, lambda worker: worker.state.value == "shutting down")
        runner.rounds.allow(1)
        code, details = status_of(running)
        assert code is grpc.StatusCode.UNAVAILABLE and "shut down" in details
        assert served.wait() == 0


def test_crashed_runner_is_internal_and_not_serving(caplog):
    runner = ScriptedRunner(num_slots=1)
    with serving(runner) as served, stub(served.address) as generation:
        runner.rounds.hold()
        running = generation.Generate(request([1], max_new_tokens=30), timeout=PATIENCE)
        runner.wait(lambda: runner.rounds.waiting)
        waiting = generation.Generate(request([2], max_new_tokens=30), timeout=PATIENCE)
        until(served, lambda worker: worker.load() == (1, 1, 0))
        with grpc.insecure_channel(served.address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
            assert next(watch).status == SERVING
            runner.fail_step = RuntimeError("device lost")
            runner.rounds.allow()
            code, details = status_of(running)
            assert code is grpc.StatusCode.INTERNAL and "device lost" in details
            assert status_of(waiting)[0] is grpc.StatusCode.UNAVAILABLE
            assert next(watch).status == NOT_SERVING
        assert status_of(generation.Generate(request([3]), timeout=PATIENCE))[0] is grpc.StatusCode.UNAVAILABLE
        assert served.stop() == 1
    assert any("NOT_SERVING" in line for line in served.lines[2:])
    assert "device lost" in caplog.text


def test_failed_start_ends_the_server_with_its_own_error():
    def start(_):
        raise CheckpointError("drafter: found nothing")

    with serving(start=start, ready=False) as served:
        served.wait()
        assert isinstance(served.error, CheckpointError)


def test_stop_during_warm_up_ends_cleanly():
    entered, asked = threading.Event(), threading.Event()

    def start(check_stop):
        entered.set()
        assert asked.wait(PATIENCE)
        while True:  # the stages of a long warm-up
            check_stop()

    with serving(start=start, ready=False) as served:
        assert entered.wait(PATIENCE)
        served.server.stop()
        asked.set()
        assert served.wait() == 0 and served.error is None


def test_taken_port_is_one_clear_error(served):
    port = int(served.address.rpartition(":")[2])
    with serving(ready=False, port=port) as second:
        second.wait()
        assert isinstance(second.error, ServerError) and "server.port" in str(second.error)
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE):
        assert check(served.address) == SERVING
