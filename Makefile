# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

RAY := .venv-ray
RAY_STAMP := $(RAY)/.installed

ENVS := .venv-envs
ENVS_STAMP := $(ENVS)/.installed
SHOWDOWN := tools/showdown/node_modules/.package-lock.json

# else each of the hundreds of processes of the tests compiles the library anew
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo test test-long test-faults test-gpu test-sim test-envs test-ray qt showdown bench lint types unit format clean

help:
	@echo "make demo    install, train a memory agent, evaluate it, leave a picture (about 6 minutes on two cores)"
	@echo "make test    install, then format, lint, types, docs and all but the slow tests, the first half of CI"
	@echo "make test-long    what is slow, which CI also runs: launches, faults, programs of users and of the docs, learning runs"
	@echo "make docs    build the docs site into site/"
	@echo "make test-faults  the tests of faults with their full counts (AMAGO_FAULTS_SEED=N repeats a run)"
	@echo "make test-gpu     the tests of the CPU on a CUDA device; elsewhere they are skipped"
	@echo "make test-sim     the same on a simulated device, where its sources are to be had"
	@echo "make test-envs    the benchmarks of docs/benchmarks.md and the examples, in an environment of their own with every package (2.5 GB more)"
	@echo "make test-ray     collectors on many machines: clusters of several nodes, buckets and ssh on this one, in an environment of their own"
	@echo "make showdown     the battle server of examples/15_pokemon.py, from npm (Node.js 20 or later)"
	@echo "make bench   how fast each part is, as a share of what the machine could do (30 minutes; keep the machine quiet)"
	@echo "make format  put the code into its standard form"

install: $(STAMP)

# modules are compiled when they are first imported, but for those of PyTorch, which each of several processes would compile at once
INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile

# torch comes first and by its pinned version: any other request may download gigabytes of CUDA
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) --constraint constraints.txt torch==2.13.0
	$(BIN)/python $(INSTALL) --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -W ignore -m compileall -qq -j 0 $(VENV)/lib/python3*/site-packages/torch $(VENV)/lib/python3*/site-packages/sympy || true
	@touch $(STAMP)

demo: install
	$(BIN)/amago demo --out demo_out

test: lint types unit

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: install
	$(BIN)/mypy

.PHONY: docs
# every warning is an error; nothing is fetched. The variable silences Material's notice about MkDocs 2
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# more workers than cores, since many tests wait, the slow ones most of all

# slow by nature: launches of several processes, kills and hangs, users' programs in processes of their own, learning runs, notebooks; the longest
# tests first, so that no worker is left with one at the end
LONG := tests/test_learning.py tests/run/test_compiled_parity.py tests/test_other_systems.py tests/run/test_ranks.py tests/faults tests/launch \
  tests/docs/test_notebooks.py tests/docs/test_docs.py tests/docs/test_results.py tests/clients tests/bench

# without tests/examples, all of which test-envs runs
unit: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal $(LONG:%=--ignore=%) --ignore=tests/examples

test-long: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --dist worksteal $(LONG)

test-gpu: install
	$(BIN)/python -m pytest -m gpu tests/gpu

# the tests of the GPU on a simulated one (`$AMAGO_SIMCUDA`, with g++): devices, copies and control flow are a GPU's, numerics a CPU's
AMAGO_SIMCUDA ?= ../shared/simcuda

test-sim: install
	@if [ ! -d "$(AMAGO_SIMCUDA)" ]; then echo "skipped: no simulated device in $(AMAGO_SIMCUDA)"; \
	elif ! command -v g++ > /dev/null; then echo "skipped: the simulated device needs g++"; \
	else PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$(AMAGO_SIMCUDA)/..:$(AMAGO_SIMCUDA)" OMP_NUM_THREADS=1 \
	  $(BIN)/python -m pytest -n 3 -p pytest_simcuda -m gpu tests/gpu; fi

test-faults: install
	AMAGO_FAULTS=long OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/faults tests/launch -s

# what is in the first environment is seen from here, and not installed twice
$(ENVS_STAMP): $(STAMP)
	$(PYTHON) -m venv $(ENVS)
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > "$$($(ENVS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/first.pth"
	$(ENVS)/bin/python $(INSTALL) --constraint constraints.txt --editable '.[dev,envs]' sb3-contrib
	@touch $(ENVS_STAMP)

# Procgen (EnvPool) links Qt 5, which pip cannot bring; the names are those of Debian 12
QT := libqt5core5a libqt5gui5

qt:
	@ldconfig -p | grep -q 'libQt5Gui\.so\.5' && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends $(QT); \
	else \
	  echo "Procgen needs the library libQt5Gui.so.5. Debian and Ubuntu, as root: apt-get install $(QT)"; exit 1; \
	fi

showdown: $(SHOWDOWN)

# no install scripts: they would fetch binaries that the server does without
$(SHOWDOWN): tools/showdown/package.json tools/showdown/package-lock.json
	@command -v npm > /dev/null || { echo "npm is missing; Debian: apt-get install nodejs npm"; exit 1; }
	npm ci --prefix tools/showdown --omit=optional --ignore-scripts --no-audit --no-fund
	@touch $@

test-envs: $(ENVS_STAMP) $(SHOWDOWN) qt
	OMP_NUM_THREADS=1 $(ENVS)/bin/python -m pytest -n 3 --dist worksteal tests/envs_extra tests/examples tests/clients/test_old_tutorial.py

$(RAY_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python $(INSTALL) --constraint constraints.txt torch==2.13.0
	$(RAY)/bin/python $(INSTALL) --constraint constraints.txt --editable '.[dev,ray,sftp]'
# without the constraints, since botocore needs an older python-dateutil
	$(RAY)/bin/python $(INSTALL) s3fs==2026.9.0 moto==5.2.5 boto3==1.43.117 botocore==1.43.117 flask flask-cors
	@touch $(RAY_STAMP)

test-ray: $(RAY_STAMP)
	OMP_NUM_THREADS=1 $(RAY)/bin/python -m pytest tests/ray_cluster tests/launch/test_bundles.py tests/launch/test_links.py

bench: install
	$(BIN)/python -m benchmarks all

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(ENVS) $(RAY) tools/showdown/node_modules build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis demo_out site
