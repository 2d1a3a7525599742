# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help install demo test test-faults lint types unit format clean

help:
	@echo "make demo    install, train a memory agent, evaluate it, leave a picture (about 6 minutes on two cores)"
	@echo "make test    install, then everything that CI runs: format, lint, types, tests"
	@echo "make test-faults  the tests of faults with their full counts (AMAGO_FAULTS_SEED=N repeats a run)"
	@echo "make format  put the code into its standard form"

install: $(STAMP)

# torch comes first and by its pinned version: any other request may download gigabytes of CUDA
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)

demo: install
	$(BIN)/amago demo --out demo_out

test: lint types unit

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: install
	$(BIN)/mypy

unit: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test-faults: install
	AMAGO_FAULTS=long OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/faults -s

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis demo_out
