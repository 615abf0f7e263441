# Everything runs in .venv, which any target makes and fills when it is missing or older than its sources.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.filled
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PROTOS := $(wildcard protos/lorafleet/v1/*.proto)

.DEFAULT_GOAL := help
.PHONY: help map demo test test-fast crash cancels rotation elastic leavers chaos fuzz bystander fairness constraints simulate check format lint types contracts stubs wire-baseline bills soak

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | awk -F'|' '{printf "  make %-14s %s\n", $$1, $$2}'

map:  ## show every folder and file, and what each says of itself
	@$(PYTHON) -m tests.contracts.house

demo: $(STAMP)  ## serve a real model with real adapters on this machine and stream from all of them at once
	@$(BIN)/python -m lorafleet demo $(DEMO_ARGS)

# One worker more than cores, since some tests wait; most have services beside them.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(4, 1 + (os.cpu_count() or 1)))')
PYTEST := $(BIN)/python -m pytest -m "not gpu" --dist loadfile --no-loadscope-reorder

test: $(STAMP)  ## run the test suite
	$(PYTEST) --numprocesses $(WORKERS) $(TEST_ARGS)

FAST := tests/contracts $(addprefix tests/unit/,adapter_store lorafleet scheduler) \
	$(addprefix tests/unit/executor/,batch models step)
# Running services, a whole model, and what kills or races processes.
NOT_FAST := tests/contracts/test_readme.py::test_the_python_example_runs tests/unit/lorafleet/test_demo_model.py \
	$(addprefix tests/unit/adapter_store/,disk_store/test_crash.py redis_store test_migration.py test_races.py) \
	tests/unit/scheduler/dispatch/test_two_schedulers.py

test-fast: $(STAMP)  ## run contracts and units that need no service, model or GPU kernel: under two minutes
	$(PYTEST) --numprocesses $(WORKERS) $(FAST) $(addprefix --deselect ,$(NOT_FAST)) $(TEST_ARGS)

crash: $(STAMP)  ## kill -9 at 200 random moments of each kind of change of a store, in a folder and in Redis
	$(BIN)/python -m tests.support.stores.store_crashes --json tests/faults/results/store_crashes.json $(CRASH_ARGS)

cancels: $(STAMP)  ## 10,000 quick cancels through real services: nothing stays behind, memory neither
	NUM_CANCELS=10000 $(BIN)/python -m pytest --timeout 1800 tests/integration/test_cancellation.py -k quick_cancels

rotation: $(STAMP)  ## renew certificates, tokens and keys of JSON web tokens under 200 streams: none breaks
	$(BIN)/python -m tests.support.chaos.rotation --json tests/faults/results/rotation.json $(ROTATION_ARGS)

elastic: $(STAMP)  ## 1, 4 and 2 executors by DNS and by a file under 200 streams: none is lost
	$(BIN)/python -m tests.support.chaos.elastic --json tests/faults/results/elastic.json $(ELASTIC_ARGS)

bills: $(STAMP)  ## 15 minutes of killed services, full disks and a lost Redis: each answer has its usage record
	$(BIN)/python -m tests.support.chaos.bills --json tests/faults/results/bills.json $(BILLS_ARGS)

leavers: $(STAMP)  ## RSS after 50,000 cancelled requests, and 20,000 calls whose channel or process goes (MODEL=folder)
	$(BIN)/python -m scheduler.bench.leavers --model $(MODEL) --json scheduler/bench/results/leavers.json

chaos: $(STAMP)  ## kill, freeze and drain real services for half an hour, under traffic with known answers
	CHAOS_SECONDS=900 CHAOS_SEED=$$(date +%s) $(BIN)/python -m pytest --timeout 1800 tests/faults/test_chaos.py -s $(TEST_ARGS)
	$(BIN)/python -m tests.support.chaos.pauses --json tests/faults/results/pauses.json $(PAUSES_ARGS)

soak: $(STAMP)  ## twenty minutes of mixed traffic and churn: memory, threads, descriptors and spool must stay flat
	$(BIN)/python -m tests.support.soak --minutes 20 --ledger --quotas --json tests/faults/results/soak.json $(SOAK_ARGS)

fuzz: $(STAMP)  ## hostile clients against real services for seven minutes, and an honest tenant beside them
	$(BIN)/python -m tests.support.flood.run --json tests/faults/results/flood.json $(FUZZ_ARGS)
	$(BIN)/python -m tests.support.flood.run --tenant --json tests/faults/results/flood-tenant.json $(FUZZ_ARGS)

bystander: $(STAMP)  ## tenants who take all that is shared for two minutes, and one beside them who must feel nothing
	$(BIN)/python -m tests.support.flood.bystander --json tests/faults/results/bystander.json $(BYSTANDER_ARGS)

fairness: $(STAMP)  ## a tenant at ten times its quota beside an honest one, whose first tokens must come as before
	$(BIN)/python -m tests.support.flood.fairness --json tests/faults/results/fairness.json $(FAIRNESS_ARGS)

constraints: $(STAMP)  ## answers that fit 1,000 random schemas and a folder's (SUITE=), and streams beside hostile ones
	$(BIN)/python -m tests.support.constrained --json tests/fidelity/results/constraints.json $(if $(SUITE),--suite $(SUITE)) $(CONSTRAINTS_ARGS)
	$(BIN)/python -m tests.support.constrained.gaps --json tests/faults/results/constraints.json

simulate: $(STAMP)  ## ten minutes of 100 executors and 100,000 adapters at 1,000 requests/s, on virtual time
	$(BIN)/python -m scheduler.simulate large --json scheduler/simulate/results/large.json $(SIMULATE_ARGS)

check: format lint types contracts test  ## what CI runs: format, lint, types, import contracts, tests

format: $(STAMP)
	$(BIN)/ruff format --check .

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

contracts: $(STAMP)
	$(BIN)/lint-imports

stubs: $(STAMP)  ## write lorafleet/v1/*_pb2* anew from protos/
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

wire-baseline: $(STAMP)  ## let the compatibility test hold what the protos say now
	$(BIN)/python -m grpc_tools.protoc -Iprotos --descriptor_set_out=protos/baseline.binpb $(PROTOS)

# torch first and by itself: its pin decides which build pip picks.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "LoraFleet needs Python 3.11 or later, for example: make PYTHON=python3.12 ...")'
	@echo "filling .venv (a few minutes the first time)"
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) --editable '.[dev]'
	@touch $@
