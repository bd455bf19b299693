# `make demo` and `make test` need only Python 3.11 and make: each makes its own virtual environment.
PYTHON ?= python3
VENV ?= .venv
INTEROP ?= .venv-interop
BIN := $(VENV)/bin
# Processes that run tests side by side.
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal

.PHONY: demo test test-fast test-gpu test-interop lint bench clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test,importers]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/dbksvd demo demo-out --force

# Before a release: the tests that need torch, SAELens or a peer of the benchmarks, in an environment of their own.
# torch comes first and by itself, so that nothing else chooses its build. The last result is in docs/reliability.md.
$(INTEROP)/.installed: pyproject.toml
	$(PYTHON) -m venv $(INTEROP)
	$(INTEROP)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(INTEROP)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test,importers,bench,interop]'
	touch $@

test-interop: $(INTEROP)/.installed
	$(INTEROP)/bin/python -m pytest -m interop -rs

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(PYTEST)

# What a change is tried with again and again: under a minute.
test-fast: $(VENV)/.installed
	$(PYTEST) -m "not slow and not cluster and not browser and not network and not gpu"

# On a machine with a card: the GPU tests on real CuPy arrays, then the times that belong into docs/gpu.md.
test-gpu: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[gpu,test]'
	$(BIN)/python -m benchmarks.gpu --check
	$(BIN)/python -m pytest -m gpu -rs tests/gpu
	$(BIN)/python -m pytest tests/test_gpu_compile.py tests/test_gpu_namespace.py
	$(BIN)/python -m benchmarks.gpu --json

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks.guard

clean:
	rm -rf $(VENV) $(INTEROP) demo-out build *.egg-info .pytest_cache .mypy_cache .ruff_cache
