# Everything runs from a fresh clone: each target sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo slurm-demo test test-pyslurm lint bench clean slurm-packages

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

test: $(STAMP) slurm-packages
	$(BIN)/python -m pytest

# The real pyslurm against a real Slurm 26.05, in a root of its own: needs root and minutes, so CI leaves it out.
test-pyslurm: $(STAMP)
	slurm/pyslurm-root.sh

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python benchmarks/request_roundtrips.py
	$(BIN)/python benchmarks/policy_cycle.py

clean:
	rm -rf $(VENV) report .mypy_cache .ruff_cache .pytest_cache .hypothesis
