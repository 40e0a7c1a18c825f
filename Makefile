# The targets that people use. Everything lives in $(VENV); nothing is installed outside it.
# Stamps under $(VENV)/stamps make a second run cheap: a step is repeated only when what it reads has changed.

VENV ?= .venv
PYTHON ?= python3
STAMPS := $(VENV)/stamps
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# After an installation that was interrupted, packages that pip takes for whole may lack files: they are installed anew.
install = again=; if [ -e $@.unfinished ]; then again=--force-reinstall; fi; \
	touch $@.unfinished && $(PIP) install $$again $(1) && rm $@.unfinished && touch $@
CHECK = told=$$($(BIN)/python -m pip check) || { echo "$$told"; exit 1; }
SOURCES := $(shell find csrc -type f)
TORCH := torch>=2.9,<3
PACKAGES := -p mok_service -p mok_api -p mok_workers

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test lint lock bench bench-service chaos simulate exhaustive test-gpu sanitize-gpu bench-gpu probe-gpu clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMPS)/project ## make a virtual environment, build the native library, install the command mok
	@$(CHECK)

demo: install ## train a tiny model through the service, rerun it, compare every step
	@$(BIN)/mok demo

test: lint ## all tests, after ruff, mypy and the import contracts
	$(BIN)/python -m pytest

lint: $(STAMPS)/test ## ruff, mypy and the import contracts
	@$(CHECK)
	$(BIN)/ruff check .
	$(BIN)/mypy $(PACKAGES)
	$(BIN)/lint-imports --no-logo

lock: $(STAMPS)/test ## choose newest versions and write requirements/*.txt with their hashes
	$(PIP) install 'pip-tools>=7.5,<8'
	$(call compile,--extra train --extra api --extra worker,lock.txt,requirements/torch-cpu.txt)
	$(call compile,--all-extras,lock-test.txt,requirements/torch-cpu.txt -c requirements/lock.txt)

bench: $(STAMPS)/test ## measure the CPU kernels, and a whole training step
	$(BIN)/python benchmarks/product.py
	$(BIN)/python -m benchmarks.training_step

bench-service: $(STAMPS)/test ## measure the service: submits, appends, event streams, lists, memory
	$(BIN)/python -m benchmarks.service

chaos: $(STAMPS)/test ## kill a real service's processes at random, 100 times: takes long; SEED=N
	$(BIN)/python -m tests.chaos --kills 100 --seed $(or $(SEED),1)

simulate: $(STAMPS)/test ## play 10,000 more worlds of faults against the scheduler and its SQL than the tests do; FIRST=N
	$(BIN)/python -m tests.simulation --seeds 10000 --first $(or $(FIRST),10000)

exhaustive: $(STAMPS)/test ## functions on all 2^32 inputs, other compilers, a busy machine; takes long
	library=$$($(BIN)/python -c 'from mok_service.kernels.library import library_path as p; print(p("cpu"))') && mkdir -p build && \
		$${CXX:-c++} -std=c++20 -O3 -march=native -Icsrc/include csrc/tests/exhaustive_functions.cpp $$library \
			-Wl,-rpath,$$(dirname $$library) -pthread -o build/exhaustive_functions
	build/exhaustive_functions tests/golden/functions.json
	$(BIN)/python -m pytest -m exhaustive

test-gpu: $(STAMPS)/test ## the tests that need a CUDA GPU
	$(BIN)/python -m pytest -m gpu

sanitize-gpu: $(STAMPS)/test ## every operation and two steps of jobs under the four tools of compute-sanitizer
	for tool in memcheck racecheck initcheck synccheck; do echo "== $$tool"; \
		PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 1 $(BIN)/python -m pytest -m gpu \
			-k 'not golden and not device and not all_inputs and not repeated' tests/gpu || exit 1; done

bench-gpu: $(STAMPS)/test ## measure the CUDA kernels
	$(BIN)/python benchmarks/gpu_product.py
	$(BIN)/python benchmarks/gpu_operations.py

probe-gpu: $(STAMPS)/project ## does this GPU's matrix unit round and add as docs/arithmetic.md says?
	$(BIN)/cmake -S csrc/cuda -B build/cuda-tests -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DMOK_CUDA_TESTS=ON
	$(BIN)/cmake --build build/cuda-tests --target cuda_probe
	build/cuda-tests/cuda_probe

clean: ## remove what was built; keeps $(VENV) and .mok
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache $(STAMPS)/project
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# --- how it is installed ----------------------------------------------------------------------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { \
		echo "$(PYTHON) is $$($(PYTHON) --version 2>&1); Python 3.11, 3.12 or 3.13 is needed: make PYTHON=python3.11 ..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "Python's venv module is missing; install it: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(STAMPS)/compiler:
	@printf '#include <concepts>\ntemplate <std::integral T> T f(T x) { return x; }\nint main() { return f(0); }\n' \
		| $${CXX:-c++} -std=c++20 -x c++ -fsyntax-only - 2>/dev/null || { \
		echo "No C++20 compiler: $${CXX:-c++} can't be used; install one: apt-get install g++, or dnf install gcc-c++"; exit 1; }
	@mkdir -p $(STAMPS) && touch $@

# torch comes first and by range, since one hashed lock can't serve both its CPU and its CUDA build.
$(STAMPS)/torch: requirements/torch-cpu.txt | $(BIN)/python
	@echo "Installing torch ..."
	@mkdir -p $(STAMPS)
	@if command -v nvidia-smi >/dev/null; then $(call install,'$(TORCH)'); else $(call install,-r $<); fi

$(STAMPS)/run: requirements/lock.txt $(STAMPS)/torch
	@echo "Installing what the lock names ..."
	@$(call install,--no-deps --require-hashes -r $<)

$(STAMPS)/project: pyproject.toml $(SOURCES) $(STAMPS)/run | $(STAMPS)/compiler
	@echo "Building the native library ..."
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(STAMPS)/test: requirements/lock-test.txt $(STAMPS)/project
	@echo "Installing what the tests need ..."
	@$(call install,--no-deps --require-hashes -r $<)

# Every package of the project and its build but torch: $(1) extras, $(2) file, $(3) further inputs.
define compile
	CUSTOM_COMPILE_COMMAND='make lock' $(BIN)/pip-compile --quiet --upgrade --generate-hashes --strip-extras --no-annotate \
		--no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-emit-options \
		--unsafe-package torch --unsafe-package mok-service $(1) --output-file requirements/$(2) \
		pyproject.toml requirements/build.in $(3)
endef
