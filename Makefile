# Every target makes its own virtual environment and installs what it needs, from the versions in constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH := $(VENV)/.bench

.PHONY: test test-all lint bench clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(BENCH): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,bench]'
	touch $@

test: $(STAMP)  ## everything that must hold, in a few minutes
	$(BIN)/python -m pytest -m "not long" -n 2

test-all: $(STAMP)  ## the same, and the long attacks
	$(BIN)/python -m pytest -n 2

lint: $(STAMP)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict $(wildcard src/sapwood/cache src/sapwood/scheduler)

bench: $(BENCH)  ## figures, beside the yardsticks, in one run
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build src/*.egg-info
