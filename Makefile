# make demo | check | format | test | test-loaded | test-cost | coverage | docs | docs-test | dist | thorough | sanitize | bench
#     | interleavings | driver-wheel | nvcc | lock | clean
# Everything runs in .venv. `make demo` installs requirements-demo.lock, the other targets requirements.lock, which holds
# the same and more. What `make docs` and `make coverage` need in addition is in requirements-docs.lock.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CREATED := $(VENV)/.created
DEMO_STAMP := $(VENV)/.demo-installed
STAMP  := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.docs-installed
# Twice the cores that CI has: tests wait for processes and clocks a fifth of their time.
WORKERS ?= 4

# Tests start hundreds of processes, each of which would compile the sources anew.
unexport PYTHONDONTWRITEBYTECODE

# The pip of .venv, or that of $(PYTHON) while .venv has none: to unpack one takes seconds.
PIP = $(if $(shell test -x $(BIN)/pip && echo yes),$(BIN)/python -m pip,$(PYTHON) -m pip --python $(BIN)/python)
# Without --no-compile pip compiles every module, of which the demo imports a fraction.
PIP_INSTALL = $(PIP) install --quiet --disable-pip-version-check --no-deps --no-compile

.PHONY: demo test test-loaded test-cost coverage test-gpu docs docs-test thorough bench interleavings driver-wheel nvcc lock clean
.PHONY: sanitize check types lint formatting c-formatting spelling gauge layout format dist
.DEFAULT_GOAL := test

demo: $(DEMO_STAMP)
	$(BIN)/python examples/demo/demo.py

PYTEST := $(BIN)/python -m pytest
PARALLEL := -n $(WORKERS) --dist worksteal
# ROOM=kv runs the tests of one room.
TESTS = $(if $(ROOM),tests/$(ROOM))
QUICK := 'not slow and not timing'
# pytest ends with 5 if ARGS or ROOM select none of the tests.
OR_NONE := || test $$? -eq 5

test: $(STAMP)
	$(PYTEST) $(PARALLEL) -m $(QUICK) $(TESTS) $(ARGS)

# Timing tests have the machine to themselves; those that fail run once more. Random tests take all of their examples.
thorough: export EXAMPLES := all
thorough: test sanitize
	$(PYTEST) $(PARALLEL) -m 'slow and not timing' $(TESTS) $(ARGS) $(OR_NONE)
	$(PYTEST) -m timing $(TESTS) $(ARGS) $(OR_NONE) || $(PYTEST) -m timing --last-failed $(TESTS) $(ARGS)

# The driver layer under AddressSanitizer and UndefinedBehaviorSanitizer, with gcc. The compiler itself runs without the
# preloaded libraries. Python keeps memory until it exits, so leaks are not reported. Then random programs run with layer
# and worker under ThreadSanitizer.
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -O1

sanitize: export WARPWELL_CACHE_DIR = $(CURDIR)/build/sanitized
sanitize: $(STAMP)
	CFLAGS='$(SANITIZERS) -Werror' $(BIN)/python -m lab.driver.build
	CFLAGS='$(SANITIZERS)' ASAN_OPTIONS=detect_leaks=0:handle_segv=0 UBSAN_OPTIONS=print_stacktrace=1 \
	    LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libubsan.so)" \
	    $(PYTEST) $(PARALLEL) -m $(QUICK) tests/driver $(ARGS)
	$(PYTEST) -m slow tests/driver/test_driver_races.py $(ARGS)

test-loaded: $(STAMP)
	$(BIN)/python tools/busy.py 4 --times 3 -- $(MAKE) test

# CPU seconds of each test in build/test-cost.json; fails if a room exceeds its budget by a tenth. The compile cache
# starts empty, as in a clean clone.
test-cost: $(STAMP)
	rm -rf build/cost-cache
	WARPWELL_CACHE_DIR=$(CURDIR)/build/cost-cache $(PYTEST) $(PARALLEL) -m $(QUICK) --cost build/test-cost.json \
	    $(TESTS) $(ARGS)

coverage: $(DOCS_STAMP)
	$(PYTEST) $(PARALLEL) -m $(QUICK) --covered $(TESTS) $(ARGS)

# The Python blocks of all pages and the examples. `make test` runs a few of them.
docs-test: $(STAMP)
	$(PYTEST) $(PARALLEL) -m 'not gpu' tests/system/test_pages_cpu.py tests/system/test_pages_mpi.py \
	    tests/system/test_examples.py tests/system/test_demo.py $(ARGS)

# The site, in build/docs. Warnings are errors, broken links among them; nothing is loaded from a network.
docs: $(DOCS_STAMP)
	$(BIN)/python -m sphinx -q -W --keep-going -n -j auto -d build/doctrees -b html docs build/docs
	@echo build/docs/index.html

