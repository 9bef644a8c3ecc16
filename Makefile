# make demo | test | lint | bench | simulate | fuzz | chaos | soak | clean
# The first of them makes .venv and installs the versions of constraints.txt; after that it costs nothing.
#   PYTHON=python3.12              another interpreter for a new .venv
#   PIP_FLAGS='--extra-index-url https://download.pytorch.org/whl/cpu'    torch without the CUDA libraries
#   ARGS='-k protocol -x'          passed on by demo, test, simulate, fuzz, chaos and soak

PYTHON ?= python3
PIP_FLAGS ?=
ARGS ?=
WORKERS ?= 4
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_FLAGS) -c constraints.txt
INSTALLED := $(VENV)/.installed
TOO_OLD := Triptych needs Python 3.10 or newer, and %s is %d.%d: delete .venv, if it is there, and make demo PYTHON=python3.12
IS_NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 10) and "$(TOO_OLD)" % ((sys.executable,) + sys.version_info[:2]))

.PHONY: demo test lint bench simulate fuzz chaos soak clean

demo: $(INSTALLED)
	$(BIN)/python -m triptych.launch.demo $(ARGS)

# Bytecode is kept: hundreds of processes start, and without it each compiles every file anew.
test: export PYTHONDONTWRITEBYTECODE =
test: export HF_HUB_OFFLINE = 1
test: export TOKENIZERS_PARALLELISM = false
test: $(INSTALLED)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --reruns 2 $(ARGS)

# mypy at the same time as the oldest Python, which may lack what the package uses (much of a newer numpy is Any there).
lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy & this=$$!; $(BIN)/mypy --python-version 3.10 --disable-error-code no-any-return triptych; oldest=$$?; \
	  wait $$this && exit $$oldest

# One JSON line each; a script that fails does not keep the others from running, but the exit code tells.
# TRIPTYCH_PEERS=DIR: other engines to compare with, see benchmarks/peers/README.md
bench: $(INSTALLED)
	@failed=0; for script in benchmarks/peers $$(grep -l __main__ benchmarks/*.py); do $(BIN)/python $$script || failed=1; done; \
	  exit $$failed

# One JSON line; ARGS='--seeds 100000' before a release, ARGS='--seed 7' to see a run.
simulate: $(INSTALLED)
	$(BIN)/python -m tests.simulation $(ARGS)

fuzz: $(INSTALLED)
	$(BIN)/python -m tests.fuzz.fuzz $(ARGS)

# Kills of every process under load, with an oracle: ARGS='--seconds 1800', '--model demo --backend native --dtype bfloat16'
chaos: $(INSTALLED)
	$(BIN)/python benchmarks/chaos $(ARGS)

# 50,000 requests; the memory of each process must stay flat
soak: $(INSTALLED)
	$(BIN)/python benchmarks/chaos/soak.py $(ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis $(INSTALLED)
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

# Without build isolation, so that the setuptools that builds is the pinned one too.
$(INSTALLED): pyproject.toml constraints.txt
	@test -x $(BIN)/pip || $(PYTHON) -c '$(IS_NEW_ENOUGH)'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c '$(IS_NEW_ENOUGH)'
	$(PIP) setuptools
	$(PIP) --no-build-isolation -e '.[dev]'
	touch $@
