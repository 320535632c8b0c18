# `make serve` and `make test` are all there is to know; each sets up what it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

NPU_ENV  := build/npu-env
CUDA_ENV := build/cuda-env
K8S_ENV  := build/k8s-env

# torch would import torch_npu by itself where that is installed, and fail without CANN.
test-npu test-npu-compile npu-report: export TORCH_DEVICE_BACKEND_AUTOLOAD := 0

.PHONY: help install serve test test-slow soak test-npu test-npu-compile test-cuda test-cuda-compile test-k8s npu-report bench lint format lock clean

help:
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

install: $(STAMP) ## the virtual environment, the package with its kernels, the demo model
	@$(BIN)/python deployments/prepare_demo.py

serve: install ## serve the demo model and its adapters on http://127.0.0.1:8000
	@$(BIN)/ray-lora serve deployments/llama.yaml

test: install lint ## lint, type-check, run the tests (under 15 minutes)
	$(BIN)/python -m pytest -m "not slow"

test-slow: install ## soak and fault tests
	$(BIN)/python -m pytest -m slow

soak: install ## half an hour of mixed traffic, with a rank lost every five minutes
	$(BIN)/python -m pytest -m slow tests/soak --soak-minutes 30

test-npu: install $(NPU_ENV)/.installed ## the Ascend backend on CPU tensors: schemas, shapes, plans and tokens (2 minutes)
	TRITON_INTERPRET=1 $(NPU_ENV)/bin/python -m pytest tests/npu

test-npu-compile: $(NPU_ENV)/.installed ## the Triton kernels: interpreted, and through the Ascend compilers (4 minutes)
	TRITON_INTERPRET=1 $(NPU_ENV)/bin/python -m pytest tests/triton_numerics
	$(NPU_ENV)/bin/python -m pytest tests/npu_compile

test-cuda: install $(CUDA_ENV)/.installed ## the CUDA backend on CPU tensors, and on a GPU where there is one (2 minutes)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(CUDA_ENV)/bin/python -m pytest tests/cuda
	$(CUDA_ENV)/bin/python -m pytest tests/cuda

test-cuda-compile: $(CUDA_ENV)/.installed ## the Triton kernels, compiled for sm_80 and sm_90
	$(CUDA_ENV)/bin/python -m pytest tests/cuda_compile

test-k8s: install $(K8S_ENV)/.installed ## the manifests of k8s/ without a cluster, and their serve configs on a local Ray
	$(BIN)/python -m pytest tests/k8s

npu-report: $(NPU_ENV)/.installed ## bytes, buffers and floors of the kernels compiled for Ascend
	@$(NPU_ENV)/bin/python kernels/triton/npu_report.py

bench: install ## run the benchmarks; tables on the terminal, JSON in benchmarks/results
	$(BIN)/python -m benchmarks

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## rewrite the sources as the linter wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: ## resolve the dependencies anew into requirements.lock
	$(PYTHON) -m venv build/lock
	build/lock/bin/pip install --quiet --upgrade pip
	build/lock/bin/pip install --quiet --dry-run --ignore-installed --report build/lock/report.json ".[dev,bench]"
	build/lock/bin/python .ci/lock.py build/lock/report.json > requirements.lock

clean: ## remove everything that was set up or built here
	rm -rf $(VENV) build *.egg-info ray_lora/backends/_cpu_kernels*.so

define install-requirements
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@echo "Installing into $(@D) ..."
	@$(@D)/bin/pip install --quiet --disable-pip-version-check -r $<
	@touch $@
endef

build/%-env/.installed: kernels/triton/requirements-%.txt
	$(install-requirements)

$(K8S_ENV)/.installed: k8s/requirements.txt
	$(install-requirements)

$(STAMP): requirements.lock pyproject.toml setup.py $(wildcard kernels/cpu/*)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements.lock
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@
