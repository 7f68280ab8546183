# Everything runs in a virtual environment that is built on first use. Needed: Python >= 3.11, make.
#
#   make test                                     the python3 of this machine, in .venv
#   make test PYTHON=python3.13 VENV=.venv313     a second environment beside it

VENV ?= .venv
# An environment that exists keeps its own Python unless another one is asked for.
ifeq ($(origin PYTHON),undefined)
PYTHON := $(if $(wildcard $(VENV)/bin/python),$(VENV)/bin/python,python3)
endif
# pytest processes: one per core. WORKERS=0 runs in the calling process, for a debugger.
WORKERS ?= auto
# More options for pytest, as in make test PYTEST_FLAGS="-k merge".
PYTEST_FLAGS ?=
# What `make accelerator` runs on: JAX's name of a platform.
PLATFORM ?= cuda
# How many sequences of mixed calls `make laws` draws for each strategy; the tests draw a few.
EXAMPLES ?= 50
# How many random programs `make fuzz` draws; the tests draw a few.
SEEDS ?= 500
# How many times `make drills` kills a training, and the seed of the first one.
KILLS ?= 50
SEED ?= 0
# How many launched trainings `make drills` gives a fault each.
FAULTS ?= 100
# NOTEBOOK_FLAGS=--write writes the .ipynb files anew from the .py files.
NOTEBOOK_FLAGS ?=
# Enough steps to see an example run to its end, too few to see it learn.
EXAMPLE_FLAGS ?= --steps 20

SHELL := /bin/sh
BIN := $(VENV)/bin
PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
# The name holds the version, so that another PYTHON is noticed and not silently ignored.
INSTALLED := $(VENV)/.installed-$(PYTHON_VERSION)

# Do not let the type checker ask the network whether a newer release exists.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help venv demo test drill-test plan-test accelerator laws fuzz drills doctest examples notebooks docs table bench golden lint types format clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: $(INSTALLED)  ## build the virtual environment, nothing else

demo: $(INSTALLED)  ## train on the digits, mirrored over 8 virtual CPU devices
	$(BIN)/python examples/digits/train.py

test: $(INSTALLED)  ## the tests, but for those that take long
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(PYTEST_FLAGS)

drill-test: $(INSTALLED)  ## the tests that `make test` leaves out: long ones beside a quick one of the same law
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m drill $(PYTEST_FLAGS)

# libtpu is large: an environment beside the other, with it. One process at a time loads it.
plan-test: $(INSTALLED)  ## the tests that compile for TPUs, in VENV, which gets libtpu (575 MB)
	$(BIN)/python -m pip install --quiet --editable '.[plan]'
	$(BIN)/python -m pytest -n 0 tests/plan tests/strategies/test_for_a_tpu.py $(PYTEST_FLAGS)

accelerator: export DISTJAX_TESTS_PLATFORM := $(PLATFORM)
accelerator: export XLA_PYTHON_CLIENT_PREALLOCATE := false
accelerator: export JAX_DEFAULT_MATMUL_PRECISION := highest
accelerator: $(INSTALLED)  ## the laws of all strategies on the devices of PLATFORM, as many as there are
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m table $(PYTEST_FLAGS)

laws: $(INSTALLED)  ## random sequences of mixed calls, EXAMPLES for each strategy
	LAW_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest -n $(WORKERS) tests/laws $(PYTEST_FLAGS)

fuzz: $(INSTALLED)  ## random programs: what is proved equal is, and beside jax.pmap, SEEDS of each
	FUZZ_SEEDS=$(SEEDS) $(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_FLAGS) \
	  tests/differential/test_proofs.py tests/pmap/test_random.py

drills: $(INSTALLED)  ## KILLS of trainings from SEED on, FAULTS of launched ones, misuse, curves, 512 devices, interrupts, parameter servers
	$(BIN)/python -m tests.drills --seed $(SEED) --kills $(KILLS)
	$(BIN)/python -m tests.drills.faults --seed $(SEED) --faults $(FAULTS)
	$(BIN)/python -m tests.drills.misuse
	$(BIN)/python -m tests.drills.curves
	$(BIN)/python -m tests.drills.many_devices
	$(BIN)/python -m tests.drills.interrupts --seed $(SEED)
	$(BIN)/python -m tests.drills.servers --seed $(SEED)
	$(BIN)/python -m tests.drills.ray_servers --seed $(SEED)

doctest: $(INSTALLED)  ## the examples in the docstrings, on 8 virtual CPU devices
	JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8 \
	  $(BIN)/python -m pytest --doctest-modules distjax $(PYTEST_FLAGS)

examples: $(INSTALLED)  ## every example, a few steps of each
	@set -e; for script in $$(grep -l '__name__ == "__main__"' examples/*/*.py); do \
	  echo "$(BIN)/python $$script $(EXAMPLE_FLAGS)"; \
	  $(BIN)/python "$$script" $(EXAMPLE_FLAGS); \
	done

notebooks: $(INSTALLED)  ## execute every notebook and check that it is the pair of its .py
	JAX_PLATFORMS=cpu $(BIN)/python notebooks/execute.py $(NOTEBOOK_FLAGS)

docs: $(INSTALLED)  ## the guides and the API reference, in build/docs; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

table: $(INSTALLED)  ## run the tests of the API's rows, write docs/tf_distribute_api.md
	$(BIN)/python -m pytest -n $(WORKERS) -m api_row --write-api-table $(PYTEST_FLAGS)

bench: $(INSTALLED)  ## time distjax against hand-written JAX
	$(BIN)/python -m benchmarks

# TensorFlow in an environment of its own: the tests only read what it answered.
GOLDEN_VENV := .venv-golden
golden:  ## ask TensorFlow 2.21 again and rewrite tests/golden/data
	@test -x $(GOLDEN_VENV)/bin/python || $(PYTHON) -m venv $(GOLDEN_VENV)
	$(GOLDEN_VENV)/bin/python -m pip install --quiet 'tensorflow-cpu==2.21.*'
	$(GOLDEN_VENV)/bin/python -m tests.golden.record

lint: $(INSTALLED)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)  ## pyright over the package
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(INSTALLED)  ## let ruff rewrite what lint complains about
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove caches and build outputs; environments stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis benchmarks/results
	find distjax tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "distjax needs Python 3.11 or newer, but PYTHON=$(PYTHON) is $(or $(PYTHON_VERSION),no Python that runs)." >&2; \
	  echo "Name another one: make $(or $(MAKECMDGOALS),test) PYTHON=/path/to/python3.12" >&2; exit 1; }
	@if [ -x $(BIN)/python ]; then \
	  found=$$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	  if [ "$$found" != "$(PYTHON_VERSION)" ]; then \
	    echo "$(VENV) holds Python $$found, but PYTHON=$(PYTHON) is $(PYTHON_VERSION)." >&2; \
	    echo "Give it a place of its own: make $(or $(MAKECMDGOALS),test) PYTHON=$(PYTHON) VENV=.venv$(subst .,,$(PYTHON_VERSION))" >&2; \
	    exit 1; \
	  fi; \
	else \
	  echo "Building $(VENV) with Python $(PYTHON_VERSION)"; \
	  $(PYTHON) -m venv $(VENV) || { \
	    echo "$(PYTHON) cannot build virtual environments (on Debian and Ubuntu: install python3-venv)." >&2; exit 1; }; \
	fi
	@echo "Installing distjax and its tools into $(VENV) (minutes the first time)"
	$(BIN)/python -m pip install --quiet --editable '.[dev,examples]'
	@touch $@
