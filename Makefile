# maingrad: `make train` and `make test` need nothing but Python 3.11+ and a network for the first run.
#
#   make train      train a byte-level GPT on two CPU processes; pictures and metrics land in runs/
#   make test       the tests (three workers on two cores); samples of large matrices; of long tests another twelfth with
#                   each commit (TURN=0/1: all of them)
#   make test-all   slow tests too, and property tests at full counts
#   make test-newest  the quick start and a sample of the tests, with the newest versions that pip gives
#   make fuzz       programs as users write them, beside plain PyTorch: SECONDS=600, SEEDS=0:100, or SEED=1234 to replay one
#   make faults     bring each known fault back; its tests must notice (ARGS="--only 34" or "--share 0/6": some of them)
#   make check      ruff, mypy (--strict on the library), import direction, the site without warnings
#   make docs       the site alone, in .build/site
#   make test-gpu   the tests marked gpu
#   make bench      one benchmark, of gradient accumulation; docs/benchmarks/README.md lists all
#   make clean      remove everything that make made, but the runs
#
# VENV=none uses $(PYTHON) and what is installed there, and installs nothing.

PYTHON ?= python3
VENV ?= .venv
# Cores for tests, fuzzing and faults.
WORKERS ?= 2
CONFIG ?= launch/configs/stdlib.toml
RANKS ?= 2
# Long tests run in turn: their K-th of N parts. .ci/run brings the same share of the known faults back.
TURN ?= $(shell git rev-list --count HEAD 2>/dev/null || echo 0)/12
# Keeps the environments of make test-newest.
NEWEST ?= .build/newest

SECONDS ?= 60
FUZZED = $(if $(SEED),--seed $(SEED),$(if $(SEEDS),--seeds $(SEEDS),--seconds $(SECONDS)))

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

# Without it, python -m puts this folder first on the path and a third-party `import kernels` would find ours.
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Ranks and test workers are processes: one thread each, unless told otherwise.
export OMP_NUM_THREADS ?= 1

BUILD := .build
LINK := $(BUILD)/maingrad

ifeq ($(VENV),none)
PY := $(PYTHON)
# The package is imported through a link of its own name, whatever the checkout is called.
export PYTHONPATH := $(CURDIR)/$(BUILD)$(if $(PYTHONPATH),:$(PYTHONPATH))
installed = $(LINK)
else
PY := $(VENV)/bin/python
installed = $(VENV)/.installed-$(1)
endif

# Tests that say nothing of devices, and hold on a GPU as well. Two make tensors on the CPU by name, or in a thread of
# autograd's, where --made-on does not reach.
ALSO_ON_GPU := ddp/contract/test_contract_faults.py ddp/contract/test_return_table.py te_integration/dense/test_delayed_modules.py \
	te_integration/delayed/test_delayed_wgrad.py ddp/contract/test_foreign_delayed.py te_integration/dense/test_module_faults.py \
	te_integration/experts/test_grouped_linear_contract.py \
	te_integration/dense/test_return_table_modules.py te_integration/dense/test_saved_tensor_hooks.py
# Every link and anchor must lead somewhere: --strict. About ten seconds.
SITE = NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet -f docs/mkdocs.yml

ONLY_ON_CPU := recomputes_itself_inside and not copies_and_materialised

.PHONY: train test test-all test-newest fuzz faults check docs test-gpu bench clean
.DEFAULT_GOAL := test

train: $(call installed,launch)
	$(PY) -m torch.distributed.run --standalone --nproc-per-node $(RANKS) -m maingrad train $(CONFIG) $(ARGS)

# One worker more than cores: a quarter of the time of tests is waiting, for a timeout or for a process that starts.
# Compiled modules are kept, or each of the processes compiles the library anew.
PYTEST = PYTHONDONTWRITEBYTECODE= $(PY) -m pytest
PARALLEL = -n $$(($(WORKERS) + 1)) --dist worksteal

# Rewriting all assertions takes each worker a tenth of the time: only what failed is run with them.
test: $(call installed,test)
	$(PYTEST) $(PARALLEL) -m "not slow and not gpu" --turn $(TURN) --assert=plain $(ARGS) || { \
		echo "make test: once more what failed, with the values that were compared"; \
		$(PYTEST) --last-failed --last-failed-no-failures none $(ARGS); exit 1; }

test-all: $(call installed,test)
	$(PYTEST) $(PARALLEL) -m "not gpu" --hypothesis-profile=full --timeout 1800 $(ARGS)

test-newest:
	$(PYTHON) .ci/newest.py $(NEWEST)

test-gpu: $(call installed,test)
	@$(PY) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "make test-gpu: torch sees no CUDA device")'
	$(PY) -m pytest -m gpu $(ARGS)
	$(PY) -m pytest --made-on cuda -m "not gpu" $(addprefix tests/,$(ALSO_ON_GPU)) -k "not $(ONLY_ON_CPU)" $(ARGS)

fuzz: $(call installed,test)
	$(PY) tests/fuzz $(FUZZED) --workers $(WORKERS) $(ARGS)

faults: $(call installed,test)
	$(PY) tests/faults/run.py --jobs $(WORKERS) $(ARGS)

bench: $(call installed,launch)
	PYTHONSAFEPATH= $(PY) docs/benchmarks/accumulation.py $(ARGS)

# Linters see the package through a link named maingrad: they derive module names from folders.
check: $(call installed,dev) $(LINK)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	MYPYPATH=$(BUILD) $(PY) -m mypy $(foreach room,kernels ddp te_integration fsdp launch,-p maingrad.$(room))
	MYPYPATH=$(BUILD):docs/benchmarks $(PY) -m mypy $(patsubst docs/benchmarks/%.py,-m %,$(wildcard docs/benchmarks/*.py))
	PYTHONPATH=$(BUILD) $(PY) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()' --no-logo
	$(SITE)

docs: $(call installed,docs)
	$(SITE)

clean:
	rm -rf $(BUILD) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	$(if $(filter-out none,$(VENV)),test ! -e $(VENV)/.made-by-make || rm -rf $(VENV))
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

$(LINK):
	@mkdir -p $(BUILD)
	@ln -sfn .. $@

# Environment: a stamp per extra, renewed when pyproject.toml changes.
ifneq ($(VENV),none)
$(VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null || { \
		echo "make: found no $(PYTHON); name a Python 3.11 or newer: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make: $(PYTHON) is $$($(PYTHON) -V 2>&1), maingrad needs 3.11 or newer: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $(VENV)/.made-by-make

# The pins of pyproject.toml as a pip constraints file. A torch that is there already stays as it is, and its Triton.
$(VENV)/constraints.txt: pyproject.toml | $(VENV)/bin/python
	@$(PY) -c 'import importlib.util, tomllib; \
	pins = tomllib.load(open("pyproject.toml", "rb"))["tool"]["uv"]["constraint-dependencies"]; \
	own = tuple(f"{name}==" for name in ("torch", "triton") if importlib.util.find_spec(name)); \
	print(*(pin for pin in pins if not (own and pin.startswith(own))), sep="\n")' > $@

$(VENV)/.installed-tools: $(VENV)/constraints.txt
	$(PY) -m pip install -qq --upgrade pip
	$(PY) -m pip install -qq --constraint $< setuptools
	@touch $@

$(VENV)/.installed-%: $(VENV)/.installed-tools
	$(PY) -m pip install -qq --no-build-isolation --constraint $(VENV)/constraints.txt -e '.[$*]'
	@touch $@
endif
