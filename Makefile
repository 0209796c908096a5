# Fairgate. `make help` lists the targets; `make demo` and `make test` need nothing but Python 3.11+, git and make.

PYTHON ?= python3
VENV ?= .venv
# The package index to take torch from; empty: pip's own. On a machine without a GPU,
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
# downloads 200 MB instead of several GB.
TORCH_INDEX ?=
TORCH_VERSION ?= 2.13.0
TRANSFORMERS_FLOOR := 5.17.0
PYTEST_ARGS ?=
# Many tests wait for servers of their own: two files at a time take two thirds of the time of one.
TEST_WORKERS ?= 2
SERVE_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP_DEMO := $(VENV)/.fairgate-engine
STAMP_TEST := $(VENV)/.fairgate-test
PEERS := .bench-peers
STAMP_PEERS := $(PEERS)/openvino/.installed
STAMP_LITELLM := $(PEERS)/litellm/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo serve test test-floor check mutants format bench-fairness bench-estimates bench-peers \
  bench-engine bench-scheduler bench-contract clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-16s %s\n", $$1, $$2}'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Fairgate needs Python 3.11 or newer as '$(PYTHON)'; name another with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "The Python module 'venv' is missing. On Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first and by itself: a later install then finds it and does not choose another build.
$(STAMP_DEMO): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -q "torch==$(TORCH_VERSION)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PIP) install -q -c constraints.txt -e '.[engine]'
	@touch $@

$(STAMP_TEST): $(STAMP_DEMO)
	$(PIP) install -q -c constraints.txt -e '.[test,dev]'
	@touch $@

install: $(STAMP_DEMO) ## create .venv and install the gateway and the engine

demo: $(STAMP_DEMO) ## 27 tenants, a real trace, a live table, a report; stays up until Ctrl-C
	$(BIN)/fairgate demo $(DEMO_ARGS)

serve: $(STAMP_DEMO) ## serve the model that ships with the project (SERVE_ARGS="--port 8000 ...")
	$(BIN)/fairgate serve $(SERVE_ARGS)

test: $(STAMP_TEST) ## the whole suite, real PostgreSQL and Redis included
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

test-floor: ## the suite with the oldest supported transformers, in an environment of its own
	$(MAKE) VENV=.venv-floor .venv-floor/.fairgate-test
	.venv-floor/bin/python -m pip install -q "transformers==$(TRANSFORMERS_FLOOR)"
	.venv-floor/bin/python -m pytest -n $(TEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

check: $(STAMP_TEST) ## format, lint, types and import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

mutants: $(STAMP_TEST) ## break rules on purpose, in a copy: does each one's test fail?
	$(BIN)/python -m tests.mutants.run

format: $(STAMP_TEST) ## rewrite the files as `make check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-fairness: $(STAMP_DEMO) ## weights 1:3 on a running server: charged service between two snapshots
	$(BIN)/fairgate bench fairness

bench-estimates: $(STAMP_DEMO) ## estimated against actual waits at 0, 20 and 100 queued requests
	$(BIN)/fairgate bench estimates

# Each peer lives in an environment of its own; transformers, the other peer, comes with the engine.
$(STAMP_PEERS): ops/bench/peers/openvino.txt | $(BIN)/python
	$(PYTHON) -m venv $(PEERS)/openvino
	$(PEERS)/openvino/bin/python -m pip --disable-pip-version-check install -q "torch==$(TORCH_VERSION)" \
	  $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PEERS)/openvino/bin/python -m pip --disable-pip-version-check install -q --no-deps \
	  -r ops/bench/peers/openvino.txt
	@touch $@

$(STAMP_LITELLM): ops/bench/peers/litellm.txt | $(BIN)/python
	$(PYTHON) -m venv $(PEERS)/litellm
	$(PEERS)/litellm/bin/python -m pip --disable-pip-version-check install -q --no-deps \
	  -r ops/bench/peers/litellm.txt
	@touch $@

bench-peers: $(STAMP_DEMO) $(STAMP_PEERS) $(STAMP_LITELLM) ## install what the benchmarks compare with (2 GB)

bench-engine: $(STAMP_DEMO) $(STAMP_PEERS) ## our engine beside its peers (BENCH_ARGS="--model small ...")
	$(BIN)/fairgate bench engine $(BENCH_ARGS)

bench-scheduler: $(STAMP_DEMO) ## what a scheduling step costs without a model (BENCH_ARGS="--policy vtc ...")
	$(BIN)/fairgate bench scheduler $(BENCH_ARGS)

# PostgreSQL and Redis come with the test extra where the machine has none.
bench-contract: $(STAMP_TEST) ## budgets through bursts and kill -9 (BENCH_ARGS="--scenario 'kill-*' --peers litellm ...")
	$(BIN)/fairgate bench contract $(BENCH_ARGS)

clean: ## remove the environments and caches
	rm -rf $(VENV) .venv-floor $(PEERS) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
