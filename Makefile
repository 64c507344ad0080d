# One entry point for people and for CI. `make` alone explains itself.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.SUFFIXES:
MAKEFLAGS += --no-print-directory

VENV ?= .venv
BIN := $(VENV)/bin
# Arguments passed on: `make serve MODEL=gpt2 ARGS="--port 9000"`, `make test ARGS="-k sampler"`.
MODEL ?=
ARGS ?=
# Arguments of the mutation test: `make test-mutation MUTANTS="--only NAME"`.
MUTANTS ?= --all
# Python tests at a time, each with up to two gigabytes: more than there are processors, as tests of servers mostly wait.
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 4 ? n + 1 : 4)))
# A test that fails while others run, runs once more, alone; one that passes then is named at the end.
RERUN_ALONE = $(BIN)/python scripts/rerun_alone.py
PYTEST = $(RERUN_ALONE) $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal
export VENV
# The tests start hundreds of Python processes. Each would compile all that it imports, where the environment forbids
# Python to keep the bytecode (images of containers do); that is a second and a half of processor time for a server.
export PYTHONDONTWRITEBYTECODE :=
# CI builds the committed Cargo.lock; at home cargo may bring it up to date with an edited Cargo.toml.
LOCKED := $(if $(CI),--locked)
# cargo finds the interpreter it type-checks the binding crate against.
export PYO3_PYTHON := $(abspath $(BIN)/python)

.PHONY: help setup serve hooks test test-rust test-python clients test-long test-slow test-random test-loom test-mutation \
	lint fmt bench wheel all clean

help: ## show this list
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo '  make serve MODEL=gpt2 ARGS="--port 9000"   serve another model, with flags of `rustvllm serve`'
	@echo '  make test ARGS="-k sampler"                pass arguments to pytest'
	@echo '  make setup PYTHON=python3.12               choose the interpreter of a new $(VENV)'

setup: ## check the machine, make .venv, install the dependencies, build the Rust core
	@scripts/setup.sh

serve: setup ## serve the embedded model, or MODEL=name_or_folder, on port 8000
	@exec $(BIN)/rustvllm serve $(MODEL) $(ARGS)

test: setup test-rust test-python ## run the tests: Rust, Python

# CI builds each crate once for these; what cargo keeps to build it again in parts would take 2 GB.
ifdef CI
lint test-rust: export CARGO_INCREMENTAL := 0
endif
test-rust: ## run the Rust tests alone
	$(RERUN_ALONE) cargo test $(LOCKED) --quiet

test-python: setup clients ## run the Python tests alone
	$(PYTEST) -m "not slow" $(ARGS)

clients: setup ## make the environments of the client programs that tests/clients runs
	@scripts/client_environments.sh

test-long: setup clients ## run what takes longer: slow tests, and beside them long random runs, loom, mutants
	@scripts/side_by_side.sh "$(MAKE) test-slow" "$(MAKE) test-random && $(MAKE) test-loom && $(MAKE) test-mutation"

test-slow: setup clients ## run the Python tests that are marked slow
	$(PYTEST) -m slow $(ARGS)

test-random: ## run the random operations of the control plane for longer, from seeds that `make test` does not reach
	@scripts/test_random.sh

test-loom: ## model-check the lock-free structures (crates that have a tests/loom*.rs)
	@scripts/test_loom.sh

test-mutation: setup ## put known bugs back into the control plane and prove that its tests fail
	$(BIN)/python scripts/mutation_test.py $(MUTANTS)

lint: setup ## check format, types, import layers, the stub of the core, clippy and dependencies
	@scripts/lint.sh

hooks: ## have git check the messages of commits in this clone
	git config core.hooksPath scripts/hooks

fmt: setup ## format the Python and Rust sources in place
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	cargo fmt --all

bench: setup ## measure the scheduler: cost per step in Rust, then as Python sees it (JSON)
	cargo bench $(LOCKED) $(ARGS)
	$(BIN)/rustvllm bench step --json

wheel: setup ## build the abi3 wheel into dist/ and prove that it serves from a clean environment
	$(BIN)/python scripts/check_wheel.py

all: ## do exactly what CI does: setup, lint, test, test-long, wheel
	@bash .ci/run

clean: ## remove build outputs (keeps .venv and the downloads)
	rm -rf target dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find python tests tools scripts -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f python/rustvllm/_core*.so $(VENV)/.stamps/core
