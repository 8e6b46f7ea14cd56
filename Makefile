# Two commands do all the set-up: `make demo` and `make test`. Both are quick the second time.
VENV      ?= .venv
PY        := $(VENV)/bin/python
STATE     ?= $(CURDIR)/.cache/state
PYTHON    ?= python3
STAMP     := $(VENV)/.installed
export CANTELOP_STATE = $(STATE)
export CANTELOP_TEST_STATE = $(STATE)

.PHONY: help setup image lab-image demo test lint unit bench clean

help:  ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

setup: $(STAMP)  ## system packages, virtual environment, project (editable)

$(STAMP): pyproject.toml guest/image/host-packages.txt
	guest/image/install-host-packages
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

image: $(STAMP)  ## the guest image python3
	$(PY) -m cantelop_kernels image build

lab-image: $(STAMP)  ## the host image of the lab, in which tests run on real Firecracker
	$(PY) -m tests.lab image

demo: image  ## run notebooks/quickstart.ipynb in a microVM
	mkdir -p out
	$(PY) -m cantelop_kernels run notebooks/quickstart.ipynb -o out/quickstart.ipynb --show --allow-emulation

lint: $(STAMP)  ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

unit: $(STAMP)  ## the tests that need neither root nor a VM
	$(PY) -m pytest tests/unit

# The lab is virtualization inside emulation, which stands still now and then: it gets a second try.
test: lint image lab-image  ## everything
	$(PY) -m pytest --ignore=tests/lab
	$(PY) -m pytest tests/lab || $(PY) -m pytest tests/lab

bench: image  ## kernels in microVMs, behind the fake VMM and local, in one run; BENCH=--quick
	$(PY) -m tests.bench $(BENCH)

clean:  ## what was built here, not the image cache
	rm -rf $(VENV) out .mypy_cache .ruff_cache .pytest_cache
