# The index of commands. Each sets up its own virtual environment on first use, and again when the
# requirements files have changed.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
PORT   ?= 8099
CONFIG ?=
MODEL  ?=
TESTS  ?= tests
AT_ONCE ?= 2
CHAOS_REQUESTS ?= 200
ARGS   ?=
REPLICAS ?= 1,2

RUN := $(VENV)/bin/python

# pip compiles nothing below: where imports may not keep it either, each process compiles torch anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help serve test lint format chaos soak bench sweep engine gpu-checks pictures clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /  make \1\t/' | expand -t 16
	@echo
	@echo '  make serve PORT=8099 CONFIG=configs/tiny_cpu.yaml          the defaults'
	@echo '  make serve MODEL=Qwen/Qwen-Image                           on all GPUs of this host'
	@echo '  make test TESTS=tests/unit AT_ONCE=0                       some of them, in this process'
	@echo '  make bench ARGS="--num-prompts 32 --report bench.html"     with flags'

serve: $(VENV)/serve.stamp ## run everything: Redis, one worker for each replica, API, Flower
	@exec $(RUN) -m scripts.serve $(MODEL) $(if $(CONFIG),--stage-configs-path $(CONFIG)) --port $(PORT)

test: $(VENV)/dev.stamp ## all tests: a real Redis, real workers, the bundled model
	@exec $(RUN) -m pytest -n $(AT_ONCE) --dist loadscope --no-loadscope-reorder $(TESTS)

lint: $(VENV)/dev.stamp ## ruff, mypy --strict and the import laws
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy
	@$(VENV)/bin/lint-imports

format: $(VENV)/dev.stamp ## put the code into its form
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

chaos: $(VENV)/dev.stamp ## kill replicas, Redis and API under load, at length; prints a table
	@exec env CHAOS_REQUESTS=$(CHAOS_REQUESTS) $(RUN) -m pytest tests/chaos -s

soak: $(VENV)/dev.stamp ## 500 requests through one service; prints what memory they cost
	@exec env SOAK_REQUESTS=500 $(RUN) -m pytest tests/e2e/test_soak.py -s

bench: $(VENV)/bench.stamp ## measure the running service: throughput, latency, each replica
	@exec $(RUN) -m scripts.diffusion_benchmark_serving --port $(PORT) $(ARGS)

sweep: $(VENV)/bench.stamp ## does another replica help: REPLICAS=1,2 of CONFIG, a table and a picture
	@exec $(RUN) -m scripts.sweep $(if $(CONFIG),--stage-configs-path $(CONFIG)) --replicas $(REPLICAS) $(ARGS)

engine: $(VENV)/serve.stamp ## time the engine alone: one request, and several that share denoiser calls
	@exec $(RUN) -m scripts.lab.engine_bench $(ARGS)

gpu-checks: $(VENV)/dev.stamp ## what only a GPU can show, in one table of at most 8 minutes
	@exec $(RUN) -m scripts.lab.gpu_checks $(ARGS)

pictures: $(VENV)/serve.stamp ## draw with the bundled model: are the pictures right
	@exec $(RUN) -m scripts.lab.check_tiny

clean: ## remove the virtual environment and the tools' caches; never what the service has stored
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUN):
	@test -n '$(PYTHON)' || { echo 'Error: no python3.11 or python3 on PATH' >&2; exit 1; }
	@echo 'Making a virtual environment in $(VENV)'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/serve.stamp: requirements.txt | $(RUN)
	@echo 'Installing requirements.txt; the first time takes some minutes'
	@$(RUN) -m pip install --quiet --no-compile --disable-pip-version-check -r requirements.txt
	@touch $@

$(VENV)/bench.stamp: requirements-bench.txt $(VENV)/serve.stamp
	@echo 'Installing requirements-bench.txt'
	@$(RUN) -m pip install --quiet --no-compile --disable-pip-version-check -r requirements-bench.txt
	@touch $@

$(VENV)/dev.stamp: requirements-dev.txt $(VENV)/bench.stamp
	@echo 'Installing requirements-dev.txt'
	@$(RUN) -m pip install --quiet --no-compile --disable-pip-version-check -r requirements-dev.txt
	@touch $@
