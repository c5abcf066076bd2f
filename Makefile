# Two commands do all set-up on a machine with Python 3.11, git and make:
#   make demo   the main job: a GRPO run whose kernel launches are tuned
#   make test   lint, types, layers, and every test that needs no GPU
# PYTHON=python3.12 picks another interpreter; VENV=off uses the one on the PATH as it is (a GPU machine's own torch).

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
TRITON := triton==3.9.0
WORKERS ?= 2
OUT ?= artifacts/demo

ifeq ($(VENV),off)
RUN := python3
PYTEST := python3 -m pytest
LINT_IMPORTS := lint-imports
READY :=
else
RUN := $(VENV)/bin/python
PYTEST := $(VENV)/bin/python -m pytest --timeout=180
LINT_IMPORTS := $(VENV)/bin/lint-imports
READY := $(VENV)/.ready
endif

.PHONY: demo test check lint-imports test-core test-reliability fuzz test-offline test-interpreted test-gpu format clean

demo: $(READY)
	$(RUN) -m benchmarks.training.grpo --demo --out $(OUT)

test: check test-core test-reliability test-offline test-interpreted

check: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(LINT_IMPORTS)
	$(RUN) -m codespell_lib .

lint-imports: $(READY)
	$(LINT_IMPORTS)

test-core: $(READY)  ## the tuner, the registry, the command line, the main job: no Triton kernel runs here
	rm -f .coverage .coverage.*
	$(PYTEST) tests/platforms tests/runtime tests/benchmarks --cov --cov-report=term --max-skipped 10

test-reliability: $(READY)  ## faults, kills, many processes, hostile files
	$(PYTEST) tests/reliability --max-skipped 10

fuzz: $(READY)  ## hostile records for ten minutes
	$(RUN) -m tests.reliability.fuzz --seconds 600

test-offline: $(READY)  ## kernels compiled for five architectures, none of them here
	$(PYTEST) tests/build -n $(WORKERS) --max-skipped 0

test-interpreted: $(READY)  ## kernels run by Triton's interpreter; it reads the variable at decoration: own process
	TRITON_INTERPRET=1 $(PYTEST) tests/ops -n $(WORKERS) --max-skipped 128

test-gpu:  ## on a machine with a GPU and its own torch and Triton: make test-gpu VENV=off
	RL_KERNEL_AUTOTUNE=0 $(PYTEST) tests/ops tests/platforms tests/runtime
	RL_KERNEL_AUTOTUNE=1 RL_KERNEL_AUTOTUNE_CACHE_DIR=$$(mktemp -d) $(PYTEST) tests/ops

format: $(READY)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean:
	rm -rf .venv artifacts .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

# torch first; Triton only if torch did not bring its own (CUDA builds do); then the rest, and this package.
$(VENV)/.ready: requirements-dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' requirements-dev.txt)"
	$(RUN) -c "import triton" 2>/dev/null || $(RUN) -m pip install --quiet --disable-pip-version-check $(TRITON)
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	touch $@
