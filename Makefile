# Needs only python3 >= 3.11 and make; uses uv when it is there.
PYTHON ?= python3
VENV   := .venv
RAY_VENV := .venv-ray
MLFLOW_VENV := .venv-mlflow
PEERS_VENV := .venv-peers
BIN    := $(VENV)/bin
UV     := $(shell command -v uv 2>/dev/null)

RL_VENV := .venv-rl
TORCH   := torch==2.13.0
RL_TOOLS := 'pytest>=8.3' 'pytest-xdist>=3.6' 'pyarrow>=23.0.1' 'trl>=1.16'
# verl admits older versions of transformers than trl wants, so it lies beside the rest, with what importing it takes.
VERL    := $(RL_VENV)/verl
VERL_TOOLS := verl==0.9.1 transformers==5.10.4 tokenizers==0.22.2 huggingface-hub==1.33.0 tensordict==0.10.0 ray==2.60.0 \
	cachetools==8.0.0 cloudpickle==3.1.2 codetiming==1.4.0 jsonschema==4.26.0 jsonschema-specifications==2025.9.1 \
	msgpack==1.2.4 pillow==13.0.0 pyvers==0.2.3 referencing==0.37.0 rpds-py==2026.9.1
# What `make bench-peers` compares with, each in an environment of its own below .venv-peers, named like its target here.
PEERS := inspect_ai verifiers verifiers_tool_env
PEER_inspect_ai := inspect_ai==0.3.285 openai==3.49.0
PEER_verifiers := verifiers==0.4.0 uv==0.13.7
PEER_verifiers_tool_env := verifiers==0.3.1
RAY_TOOLS := 'pytest>=8.3' 'psutil>=6'
# The tests that do what the README, the pages of docs/ and the READMEs of modules say, word for word.
DOCS_TESTS := tests/test_guides.py tests/test_reference_pages.py tests/test_tutorial.py tests/test_environment_readmes.py \
	tests/test_agent_readmes.py tests/test_model_readmes.py tests/data/benchmarks/test_readmes.py tests/data/test_first_environment.py \
	tests/contract/test_docs_types.py
# The versions that were tested together; `make constraints` renews them.
PINNED := --constraint constraints.txt

OLD_SDK := $(VENV)/openai-oldest
OLD_SDK_VERSION := 2.7.2

COVERAGE_FLOOR := 90
# Five on two cores: most of the time tests wait for processes, clocks and sockets. tests/conftest.py knows what takes longest.
PYTEST := $(BIN)/python -m pytest -n 5 --dist loadfile --no-loadscope-reorder -q -rs

# Tests start thousands of processes; where Python is told to keep no bytecode, each would compile all of this again.
unexport PYTHONDONTWRITEBYTECODE

ifdef UV
install = test -x $(BIN)/python || $(UV) venv --quiet --seed --python $(PYTHON) $(VENV); $(UV) pip install --quiet --compile-bytecode --python $(BIN)/python $(PINNED)
else
install = test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); $(BIN)/python -m pip install -qq --disable-pip-version-check $(PINNED)
endif

.PHONY: help install dev quickstart test test-again test-docs test-rl test-verl test-ray test-mlflow test-sdk test-browser screenshots docs check coverage lint types imports bench bench-coverage bench-peers walk compare-commits record-responses chaos chaos-short \
	constraints clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "make %-12s %s\n", $$1, $$2}'

# The stamps make a second run skip the installation until pyproject.toml or constraints.txt changes.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=python3.11 (or newer)"; exit 2; }
	@echo "installing into $(VENV) ..."
	@$(install) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt $(VENV)/.installed
	@echo "installing the development tools into $(VENV) ..."
	@$(install) -e '.[dev]'
	@touch $@

install: $(VENV)/.installed ## create .venv and install the package

dev: $(VENV)/.installed-dev ## the same with the development tools

quickstart: install ## start an example environment with the built-in model and collect rollouts from it
	@$(BIN)/python -m nemo_gym.cli.quickstart

test: dev ## run the tests, but for those that have a target of their own
	@$(PYTEST) $(DOCS_TESTS:%=--ignore=%)

test-docs: dev ## type every command of the documentation, run its programs, check their types
	@$(PYTEST) $(DOCS_TESTS)

test-again: dev ## run what failed in the last run of the tests, one at a time
	@$(BIN)/python -m pytest -q -rs --last-failed --last-failed-no-failures none

