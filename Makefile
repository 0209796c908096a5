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
# Many tests wait for servers of their own: with three files at a time two cores are busy.
TEST_WORKERS ?= 3
# Whatever the environment says: without it each of the hundred processes that a suite starts compiles its modules anew.
export PYTHONDONTWRITEBYTECODE :=
SERVE_ARGS ?=
MUTANT_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP_DEMO := $(VENV)/.fairgate-engine
STAMP_TEST := $(VENV)/.fairgate-test
PEERS := .bench-peers
SDKS := .sdks
STAMP_PEERS := $(PEERS)/openvino/.installed
STAMP_LITELLM := $(PEERS)/litellm/.installed
STAMP_NGINX := $(PEERS)/nginx/.installed
STAMP_PORTKEY := $(PEERS)/portkey/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo serve test test-long test-sdks test-floor check mutants format bench-fairness bench-estimates bench-peers \
  bench-engine bench-scheduler bench-contract bench-fidelity bench-gateway clean

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

test: $(STAMP_TEST) ## the suite, real PostgreSQL and Redis included; without the long sweeps
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder -m "not long" $(PYTEST_ARGS)

test-long: $(STAMP_TEST) ## the sweeps of histories on virtual time that `make test` leaves out
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile -m long $(PYTEST_ARGS)

test-floor: ## the suite with the oldest supported transformers, in an environment of its own
	$(MAKE) VENV=.venv-floor .venv-floor/.fairgate-test
	.venv-floor/bin/python -m pip install -q "transformers==$(TRANSFORMERS_FLOOR)"
	.venv-floor/bin/python -m pytest -n $(TEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

test-sdks: $(STAMP_TEST) ## the streams of other SDKs: older majors of openai, LangChain, Node
	$(PIP) install -q --target $(SDKS)/openai1 'openai<2'
	$(PIP) install -q --target $(SDKS)/openai2 'openai<3'
	$(PIP) install -q --target $(SDKS)/langchain langchain-openai
	npm install --prefix $(SDKS)/node --no-audit --no-fund openai
	FAIRGATE_TEST_SDKS=$(SDKS) $(BIN)/python -m pytest tests/e2e/test_sdk_streams.py $(PYTEST_ARGS)

check: $(STAMP_TEST) ## format, lint, types and import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

mutants: $(STAMP_TEST) ## break rules on purpose, in copies: does each one's test fail? (MUTANT_ARGS="NAME ...")
	$(BIN)/python -m tests.mutants.run $(MUTANT_ARGS)

format: $(STAMP_TEST) ## rewrite the files as `make check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-fairness: $(STAMP_DEMO) ## floods, weights, tiers and reservations on a running server
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

# Debian's, unpacked and not installed; where there is no apt-get, the system's is used.
$(STAMP_NGINX):
	@mkdir -p $(@D)
	@if command -v apt-get >/dev/null; then cd $(@D) && apt-get download -q nginx && dpkg -x nginx_*.deb . && \
	  rm nginx_*.deb && touch .installed; \
	  else echo "no apt-get here: install nginx by other means for 'fairgate bench gateway'"; fi

$(STAMP_PORTKEY): ops/bench/peers/portkey/package.json ops/bench/peers/portkey/package-lock.json
	@mkdir -p $(@D)
	@if command -v npm >/dev/null; then cp $^ $(@D) && cd $(@D) && \
	  npm ci --omit=dev --ignore-scripts --no-audit --no-fund && touch .installed; \
	  else echo "Portkey needs Node 20 or newer with npm: it is left out of 'fairgate bench gateway'"; fi

bench-peers: $(STAMP_DEMO) $(STAMP_PEERS) $(STAMP_LITELLM) $(STAMP_NGINX) $(STAMP_PORTKEY) ## install what the benchmarks compare with (2 GB)

bench-engine: $(STAMP_DEMO) $(STAMP_PEERS) ## our engine beside its peers (BENCH_ARGS="--model small ...")
	$(BIN)/fairgate bench engine $(BENCH_ARGS)

bench-scheduler: $(STAMP_DEMO) ## what a scheduling step costs without a model (BENCH_ARGS="--policy vtc ...")
	$(BIN)/fairgate bench scheduler $(BENCH_ARGS)

# PostgreSQL and Redis come with the test extra where the machine has none.
bench-contract: $(STAMP_TEST) ## budgets through bursts and kill -9 (BENCH_ARGS="--scenario 'kill-*' --peers litellm ...")
	$(BIN)/fairgate bench contract $(BENCH_ARGS)

bench-fidelity: $(STAMP_DEMO) ## the simulator beside the real engine, 45 minutes (BENCH_ARGS="--policy vtc ...")
	$(BIN)/fairgate bench fidelity $(BENCH_ARGS)

bench-gateway: $(STAMP_DEMO) $(STAMP_LITELLM) $(STAMP_NGINX) $(STAMP_PORTKEY) ## what a gateway costs, ours beside its peers (BENCH_ARGS="--rounds 5 ...")
	$(BIN)/fairgate bench gateway $(BENCH_ARGS)

clean: ## remove the environments and caches
	rm -rf $(VENV) .venv-floor $(PEERS) $(SDKS) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
