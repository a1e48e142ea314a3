# Every target does its own set-up: on a fresh Debian 12 with Python 3.11 `make demo` or `make test` is all one types.
# `make help` lists what there is.

SHELL := /bin/bash
VENV  := .venv
PY    := $(VENV)/bin/python
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help venv system test check bench peers clients frameworks demo sim storm fix clean

help: ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

venv: $(READY) ## .venv with the project and its dev extras

$(READY): pyproject.toml scripts/setup
	@scripts/setup venv

system: $(READY) ## what only Debian and npm have: nginx, wrk, Azurite
	@scripts/setup system

test: venv system ## everything CI runs: format, lint, types, imports, tests, simulator seeds
	@scripts/check

check: test ## the same as test

bench: venv system ## the speed table, rows and peers: make bench [NAME=warm|write|loader|offload|…] [ARGS=--list]
	@$(if $(filter loader resume all,$(or $(NAME),all)),scripts/setup peers)
	@$(PY) -m bench $(or $(NAME),all) $(ARGS)

peers: ## .venv-peers: the data loaders that `make bench` compares with, at fixed versions
	@scripts/setup peers

clients: venv ## the whole table of S3 clients in docs/s3.md, the heavy ones too: .venv-clients, then its tests
	@scripts/setup clients
	@FOREBAY_CLIENTS=.venv-clients/bin/python $(PY) -m pytest -q tests/s3/test_client_table.py

frameworks: venv ## trainers of other libraries (docs/training.md), killed and resumed: .venv-frameworks, then the tests
	@scripts/setup frameworks
	@FOREBAY_FRAMEWORKS=.venv-frameworks/bin/python $(PY) -m pytest -q tests/torch/test_frameworks.py

demo: venv ## a bucket behind a slow link, a node, a training run: table and plot in demo-out/
	@exec $(PY) -m demo $(ARGS)

sim: venv ## one simulated world: make sim SEED=41
	@$(PY) -m forebay.sim --seed $(or $(SEED),1) $(ARGS)

storm: venv system ## a cluster in a box, faults at random, all answers judged: make storm ARGS="--rounds 200"
	@$(PY) -m tests.storm.cluster_storm $(ARGS)

fix: venv ## format and mend what ruff can mend
	@$(VENV)/bin/ruff format . && $(VENV)/bin/ruff check --fix .

clean: ## remove what the targets made, the .venv too
	rm -rf $(VENV) build dist demo-out bench-out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
