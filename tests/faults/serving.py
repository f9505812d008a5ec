"""Faults of the gRPC server."""

from __future__ import annotations

from tests.helpers.mutation import Mutant

_SERVING_WORKER = ("tests/serving/test_worker.py",)
_SERVING_SERVER = ("tests/serving/test_server.py",)
_SERVING_ADMISSION = ("tests/serving/test_admission.py",)
_SERVING_TEXT = ("tests/serving/test_text.py",)
SERVING = [
    Mutant(
        "serving-health-before-warm-up",
        "jaxspec/serving/server.py",
        "        await self._set_health(serving=False)  # the health service starts out as SERVING\n",
        "",
        _SERVING_SERVER,
        "the stock health service says SERVING before anything is loaded",
    ),
    Mutant(
        "serving-stop-text",
        "jaxspec/serving/service.py",
        'item.tokens[:-1] if reason == "stop" else item.tokens',
        "item.tokens",
        _SERVING_SERVER,
        "the text of the token that ended the answer leaks into it (B17, B19)",
    ),
    Mutant(
        "serving-no-cancel-on-disconnect",
        "jaxspec/serving/service.py",
        "            self._worker.cancel(ticket)",
        "            pass",
        _SERVING_SERVER,
        "a client that left or timed out keeps its slot (B33)",
    ),
    Mutant(
        "serving-port-shared",
        "jaxspec/serving/server.py",
        '("grpc.so_reuseport", 0)',
        '("grpc.so_reuseport", 1)',
        _SERVING_SERVER,
        "two servers share a port and answer each other's clients",
    ),
    Mutant(
        "serving-drain-keeps-waiting",
        "jaxspec/serving/worker.py",
        "            refused, self._waiting = list(self._waiting), deque()\n",
        "            refused = []\n",
        _SERVING_WORKER,
        "requests that wait during a shutdown are never answered",
    ),
    Mutant(
        "serving-cancel-ignores-queue",
        "jaxspec/serving/worker.py",
        "                self._waiting.remove(ticket)",
        "                pass",
        _SERVING_WORKER,
        "a request cancelled while it waits still takes its place and a prefill (B33)",
    ),
    Mutant(
        "serving-late-events",
        "jaxspec/serving/worker.py",
        "        ticket = self._running.get(event.handle)\n",
        "        ticket = self._running.get(event.handle) or next(iter(self._running.values()), None)\n",
        _SERVING_WORKER,
        "the round in flight at a cancel reaches the slot's next owner (B25)",
    ),
    Mutant(
        "serving-cancel-after-end",
        "jaxspec/serving/worker.py",
        "if handle is None or self._running.get(handle) is not ticket:",
        "if handle is None:",
        _SERVING_WORKER,
        "a cancel after the end reaches a handle that is no longer the request's (B33)",
    ),
    Mutant(
        "serving-queue-bound",
        "jaxspec/serving/worker.py",
        "            if held >= slots + self._max_queue:",
        "            if held > slots + self._max_queue:",
        _SERVING_WORKER,
        "the queue holds one more than max_queue",
    ),
    Mutant(
        "serving-crash-leaves-waiting",
        "jaxspec/serving/worker.py",
        "            untouched = list(self._waiting)",
        "            untouched = []",
        _SERVING_WORKER,
        "requests that wait when the runner breaks hang for ever",
    ),
    Mutant(
        "serving-prefill-counted-as-round",
        "jaxspec/serving/worker.py",
        "        ticket.rounds += bool(event.from_round)",
        "        ticket.rounds += 1",
        _SERVING_WORKER,
        "usage counts the prefill's token as a round, tau is understated (B38)",
    ),
    Mutant(
        "serving-burst-stalls",
        "jaxspec/serving/worker.py",
        "            if ticket is not None:\n                self._admit(runner, ticket)\n",
        "            while ticket is not None:\n                self._admit(runner, ticket)\n"
        "                ticket = self._next(runner)\n",
        _SERVING_WORKER,
        "a burst of prompts is prefilled in one go while running answers wait",
    ),
    Mutant(
        "serving-unsupported-ignored",
        "jaxspec/serving/admission.py",
        "        if field.name not in supported:",
        "        if field.name not in supported and field.message_type is not None:",
        _SERVING_ADMISSION,
        "stop strings, penalties, n and logprobs are dropped in silence (B08)",
    ),
    Mutant(
        "serving-unknown-fields",
        "jaxspec/serving/admission.py",
        "    if len(unknown):",
        "    if False:",
        _SERVING_ADMISSION,
        "what a newer client asks for is dropped in silence",
    ),
    Mutant(
        "serving-half-characters",
        "jaxspec/serving/text.py",
        "text[certain - 1] == _REPLACEMENT",
        "False",
        _SERVING_TEXT,
        "a character whose last byte is still to come is streamed as a replacement mark",
    ),
    Mutant(
        "serving-first-word-space",
        "jaxspec/serving/text.py",
        "            self._ids = self._ids[self._settled :]",
        "            self._ids = []",
        _SERVING_TEXT,
        "each piece is decoded like the beginning of a text and loses its leading space",
    ),
]
