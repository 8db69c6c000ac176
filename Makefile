# Everything runs from a fresh clone: each target sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo slurm-demo vllm-demo test test-pyslurm vllm-setup lint bench clean slurm-packages

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "hybridsched needs Python 3.11 or later, this is %d.%d: set PYTHON=" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/hybridsched demo

# The same through a private Slurm of real daemons with fake GPUs.
slurm-demo: $(STAMP) slurm-packages
	$(BIN)/hybridsched demo --slurm

# Slurm's own daemons, for the tests against the real thing; Debian and Ubuntu. Elsewhere install them yourself.
SLURM_PACKAGES := slurmctld slurmd slurm-client munge slurm-wlm-basic-plugins
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)

slurm-packages:
	@if command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null; then :; \
	elif command -v apt-get >/dev/null; then \
	  $(SUDO) apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive $(SUDO) apt-get install -y -qq --no-install-recommends $(SLURM_PACKAGES); \
	else echo "Slurm is not installed and there is no apt-get: tests against real daemons will be skipped." >&2; fi

# The real vLLM (CPU build, 1.8 GB) for the tests against it, in an environment of its own that is kept.
# HYBRIDSCHED_VLLM_VENV names one that is there already.
VLLM_VENV := $(or $(HYBRIDSCHED_VLLM_VENV),.venv-vllm)
VLLM_STAMP := $(VLLM_VENV)/.installed

vllm-setup: $(VLLM_STAMP)

$(VLLM_STAMP): tests/vllm/requirements.txt tests/vllm/setup.sh
	PYTHON=$(PYTHON) tests/vllm/setup.sh $(VLLM_VENV)
	touch $(VLLM_STAMP)

# The main job on two real vLLM engines, on the CPU: about four minutes, the set-up included. One thread an engine, for
# more of them only get in each other's way beside the workers.
VLLM_DEMO_MODEL := $(VENV)/vllm-demo-model
VLLM_DEMO_ENV := HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 OMP_NUM_THREADS=1 \
  VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0

vllm-demo: $(STAMP) $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python tests/vllm/tiny_model.py $(VLLM_DEMO_MODEL) grouped-query --text
	$(VLLM_DEMO_ENV) $(BIN)/hybridsched demo --engine vllm --vllm $(VLLM_VENV)/bin/vllm --model $(VLLM_DEMO_MODEL) \
	  --finish -- --dtype float32 --enforce-eager --distributed-executor-backend uni

# Three side by side, for they mostly wait (TEST_WORKERS=0: one after the other); tests/dealing.py deals them
# out. One file, or one test: .venv/bin/python -m pytest tests/unit/test_core_gate.py
TEST_WORKERS ?= 3

# Under CI=true the real vLLM has to be there; elsewhere its tests are skipped until `make vllm-setup` has run.
test: $(STAMP) slurm-packages $(if $(filter true,$(CI)),vllm-setup)
	$(BIN)/python -m pytest -n $(TEST_WORKERS)

# The real pyslurm against a real Slurm 26.05, in a root of its own: needs root and minutes, so CI leaves it out.
test-pyslurm: $(STAMP)
	slurm/pyslurm-root.sh

# Breaks the core on purpose, one invariant at a time: the tests must notice each. Minutes, so CI leaves it out.
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python benchmarks/request_roundtrips.py
	$(BIN)/python benchmarks/policy_cycle.py
	$(BIN)/python benchmarks/twin_engine.py
	$(BIN)/python benchmarks/twin_pool.py

clean:
	rm -rf $(VENV) .venv-vllm report .mypy_cache .ruff_cache .pytest_cache .hypothesis
