# `make serve` and `make test` set up .venv first. PYTHON picks the interpreter, ARGS are passed on:
#   make serve ARGS="--port 9000 --max-num-seqs 32"
#   make test ARGS="tests/pagewire -x"
# Tests run in three processes, as many of them wait; a file runs in one of them. WORKERS=0 runs them in one process.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --disable-pip-version-check
# Without NVIDIA's driver, torch's CPU build is enough; an index in the environment is taken as the choice.
NVIDIA := $(wildcard /proc/driver/nvidia/version /dev/nvidiactl /dev/dxg)
TORCH_INDEX ?= $(if $(NVIDIA)$(PIP_INDEX_URL)$(PIP_EXTRA_INDEX_URL),,https://download.pytorch.org/whl/cpu)
ARGS ?=
WORKERS ?= 3
# Containers often set it. Tests start hundreds of processes, each of which would compile our modules again.
unexport PYTHONDONTWRITEBYTECODE
# Files are taken in the order of tests/sweep.py: those that compute and those that wait in turn.
SHARED := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: help setup serve test test-all check chaos lint docs options protos clean

help:
	@echo "make serve       set up and start the whole stack on the built-in model"
	@echo "make test        set up and run the test suite"
	@echo "make test-all    the test suite and the full sweeps that it leaves out"
	@echo "make check PATH  the tests that belong to a file or folder: make check services/scheduler/core"
	@echo "make chaos       failures, fuzzing and a soak over whole stacks, for an hour or so"
	@echo "make lint        formatting, lint, types, protos, prose, rooms"
	@echo "make docs        generate docs/api.md, docs/models.md and docs/from-vllm.md"
	@echo "make options     regenerate the Python types of the sampling parameters"
	@echo "make protos      regenerate the gRPC stubs"
	@echo "make clean       remove .venv and caches"

setup: $(READY)

# torch comes first and by its exact version: pip then keeps what it finds, the CUDA build or the CPU build.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),@echo "torch's CPU build (200 MB, $(TORCH_INDEX)): there is no NVIDIA driver here. make TORCH_INDEX= takes the CUDA build (3 GB).")
	$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==2.13.0
	$(PIP) -e ".[dev]"
	touch $(READY)

# What follows `check` are paths, not targets, even where a folder has the name of one.
ifeq (check,$(firstword $(MAKECMDGOALS)))
CHECKED := $(wordlist 2,$(words $(MAKECMDGOALS)),$(MAKECMDGOALS))
.PHONY: $(CHECKED)
$(CHECKED):
	@:

check: $(READY)
	@tests=$$($(BIN)/python -m tests.house.check $(CHECKED)) && \
		echo "$$tests" && PAGEWIRE_EVERY_CASE=1 $(BIN)/python -m pytest $$tests $(ARGS)

else

serve: $(READY)
	@exec $(BIN)/pagewire serve $(ARGS)

# What tests/house says of the text of the code is lint.
test: $(READY)
	$(BIN)/python -m pytest $(SHARED) $(if $(findstring tests/house,$(ARGS)),,--ignore tests/house) $(ARGS)

test-all: $(READY)
	PAGEWIRE_TEST_ALL=1 $(BIN)/python -m pytest $(SHARED) -m "" $(ARGS)

# Lengths by flags: make chaos ARGS="--schedules 20 --model-schedules 2 --soak-minutes 1"
chaos: $(READY)
	$(BIN)/python -m tests.chaos $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/buf lint
	! grep -rnE '^.{121,}' kernels/cpu/csrc
	$(BIN)/python -m pytest tests/house

docs: $(READY)
	$(BIN)/python -m pagewire.gateway.api_table > docs/api.md
	$(BIN)/python -m pagewire.services.executor.models.registry.table docs/models.json > docs/models.md
	$(BIN)/python -m pagewire.flags.vllm_flags_page > docs/from-vllm.md

options: $(READY)
	$(BIN)/python -m pagewire.config.sampling_code > pagewire/wire/sampling_options.py

protos: $(READY)
	$(BIN)/python -m grpc_tools.protoc -I protos --python_out=protos --pyi_out=protos --grpc_python_out=protos protos/pagewire/v1/*.proto

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

endif
