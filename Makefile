# make demo | test | thorough | check | bench | interleavings | lock | clean
# Everything runs in .venv, which is built from requirements.lock and nothing else.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
WORKERS ?= 2

# Tests start hundreds of processes, each of which would compile the sources anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test thorough check lint types bench interleavings lock clean
.DEFAULT_GOAL := test

demo: $(STAMP)
	$(BIN)/warpwell demo

# Tests that measure times or shares have the cores to themselves. Status 5: ARGS select none of these.
test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m 'not alone and not long' $(ARGS) || test $$? -eq 5
	$(BIN)/python -m pytest -m 'alone and not long' $(ARGS) || test $$? -eq 5

thorough: test
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m long $(ARGS) || test $$? -eq 5

check: lint types test

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/warpwell bench $(ARGS)

interleavings: $(STAMP)
	$(BIN)/python -m tests.harness.interleavings --runs 10000 $(ARGS)

# The package itself is linked, not copied, so only a changed lock or project file builds again.
$(STAMP): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Warpwell needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

# Run with the oldest Python that is supported: what it resolves to installs on the newer ones too.
lock: build/lock/bin/pip-compile
	build/lock/bin/pip-compile --quiet --upgrade --strip-extras --allow-unsafe --generate-hashes --no-header \
	    --no-annotate --no-emit-index-url --no-emit-trusted-host --no-emit-find-links --no-emit-options \
	    --extra test --extra build --output-file build/lock/resolved pyproject.toml
	grep -v -e '^#' -e '^warpwell @' build/lock/resolved > requirements.lock  # an extra that names others adds ourselves
	! grep -n '://' requirements.lock

build/lock/bin/pip-compile:
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet --disable-pip-version-check 'pip-tools>=7.5'

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
