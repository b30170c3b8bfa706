# make demo | demo-pp | test | test-full | mutate | lint | aot | bench | cluster-bench | clean
#
# Every target first builds .venv with the versions of constraints.txt, where it is missing or
# older than pyproject.toml or constraints.txt. PYTHON chooses the interpreter it is built from.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TRITON_36 := $(VENV)/triton36
DEMO := recipes/demo.tp2cp1dp2pp1-etp1ep4edp1.yaml
DEMO_PP := recipes/demo-pp.tp2cp1dp1pp2-etp1ep2edp1.yaml
SOURCES := lightning_fold kernels tests benchmarks recipes
TEXTS := docs README.md ARCHITECTURE.md CHANGELOG.md pyproject.toml constraints.txt Makefile .ci/run

.DEFAULT_GOAL := test
.PHONY: demo demo-pp test test-full mutate lint aot bench cluster-bench clean
# The tests start several ranks on few cores; threads of theirs would only wait for each other.
test test-full mutate: export OMP_NUM_THREADS = 1

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	# First and alone: a machine that offers a CPU build of torch gets it, without CUDA's packages.
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[hf,tensorboard,dev]'
	touch $@

demo: $(INSTALLED)
	rm -rf runs/demo
	$(BIN)/lightning-fold fit --config $(DEMO)
	$(BIN)/python -m lightning_fold.callbacks runs/demo

demo-pp: $(INSTALLED)
	rm -rf runs/demo-pp
	$(BIN)/lightning-fold fit --config $(DEMO_PP)
	$(BIN)/python -m lightning_fold.callbacks runs/demo-pp

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell $(SOURCES) $(TEXTS)
	! LC_ALL=C grep -rnIP --exclude-dir=__pycache__ '[^\x00-\x7F]' $(SOURCES) $(TEXTS)

# Kernels have to compile with the oldest Triton that pyproject.toml allows, too.
$(TRITON_36): | $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps --target $@ triton==3.6.0

aot: $(INSTALLED) $(TRITON_36)
	$(BIN)/python -m fold_kernels.aot
	PYTHONPATH=$(TRITON_36) $(BIN)/python -m fold_kernels.aot
	$(BIN)/python -m fold_kernels.aot --capability 100

test: lint aot
	$(BIN)/pytest -m "not slow"

test-full: lint aot
	$(BIN)/pytest
	$(BIN)/python -m lightning_fold.verify.mutations

mutate: $(INSTALLED)
	$(BIN)/python -m lightning_fold.verify.mutations

bench: $(INSTALLED)
	$(BIN)/python benchmarks/strategy_overhead.py
	$(BIN)/python benchmarks/moe_layer.py
	$(BIN)/python benchmarks/dispatch_bytes.py
	$(BIN)/python benchmarks/kernels_cpu.py

# As root on Linux; says why and ends well where namespaces are not to be had.
cluster-bench: $(INSTALLED)
	$(BIN)/python -m benchmarks.cluster

clean:
	rm -rf $(VENV) runs lightning_logs build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
