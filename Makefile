# The two commands: `make demo` and `make test`. Both set up what they need. `make help` lists the rest.
PYTHON ?= python3
PY := .venv/bin/python
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup setup-312 demo test lint format check mutants conformance proto constraints clean
.PHONY: bench-kernels bench-decode bench-serving bench-training bench-devices

help:  ## this list
	@grep -hE '^[a-z0-9%-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9%-]+):.*## /  make \1\t/' | expand -t 26

setup:  ## .venv with everything installed and the `jaxspec` command in it
	@tools/setup.sh .venv $(PYTHON) dev,demo

setup-312:  ## .venv-3.12, where a Python 3.12 is found
	@if [ "$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')" = 3.12 ]; then \
	  echo "setup-312: $(PYTHON) is Python 3.12 already, .venv covers it"; \
	elif found="$$(tools/find_python.sh 3.12)"; then tools/setup.sh .venv-3.12 "$$found" dev,demo; \
	else echo "setup-312: no Python 3.12 found, going on without it"; fi

demo: setup  ## trains, exports, reloads and serves a drafter for a real model
	@$(PY) -m demo.run

test:  ## everything CI runs: set-up, lint, the suite, the fast suite on 3.12, age of the slow results
	@$(PYTHON) tools/stages.py

lint: setup  ## ruff and mypy
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

format: setup  ## ruff's formatter and safe fixes
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

check: lint  ## lint and the fast tests, under two minutes
	@$(PY) -m pytest -q -n 2 --dist loadfile -m "not ci"

mutants: setup  ## applies each one-line fault of tests/mutants.py and expects a test to fail
	@$(PY) tests/mutants.py

conformance: setup  ## every golden case of tests/golden
	@.venv/bin/jaxspec conformance tests/golden

bench-kernels: setup  ## every kernel on this machine's GPU, peers beside it; writes results/h200/kernels.json
	@$(PY) -m pallas_kernels.bench --json results/h200/kernels.json

bench-decode: setup  ## rounds and their cost curve on this machine's GPU; writes results/h200/decode.json
	@$(PY) tools/bench_round.py --shape qwen3-4b qwen3-0.6b --curve qwen3-4b --json results/h200/decode.json

bench-serving: setup  ## trains two drafters, then the engine under load; writes results/h200/serving.json
	@$(PY) tools/bench_drafters.py --out out/bench
	@failed=0; run() { $(PY) tools/bench_serving.py "$$@" || failed=1; }; \
	run --dflash out/bench/dflash --dspark out/bench/dspark --sts out/bench/sts.json; \
	shape="--shape qwen3-4b --rates-of results/h200/serving.json --chunk 128 --max-context 320"; \
	out=results/h200/serving-qwen3-4b; \
	run $$shape --concurrency 8,32,64 --overlap 32 --out $$out-8-32-64.json; \
	for one in 1 128 256; do run $$shape --concurrency $$one --overlap "" --profile-at 0 --out $$out-$$one.json; done; \
	exit $$failed

bench-training: setup  ## the training step on this machine's GPU; writes results/h200/training.json
	@$(PY) tools/bench_training.py --online dspark --json results/h200/training.json

bench-devices: setup  ## the training step on 1, 2 and 4 GPUs of this machine; writes results/h200/devices.json
	@$(PY) tools/bench_devices.py --json results/h200/devices.json

test-slow-%: setup  ## one long check; writes results/slow/%.json
	@$(PY) tools/slow_results.py run $*

proto: setup  ## regenerates the gRPC modules from the .proto file
	@$(PY) -m jaxspec.serving.protos.build

constraints: setup setup-312  ## rewrites constraints/ from the two environments
	@$(PY) tools/freeze_constraints.py
	@if [ -x .venv-3.12/bin/python ]; then .venv-3.12/bin/python tools/freeze_constraints.py; fi

clean:  ## removes what was made here, except the environments and results/
	rm -rf out build dist *.egg-info .cache .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