# On a machine with a GPU, whose Python has the packages of the extra "cuda".
test-gpu: $(STAMP)
	$(PYTEST) $(PARALLEL) -m 'gpu or ptx' $(TESTS) $(ARGS)

# All gates except the tests, two at a time. Every gate runs even if another one fails; make names those that fail.
check: $(STAMP)
	@$(MAKE) --no-print-directory --jobs 2 --keep-going --output-sync=target \
	    types gauge layout lint formatting c-formatting spelling

types: $(STAMP)
	$(BIN)/mypy

lint: $(STAMP)
	$(BIN)/ruff check .

formatting: $(STAMP)
	$(BIN)/ruff format --check .

C_FILES = git ls-files -z '*.c' '*.h' '*.cu'

c-formatting: $(STAMP)
	$(C_FILES) | xargs -0 $(BIN)/clang-format --dry-run --Werror

spelling: $(STAMP)
	git ls-files -z | xargs -0 $(BIN)/codespell

# Wording, and the subjects of the commits since main.
gauge: $(STAMP)
	$(BIN)/python tools/dialect.py --check

layout: $(STAMP)
	$(BIN)/python -m pytest -q $(wildcard tests/system/test_layout*.py tests/system/test_doors*.py tests/system/test_public*.py)

format: $(STAMP)
	$(BIN)/ruff format .
	$(C_FILES) | xargs -0 $(BIN)/clang-format -i

# Builds dist/ and checks it in a fresh environment.
dist: $(STAMP)
	$(BIN)/python tools/check_wheel.py

bench: $(STAMP)
	$(BIN)/python -m lab bench --all --quick $(ARGS)

interleavings: $(STAMP)
	$(BIN)/python -m lab campaign interleavings --runs 10000 $(ARGS)

# Layer and worker for machines without a C compiler. With the package ziglang in .venv, for glibc 2.17 and newer.
driver-wheel: $(STAMP)
	$(BIN)/python -m tools.driver_wheel dist

# NVIDIA's compiler for the tests of CUDA runtime programs, in a folder of its own: its packages must be of one release.
# The second --quiet: of several indexes, pip warns about each that does not have these packages.
nvcc: $(STAMP) build/nvcc/.installed

build/nvcc/.installed: requirements-nvcc.lock
	rm -rf build/nvcc
	$(PIP_INSTALL) --quiet --require-hashes --target build/nvcc -r requirements-nvcc.lock
	touch $@

$(CREATED):
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Warpwell needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -m pip --python $(BIN)/python --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip --default-pip
	touch $@

# The package itself is linked, not copied, so only a changed lock or project file builds again.
$(DEMO_STAMP): requirements-demo.lock pyproject.toml | $(CREATED)
	$(PIP_INSTALL) --require-hashes -r requirements-demo.lock
	$(PIP_INSTALL) --no-build-isolation -e .
	touch $@

# All modules are compiled, by all cores: tests treat warnings of the compiler as errors. It reports modules for other
# versions of Python, which no program imports.
$(STAMP): requirements.lock $(DEMO_STAMP)
	$(PIP_INSTALL) --require-hashes -r requirements.lock
	$(BIN)/python -m ensurepip --default-pip >/dev/null
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	touch $@

$(DOCS_STAMP): $(STAMP) requirements-docs.lock
	$(PIP_INSTALL) --require-hashes -r requirements-docs.lock
	touch $@

# Run with the oldest Python that is supported: what it resolves to installs on the newer ones too.
# The packages that both locks name have the same versions in both. Locked versions stay, unless UPGRADE=--upgrade.
PIP_COMPILE := build/lock/bin/pip-compile --quiet $(UPGRADE) --strip-extras --allow-unsafe --generate-hashes --no-header \
    --no-annotate --no-emit-index-url --no-emit-trusted-host --no-emit-find-links --no-emit-options

lock: build/lock/bin/pip-compile
	cp requirements.lock build/lock/resolved
	cp requirements-docs.lock build/lock/resolved-docs
	cp requirements-demo.lock build/lock/resolved-demo
	$(PIP_COMPILE) --extra test --extra build --output-file build/lock/resolved pyproject.toml
	grep -v -e '^#' -e '^warpwell @' build/lock/resolved > requirements.lock  # an extra that names others adds ourselves
	$(PIP_COMPILE) --extra docs --extra coverage --constraint requirements.lock --output-file build/lock/resolved-docs pyproject.toml
	grep -v '^#' build/lock/resolved-docs > requirements-docs.lock
	$(PIP_COMPILE) --extra demo --extra build --constraint requirements.lock --output-file build/lock/resolved-demo pyproject.toml
	grep -v -e '^#' -e '^warpwell @' build/lock/resolved-demo > requirements-demo.lock
	! grep -n '://' requirements.lock requirements-docs.lock requirements-demo.lock

build/lock/bin/pip-compile:
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet --disable-pip-version-check 'pip-tools>=7.5'

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
