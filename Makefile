# What people run. `make` alone lists the targets.
#
# PYTHON  the interpreter that makes .venv, and that gpu-check runs on; 3.11 or newer
# ARGS    passed on to the command behind test, bench and demo: make test ARGS="-k shortcut -x -n 0"
# TORCHREC  the version that test-torchrec runs on; TORCH and FBGEMM those that go with it

PYTHON ?= python3
ARGS ?=
TORCHREC ?= 1.5.0
TORCH ?=
FBGEMM ?= $(TORCHREC)

VENV := .venv
BIN := $(VENV)/bin
# Each worker has a run of neighbouring tests, which share ranks and servers of scripts.
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal
INSTALL := $(BIN)/python -m pip install --progress-bar off

# What pip is at, in one line that is written over and over; elsewhere than on a terminal a line for
# every tenth package. All that it says is in .venv/install.log, and shown where it fails.
LOG := $(VENV)/install.log
PROGRESS = awk -v terminal="$$(test -t 1 && echo 1)" '\
  /^ *(Collecting|Downloading|Installing|Successfully)/ { count++; \
    line = sprintf("  %3d  %.100s", count, $$0); \
    if (terminal) printf "\r\033[K%.76s", line; else if (count % 10 == 1) print line; fflush() } \
  END { if (terminal) print "" }'
install = { $(INSTALL) $(1) 2>&1 || echo $$? >$(LOG).failed; } | tee -a $(LOG) | $(PROGRESS); \
  if test -e $(LOG).failed; then rm $(LOG).failed; tail -n 40 $(LOG); exit 1; fi

# Every pip below obeys these pins, also in the environments in which packages are built
# (older pips read the first name for that, newer ones the second).
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo test test-torchrec peer-tests bench lint house format docs wheel gpu-check constraints clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# A target installs what it needs and no more. Each level is an extra of pyproject.toml with a stamp
# in .venv, written last: an interrupted installation is taken up again.
LEVELS := demo test lint docs bench
STAMPS := $(LEVELS:%=$(VENV)/.%)

setup: $(STAMPS) ## install everything into .venv, for development

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "swpipe needs Python 3.11 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; \
	  exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.demo: pyproject.toml constraints.txt requirements-torchrec-cpu.txt | $(VENV)/.python
	@echo "Installing swpipe and what its demo needs into $(VENV); this takes a minute, once."
	@$(call install,--editable '.[demo]')
	@$(call install,--no-deps -r requirements-torchrec-cpu.txt)
	@touch $@

$(filter-out %/.demo,$(STAMPS)): $(VENV)/.%: $(VENV)/.demo
	@echo "Installing what $* needs into $(VENV)."
	@$(call install,--editable '.[$*]')
	@touch $@

demo: $(VENV)/.demo ## train a click model serially and pipelined, compare, break down, draw
	@$(BIN)/swpipe demo $(ARGS)

# With the test backend a process sees an accelerator for ever: its tests have processes of their own.
test: $(VENV)/.test ## run the tests; with ARGS those that they name, as ARGS=tests/accelerator
	@$(PYTEST) $(ARGS)
	@$(if $(ARGS),,$(PYTEST) tests/accelerator)

# In a folder ahead of the installed one. fbgemm is the installed one: older builds of it need an
# older torch.
$(VENV)/torchrec-%: | $(VENV)/.test
	PIP_CONSTRAINT= PIP_BUILD_CONSTRAINT= $(INSTALL) --no-deps --target $@.new torchrec==$*
	@mv $@.new $@

# Where it needs another torch, in an environment of its own, which has what .venv has but for these.
OTHER := .venv-torch-$(TORCH)-torchrec-$(TORCHREC)
OF_TORCH := ^(torch|torchrec|fbgemm[_-]gpu-cpu|triton|setuptools|pip)==|^(nvidia|cuda)-

