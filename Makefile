# Two commands for a newcomer: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= $(shell nproc)

.PHONY: demo report-gpu test test-full test-sanitize lint clean

NATIVE := CMakeLists.txt $(wildcard src/intflash/backends/cpu/native/*)

$(VENV)/ready: pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/test-ready: $(VENV)/ready
	$(BIN)/pip install --quiet --constraint constraints.txt 'intflash[test]'
	touch $@

demo: $(VENV)/ready
	$(BIN)/intflash demo
	$(BIN)/intflash report

# Every experiment on this machine's GPU, and the page of them, in about five minutes.
report-gpu: $(VENV)/ready
	$(BIN)/python -m benchmarks all --device cuda --out results/gpu

test: $(VENV)/test-ready
	$(BIN)/python -m pytest -n $(WORKERS) -m 'not full'

test-full: $(VENV)/test-ready
	$(BIN)/python -m pytest -n $(WORKERS)

# The CPU kernels under the address and undefined-behaviour sanitizers.
test-sanitize: $(VENV)/test-ready
	sh scripts/sanitize_cpu.sh $(BIN)/python

lint: $(VENV)/ready
	$(BIN)/pip install --quiet ruff
	$(BIN)/ruff check src tests benchmarks scripts

clean:
	rm -rf $(VENV) build results
