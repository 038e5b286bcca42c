# `make demo` and `make test` each work alone on a fresh machine; all they install lies in .venv.
#   PYTHON=python3.12            which Python makes .venv (3.11 to 3.13)
#   TORCH=torch==2.13.0          which torch is installed; an installed one is never replaced
#   TORCH_INDEX=URL              where that torch comes from, such as PyTorch's index of CPU builds

SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11; do \
  "$$p" -c '$(SUPPORTED)' 2>/dev/null && { echo "$$p"; exit; }; done; echo python3)
endif
TORCH ?= torch==2.13.0
TORCH_INDEX ?=

VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
PINS := $(VENV)/constraints.txt

.DEFAULT_GOAL := help
# OpenMP threads that spin while they wait stall a virtual machine for milliseconds, eager's too.
WAIT ?= passive
BASE ?= HEAD
ONLY ?=

.PHONY: help demo test test-all replay sanitize lint bench size clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1 : \2/p' $(firstword $(MAKEFILE_LIST)) | column -t -s: 2>/dev/null \
	  || sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1: \2/p' $(firstword $(MAKEFILE_LIST))

demo: $(READY)  ## a small Llama through torch.compile(backend="rung"), against eager and Inductor
	OMP_WAIT_POLICY=$(WAIT) $(PY) -m rung.tools.demo

test: lint  ## ruff, mypy --strict and the quick tests
	$(PY) -m pytest -n 2

test-all: lint  ## with the slow tests, all of PyTorch's operator database and of transformers
	$(PY) -m pytest -n 2 -m "not sanitize"
	PYTHONPATH=tests $(PY) -m opdb
	PYTHONPATH=tests $(PY) -m zoo

replay: $(READY)  ## does the working tree change the source of a kernel? BASE=HEAD, ONLY=regex
	PYTHONPATH=tests $(PY) -m replay --base $(BASE) --only '$(ONLY)'

sanitize: $(READY)  ## run the generated C under AddressSanitizer and UBSan, at odd sizes
	$(PY) -m pytest -n 2 -m sanitize tests/test_sanitized.py tests/test_promises.py

lint: $(READY)  ## ruff and mypy --strict
	$(PY) -m ruff check .
	$(PY) -m mypy --strict -p rung

bench: $(READY)  ## measure the benchmarks against eager and Inductor
	OMP_WAIT_POLICY=$(WAIT) $(PY) -m rung bench

size: $(READY)  ## code lines by folder and the longest functions
	$(PY) tests/test_budget.py

clean:  ## remove .venv, caches and build products
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find rung tests -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and alone, and is then pinned, so that no other package brings another build.
$(READY): pyproject.toml
	@$(PYTHON) -c '$(SUPPORTED)' || { echo "rung: needs Python 3.11, 3.12 or 3.13, and '$(PYTHON)'" \
	  "is not one; set PYTHON=python3.12, for example" >&2; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { echo \
	  "rung: could not make $(VENV); on Debian: apt-get install python3-venv" >&2; exit 1; }
	@command -v cc >/dev/null || command -v gcc >/dev/null || $(PY) -m ziglang version >/dev/null 2>&1 \
	  || { echo "rung: no C compiler (cc or gcc) on PATH, and the kernels are C." >&2; \
	  echo "  Debian and Ubuntu: apt-get install gcc" >&2; \
	  echo "  without root:      $(VENV)/bin/pip install ziglang   (a C compiler in a wheel)" >&2; exit 1; }
	@$(PY) -c 'import pip, sys; sys.exit(int(pip.__version__.split(".")[0]) < 23)' \
	  || $(PY) -m pip install --upgrade pip
	@$(PY) -m pip show --quiet torch 2>/dev/null \
	  || $(PY) -m pip install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	@$(PY) -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $(PINS)
	$(PY) -m pip install --quiet -c $(PINS) -e '.[dev,demo,page,browser]'
	@touch $@