$(OTHER)/.test: constraints.txt | $(VENV)/.test
	$(PYTHON) -m venv $(OTHER)
	@$(BIN)/python -m pip freeze --exclude-editable | grep -v -i -E '$(OF_TORCH)' >$(OTHER)/others.txt
	@echo "Installing torch $(TORCH) and TorchRec $(TORCHREC) into $(OTHER)."
	@$(OTHER)/bin/python -m pip install --quiet torch==$(TORCH)
	@$(OTHER)/bin/python -m pip install --quiet --no-deps -r $(OTHER)/others.txt \
	  torchrec==$(TORCHREC) fbgemm-gpu-cpu==$(FBGEMM)
	@touch $@

$(OTHER)/.test: export PIP_CONSTRAINT :=
$(OTHER)/.test: export PIP_BUILD_CONSTRAINT :=

test-torchrec: $(if $(TORCH),$(OTHER)/.test,$(VENV)/torchrec-$(TORCHREC)) ## run the TorchRec tests on another version of it, as TORCHREC=1.5.0; TORCH=... with another torch
	@PYTHONPATH="$(if $(TORCH),$(CURDIR),$(abspath $<))" \
	  $(if $(TORCH),$(subst $(BIN),$(OTHER)/bin,$(PYTEST)),$(PYTEST)) \
	  tests/tasks/torchrec --ignore tests/tasks/torchrec/hstu $(ARGS)

peer-tests: $(VENV)/.test ## run TorchRec's own pipeline tests, from the checkout TORCHREC_TESTS=path, on ours
	@test -n "$(TORCHREC_TESTS)" || { \
	  echo "name a checkout of TorchRec: make peer-tests TORCHREC_TESTS=path" >&2; exit 1; }
	@$(BIN)/python -m tests.peer $(TORCHREC_TESTS) $(ARGS)

bench: $(VENV)/.bench ## measure the engine's costs beside other engines', in one run
	@$(BIN)/python -m bench $(ARGS)

lint: $(VENV)/.lint ## ruff and mypy --strict
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

house: ## print where the package is heavy: lines, attributes, parameters, users
	@$(PYTHON) .ci/house.py

format: $(VENV)/.lint ## let ruff fix what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(VENV)/.docs ## build the site into docs/_build/html; warnings are errors
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo "docs: open docs/_build/html/index.html"

wheel: $(VENV)/.python ## build the wheel into dist/
	@rm -rf build/lib build/bdist.* dist
	@$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/*.whl

# The interpreter's own packages may lack a pytest plug-in that pyproject.toml has settings for, or
# have one that warns beside another. Both parts run, whatever becomes of the first.
gpu-check: ## CUDA bench and tests, on PYTHON's own packages; elsewhere says that it skips
	@if $(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
	  export PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}"; \
	  several=$$($(PYTHON) -c 'import xdist' 2>/dev/null && echo "-n 4 --dist worksteal"); \
	  failed=0; \
	  $(PYTHON) -m bench.gpu || failed=1; \
	  $(PYTHON) -m pytest tests/accelerator -o addopts=--import-mode=importlib -p no:benchmark \
	      -W ignore::pytest.PytestConfigWarning -q $$several $(ARGS) || failed=1; \
	  exit $$failed; \
	else \
	  echo "gpu-check: skipped: $(PYTHON) finds no torch with a CUDA device" \
	    "(make PYTHON=... gpu-check names another interpreter)"; \
	fi

constraints: setup ## write constraints.txt anew from what .venv holds
	@{ sed -n '/^#/p' constraints.txt; \
	   $(BIN)/python -m pip freeze --all --exclude-editable \
	     | grep -v -E '^(pip|swpipe)[= ]' | sed 's/+cpu$$//' | LC_ALL=C sort -f; \
	 } > constraints.new
	@mv constraints.new constraints.txt

clean: ## remove what was built, the caches, and the demo's data and results
	@rm -rf build dist *.egg-info docs/_build out .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## and .venv, and those of other versions
	@rm -rf $(VENV) .venv-torch-*
