# Needs only python3 >= 3.11 and make; uses uv when it is there.
PYTHON ?= python3
VENV   := .venv
RAY_VENV := .venv-ray
BIN    := $(VENV)/bin
UV     := $(shell command -v uv 2>/dev/null)

RL_VENV := .venv-rl
TORCH   := torch==2.13.0
RL_TOOLS := 'pytest>=8.3' 'pytest-xdist>=3.6'
RAY_TOOLS := 'pytest>=8.3' 'psutil>=6'

COVERAGE_FLOOR := 90
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile -q -rs

ifdef UV
install = test -x $(BIN)/python || $(UV) venv --quiet --python $(PYTHON) $(VENV); $(UV) pip install --quiet --python $(BIN)/python
else
install = test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); $(BIN)/python -m pip install --quiet --disable-pip-version-check
endif

.PHONY: help install dev quickstart test test-rl test-ray check coverage lint types imports bench chaos chaos-short \
	clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "make %-11s %s\n", $$1, $$2}'

# The stamps make a second run skip the installation until pyproject.toml changes.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=python3.11 (or newer)"; exit 2; }
	@echo "installing into $(VENV) ..."
	@$(install) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.installed
	@echo "installing the development tools into $(VENV) ..."
	@$(install) -e '.[dev]'
	@touch $@

install: $(VENV)/.installed ## create .venv and install the package

dev: $(VENV)/.installed-dev ## the same with the development tools

quickstart: install ## start an example environment with the built-in model and collect rollouts from it
	@$(BIN)/python -m nemo_gym.cli.quickstart

test: dev ## run every test
	@$(PYTEST)

# torch is large, so it gets an environment of its own, with no more than these tests need; git does not see its files.
# Installed with pip even where uv is there: pip looks in more places for wheels.
$(RL_VENV)/.installed: pyproject.toml
	@test -x $(RL_VENV)/bin/python || $(PYTHON) -m venv $(RL_VENV)
	@echo '*' > $(RL_VENV)/.gitignore
	@echo "installing $(TORCH) into $(RL_VENV) ..."
	@$(RL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH) $(RL_TOOLS) -e '.[rl]'
	@touch $@

test-rl: $(RL_VENV)/.installed ## run the tests of nemo_gym.rl with torch, in .venv-rl
	@$(RL_VENV)/bin/python -m pytest -n 2 --dist loadfile -q -rs tests/rl

# Ray is large and wanted by few, so it gets an environment of its own, too.
$(RAY_VENV)/.installed: pyproject.toml
	@test -x $(RAY_VENV)/bin/python || $(PYTHON) -m venv $(RAY_VENV)
	@echo "installing Ray into $(RAY_VENV) ..."
	@$(RAY_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(RAY_TOOLS) -e '.[ray]'
	@touch $@

test-ray: $(RAY_VENV)/.installed ## run the tests that need Ray, on a cluster of several nodes on this machine
	@$(RAY_VENV)/bin/python -m pytest -q -rs tests/distributed/test_ray.py tests/distributed/test_without_a_cluster.py \
		tests/rl/test_ray_actor.py

lint: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: dev
	$(BIN)/mypy

imports: dev
	$(BIN)/lint-imports

check: lint types imports ## what CI runs: lint, types, import contract, every test, those with torch and Ray, some faults
	@$(MAKE) --no-print-directory test
	@$(MAKE) --no-print-directory test-rl
	@$(MAKE) --no-print-directory test-ray
	@$(MAKE) --no-print-directory chaos-short

coverage: dev ## run every test and demand that it covers the code
	$(PYTEST) --cov --cov-report=term --cov-fail-under=$(COVERAGE_FLOOR)

bench: dev ## ratios of what we cost to what the work itself costs
	$(BIN)/python -m pytest -q -s tests/perf
	$(BIN)/python -m tests.perf.side_by_side

chaos: dev ## faults, hanging servers, load, bad input: every promise put to the test; CHAOS_SEED=7 repeats a run
	$(BIN)/python -m tests.chaos $(if $(CHAOS_SEED),--seed $(CHAOS_SEED)) --docs --json results/chaos.json
	$(PYTEST) --dist load tests/fuzz --fuzz-examples 30 $(if $(CHAOS_SEED),--fuzz-seed $(CHAOS_SEED))

chaos-short: dev
	$(BIN)/python -m tests.chaos --short $(if $(CHAOS_SEED),--seed $(CHAOS_SEED))

clean:
	rm -rf $(VENV) $(RL_VENV) $(RAY_VENV) dist build
