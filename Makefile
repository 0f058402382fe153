# The verbs of this project; `make help` lists them. Everything runs in .venv, which the first verb makes.
.DEFAULT_GOAL := help
.PHONY: help setup demo test check format bench protos clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Tests that start processes share the cores with them: one worker fewer than cores would leave a small machine none.
TEST_ARGS ?=
OUT ?= out/demo

help: ## what can be made
	@sed -n 's/^\([a-z][a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

setup: $(READY) ## the virtual environment with all that the other verbs need

$(READY): pyproject.toml constraints.txt tools/setup
	@tools/setup $(VENV) $(PYTHON)
	@touch $@

demo: $(READY) ## run four simulated engines, sidecars and the router, compare two set-ups (3 minutes)
	@$(BIN)/kvrouting demo --out $(OUT)

test: $(READY) ## all tests that this machine allows
	@$(BIN)/python -m pytest $(TEST_ARGS)

check: $(READY) ## format, lint, types, architecture, generated files
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tools/generate_protos.py --check

format: $(READY) ## bring the code into shape
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(READY) ## every benchmark, each figure as a ratio to a baseline of the same run
	@$(BIN)/python -m benchmarks

protos: $(READY) ## generate the protobuf stubs
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tools/generate_protos.py

clean: ## remove what was made
	rm -rf $(VENV) out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
