# The verbs of this project; `make help` lists them. Everything runs in .venv, which the first verb makes.
.DEFAULT_GOAL := help
.PHONY: help setup demo experiments experiments-quick test test-engine bench-engine check format bench protos crds chart images e2e clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Tests that start processes share the cores with them: one worker fewer than cores would leave a small machine none.
TEST_ARGS ?=
# Of the demo: simulated, or sglang (two real servers on the CPU, in an environment of their own).
ENGINE ?= simulated
OUT ?= out/demo$(if $(filter sglang,$(ENGINE)),-sglang)
IMAGE_TAG ?= 0.1.0
IMAGE_REGISTRY ?=
ENGINE_VENV := .venv-engine
ENGINE_READY := $(ENGINE_VENV)/.ready
# A real engine on the CPU: one thread each, nothing fetched at run time.
ENGINE_ENV := SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1

# The mark is a copy of the list that the environment was made from: a checkout that only touches the file makes nothing anew.
# Outside CI an environment that cannot be made is a reason to skip: tools/engine_environment says which, and ends with 77.
define engine_environment
@cmp -s engine/requirements-test.txt $(ENGINE_READY) || { \
	tools/engine_environment $(ENGINE_VENV) $(PYTHON) && cp engine/requirements-test.txt $(ENGINE_READY); } || { \
	code=$$?; rm -rf $(ENGINE_VENV); \
	if [ $$code = 77 ] && [ "$${CI:-}" != true ]; then echo "$@: skipped, see the line above"; exit 0; fi; exit $$code; }
endef

define with_engine
$(engine_environment)
@test ! -e $(ENGINE_READY) || $(ENGINE_ENV) $(ENGINE_VENV)/bin/python $(1)
endef

help: ## what can be made
	@sed -n 's/^\([a-z][a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(READY) ## the virtual environment with all that the other verbs need

$(READY): pyproject.toml constraints.txt tools/setup
	@tools/setup $(VENV) $(PYTHON)
	@touch $@

demo: $(READY) ## run engines, sidecars and the router, compare two set-ups (3 minutes; ENGINE=sglang: 5, on real servers)
ifeq ($(ENGINE),sglang)
	$(engine_environment)
	@test ! -e $(ENGINE_READY) || $(BIN)/kvrouting demo --engine sglang --engine-python $(ENGINE_VENV)/bin/python --out $(OUT)
else
	@$(BIN)/kvrouting demo --engine $(ENGINE) --out $(OUT)
endif

# Hours on two cores; what is there is not run again, so it may be interrupted.
experiments: $(READY) ## run every study of experiments/ and write docs/results (hours; goes on where it stopped)
	@$(BIN)/kvrouting experiments --data $(DATA)

experiments-quick: $(READY) ## the small form of each study must give the committed numbers, byte for byte (5 minutes)
	@$(BIN)/kvrouting experiments --quick --check

test: $(READY) ## all tests that this machine allows
	@$(BIN)/python -m pytest $(TEST_ARGS)

test-engine: ## the plug-in inside a real SGLang on the CPU (its own environment: 3 minutes and 1.7 GB, once)
	$(call with_engine,-m pytest -W default tests/engine $(TEST_ARGS))

bench-engine: ## what the plug-in costs inside SGLang, against its own LRU
	$(call with_engine,-W ignore -m benchmarks.engine_plugin)

check: $(READY) ## format, lint, types, architecture, generated files
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tools/generate_protos.py --check
	@$(BIN)/python tools/generate_crd.py --check
	@$(BIN)/python tools/generate_chart.py --check
	@$(BIN)/python tools/generate_dashboard.py --check

format: $(READY) ## bring the code into shape
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(READY) ## every benchmark, each figure as a ratio to a baseline of the same run
	@$(BIN)/python -m benchmarks

protos: $(READY) ## generate the protobuf stubs
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tools/generate_protos.py

crds: $(READY) ## generate the CRD, the operator's rights and docs/crd.md, and the chart's README and schema
	@$(BIN)/python tools/generate_crd.py
	@$(BIN)/python tools/generate_chart.py

images: ## build the images of the product with docker or buildah (IMAGE_TAG, IMAGE_REGISTRY)
	@tools/build_images $(IMAGE_TAG) $(IMAGE_REGISTRY)

chart: $(READY) ## generate the chart's README, schema and dashboard; lint and render each of its scenarios
	@$(BIN)/python tools/generate_chart.py
	@$(BIN)/python tools/generate_dashboard.py
	@$(BIN)/python -m pytest tests/chart $(TEST_ARGS)

e2e: $(READY) ## install and use the chart on a cluster with a real node (KVROUTING_E2E_KUBECONFIG, or a throw-away one)
	@$(BIN)/python -m pytest e2e $(TEST_ARGS)

clean: ## remove what was made
	rm -rf $(VENV) $(ENGINE_VENV) out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
