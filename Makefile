# One word per job. Each sets up .venv first, once, and again when pyproject.toml or constraints.txt changed.

VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
BENCH  := $(VENV)/.installed-bench
# --no-compile: byte-compiling all of torch and its company takes longer than the rest of the installation,
# and Python compiles what it imports anyway.
PIP    := $(PY) -m pip install --disable-pip-version-check --no-compile --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format bench docs clean

help:  ## show these words
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1	\2/p' Makefile

setup: $(STAMP)  ## make .venv and install what development needs

demo: $(STAMP)  ## train on real data in a mocked S3: cold, warm, killed and resumed
	$(PY) entrypoints/launch.py demo

test: $(STAMP)  ## run the whole test suite
	$(PY) -m pytest --numprocesses=2 --dist=loadfile

lint: $(STAMP)  ## check style, types and layers
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(VENV)/bin/lint-imports --no-logo

format: $(STAMP)  ## rewrite the style faults that ruff can mend
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

bench: $(BENCH)  ## measure against WebDataset and LitData (ARGS="--help" tells the options)
	$(PY) -m benchmarks.run $(ARGS)

docs: $(STAMP)  ## run every example of README.md and follow the links between the documents
	$(PY) -m pytest tests/test_readme.py tests/test_house.py -k "readme or documents"

clean:  ## remove .venv and everything that was made here
	rm -rf $(VENV) build dist runs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# The constraints' own Python comes first; PYTHON=/path/to/python decides otherwise.
$(STAMP): pyproject.toml constraints.txt
	@for python in $(PYTHON) python3.11 python3.12 python3.13 python3.14 python3 python; do \
	  if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    $(PY) -m pip --version >/dev/null 2>&1 || "$$python" -m venv --clear $(VENV) || exit 1; \
	    exit 0; \
	  fi; \
	done; \
	echo "make: no Python 3.11 or newer with the venv and ensurepip modules found in PATH." >&2; \
	echo "      Install one (Debian, Ubuntu: python3 and python3-venv), or name it: make PYTHON=/path/to/python3.11" >&2; \
	exit 1
	$(PIP) --editable '.[dev]'
	@touch $@

$(BENCH): $(STAMP)
	$(PIP) --editable '.[dev,bench]'
	@touch $@