# torch is large, so it gets an environment of its own, with no more than these tests need; git does not see its files.
# Installed with pip even where uv is there: pip looks in more places for wheels.
$(RL_VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(RL_VENV)/bin/python || $(PYTHON) -m venv $(RL_VENV)
	@echo '*' > $(RL_VENV)/.gitignore
	@echo "installing $(TORCH) into $(RL_VENV) ..."
	@$(RL_VENV)/bin/python -m pip install -qq --disable-pip-version-check $(PINNED) $(TORCH) $(RL_TOOLS) -e '.[rl,tokens]'
	@touch $@

test-rl: $(RL_VENV)/.installed ## run the tests of nemo_gym.rl with torch, in .venv-rl
	@$(RL_VENV)/bin/python -m pytest -n 2 --dist loadfile -q -rs tests/rl

$(VERL)/.installed: $(RL_VENV)/.installed
	@echo "installing verl into $(VERL) ..."
	@$(RL_VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-deps --upgrade --target $(VERL) $(VERL_TOOLS)
	@rm -rf $(VERL)/tests $(VERL)/scripts  # its wheel has these, too, and they would hide ours
	@touch $@

test-verl: $(VERL)/.installed ## run the bridge to verl with verl itself, in .venv-rl
	@PYTHONPATH=$(CURDIR)/$(VERL) $(RL_VENV)/bin/python -m pytest -q -rs tests/rl/test_verl.py

# Ray is large and wanted by few, so it gets an environment of its own, too.
$(RAY_VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(RAY_VENV)/bin/python || $(PYTHON) -m venv $(RAY_VENV)
	@echo "installing Ray into $(RAY_VENV) ..."
	@$(RAY_VENV)/bin/python -m pip install -qq --disable-pip-version-check $(PINNED) $(RAY_TOOLS) -e '.[ray]'
	@touch $@

test-ray: $(RAY_VENV)/.installed ## run the tests that need Ray, on a cluster of several nodes on this machine
	@$(RAY_VENV)/bin/python -m pytest -q -rs tests/executors/test_ray.py tests/executors/test_without_a_cluster.py \
		tests/rl/test_ray_actor.py

# MLflow brings some twenty packages that nothing else here needs, the lighter `mlflow-skinny` too.
$(MLFLOW_VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(MLFLOW_VENV)/bin/python || $(PYTHON) -m venv $(MLFLOW_VENV)
	@echo '*' > $(MLFLOW_VENV)/.gitignore
	@echo "installing MLflow into $(MLFLOW_VENV) ..."
	@$(MLFLOW_VENV)/bin/python -m pip install -qq --disable-pip-version-check $(PINNED) 'pytest>=8.3' -e '.[mlflow]'
	@touch $@

test-mlflow: $(MLFLOW_VENV)/.installed ## run the tests that need MLflow, with its store in files
	@$(MLFLOW_VENV)/bin/python -m pytest -q -rs tests/trackers

# The newest SDK of OpenAI is among the development tools; the oldest we speak lies beside them.
$(OLD_SDK)/.installed: $(VENV)/.installed-dev
	@echo "installing openai $(OLD_SDK_VERSION) into $(OLD_SDK) ..."
	@$(subst $(PINNED),,$(install)) --no-deps --target $(OLD_SDK) openai==$(OLD_SDK_VERSION)
	@touch $@

test-sdk: $(OLD_SDK)/.installed ## hold our types against the oldest SDK of OpenAI that counts, too
	@PYTHONPATH=$(OLD_SDK) $(BIN)/python -c 'import openai; assert openai.__version__ == "$(OLD_SDK_VERSION)"'
	@PYTHONPATH=$(OLD_SDK) $(BIN)/python -m pytest -q tests/contract/test_openai_sdk.py tests/contract/test_token_details.py

# Sphinx comes on top of the development tools: reference and gallery are made from the servers, whose libraries are there.
$(VENV)/.installed-docs: pyproject.toml constraints.txt $(VENV)/.installed-dev
	@echo "installing Sphinx into $(VENV) ..."
	@$(install) -e '.[docs]'
	@touch $@

docs: $(VENV)/.installed-docs ## build the documentation into build/docs/html; a broken link fails
	@$(BIN)/python -m docs.site build/docs

# Playwright brings a driver of 50 MB along; the browser itself is the system's Chromium.
$(VENV)/.installed-browser: $(VENV)/.installed-dev
	@echo "installing playwright into $(VENV) ..."
	@$(install) -e '.[browser]'
	@touch $@

test-browser: $(VENV)/.installed-browser ## look at the pages of ng_view with Chromium, which has to be installed
	@$(BIN)/python -m pytest -q -rs -m browser tests/view

screenshots: $(VENV)/.installed-browser ## make the pictures of docs/viewing.md again, from a run that is collected for them
	@$(BIN)/python -m tests.view.screenshots

lint: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: dev
	$(BIN)/mypy

imports: dev
	$(BIN)/lint-imports

# One stage of the check. What fails is named and tried once more, alone; what fails again is named in the last line.
define stage
echo "== $(1)"; $(MAKE) --no-print-directory $(1) || { \
	echo "== $(1) failed and is tried once more; what passes now depends on the moment, and wants to be mended"; \
	$(MAKE) --no-print-directory $(2) || { echo "== $(1) failed twice"; exit 1; }; }
endef

check: lint types imports ## what CI runs: lint, types, import contract, every test, those of the documentation, with torch, verl, Ray, MLflow and a browser, the site, some faults
	@$(call stage,test,test-again)
	@$(call stage,test-docs,test-again)
	@$(call stage,test-rl,test-rl)
	@$(call stage,test-verl,test-verl)
	@$(call stage,test-ray,test-ray)
	@$(call stage,test-mlflow,test-mlflow)
	@$(call stage,test-sdk,test-sdk)
	@$(call stage,test-browser,test-browser)
	@$(call stage,docs,docs)
	@$(call stage,chaos-short,chaos-short)
	@echo "every stage of the check passed"

coverage: dev ## run every test and demand that it covers the code
	$(PYTEST) --cov --cov-report=term --cov-fail-under=$(COVERAGE_FLOOR)

bench: dev ## ratios of what we cost to what the work itself costs; the last lines say which targets were missed
	@$(BIN)/python -m tests.perf.bench

bench-coverage: dev ## whether intervals hold the truth as often as they say, over the whole grids; some cells are in bench
	@$(BIN)/python -m pytest -q -s -m whole_grid tests/perf/test_interval_coverage.py tests/perf/test_compare_coverage.py

# Not with our constraints: peers bring along what they ask for.
$(PEERS:%=$(PEERS_VENV)/%/.installed): $(PEERS_VENV)/%/.installed: Makefile
	@test -x $(PEERS_VENV)/$*/bin/python || $(PYTHON) -m venv $(PEERS_VENV)/$*
	@echo '*' > $(PEERS_VENV)/.gitignore
	@echo "installing $(PEER_$*) into $(PEERS_VENV)/$* ..."
	@$(PEERS_VENV)/$*/bin/python -m pip install -qq --disable-pip-version-check $(PEER_$*)
	@touch $@

bench-peers: dev $(PEERS:%=$(PEERS_VENV)/%/.installed) ## what a rollout costs us and what it costs others, in turn; needs Linux
	$(BIN)/python -m tests.perf.peers

walk: dev ## the modules, functions and lines that one rollout runs, in order
	@$(BIN)/python -m tests.perf.walk

compare-commits: dev ## CPU per rollout of two commits, measured in turns: make compare-commits BEFORE=main AFTER=HEAD
	@$(BIN)/python -m tests.perf.compare_commits $(BEFORE) $(AFTER)

record-responses: dev ## what every server answers to thousands of requests, into OUT; `python -m tests.net diff` compares two
	@$(BIN)/python -m tests.net record $(OUT)

chaos: dev ## faults, hanging servers, load, bad input: every promise put to the test; CHAOS_SEED=7 repeats a run
	$(BIN)/python -m tests.chaos $(if $(CHAOS_SEED),--seed $(CHAOS_SEED)) --docs --json results/chaos.json
	$(PYTEST) --dist load tests/fuzz --fuzz-examples 30 $(if $(CHAOS_SEED),--fuzz-seed $(CHAOS_SEED))

chaos-short: dev
	$(BIN)/python -m tests.chaos --short $(if $(CHAOS_SEED),--seed $(CHAOS_SEED))

constraints: ## renew constraints.txt: the newest versions that fit together, for every extra, Python and platform
	@test -n "$(UV)" || { echo "this needs uv: pip install uv"; exit 2; }
	@printf '%s\n' '$(TORCH)' $(RL_TOOLS) | $(UV) pip compile --quiet --upgrade --universal --python-version 3.11 --all-extras \
		--no-header --no-annotate pyproject.toml - --output-file constraints.txt

clean:
	rm -rf $(VENV) $(RL_VENV) $(RAY_VENV) $(MLFLOW_VENV) $(PEERS_VENV) dist build
