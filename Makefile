# What people run. `make` alone lists the targets.
#
# PYTHON  the interpreter that makes VENV, and that gpu-check runs on; 3.11 or newer
# VENV    the environment: another Python's tests are make test PYTHON=python3.13 VENV=.venv-3.13
# ARGS    passed on to the command behind test, bench and demo: make test ARGS="-k shortcut -x -n 0"
# MINUTES  how long test-long takes, about
# TORCHREC  the version that test-torchrec runs on, and with TORCH peer-tests; TORCH and FBGEMM those
#         that go with it

PYTHON ?= python3
ARGS ?=
MINUTES ?= 30
TORCHREC ?= 1.5.0
TORCH ?=
FBGEMM ?= $(TORCHREC)

VENV := .venv
BIN := $(VENV)/bin
# Each worker has a run of neighbouring tests, which share ranks and servers of scripts.
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal
# Python compiles what it imports, when it does: most of what is installed never is.
INSTALL := PYTHONUNBUFFERED=1 $(BIN)/python -m pip install --progress-bar off --no-compile
unexport PYTHONDONTWRITEBYTECODE

# What pip is at: on a terminal in one line, written over and over; elsewhere a line for what takes
# long. All that it says is in the log, and shown where it fails.
LOG := $(VENV)/install.log
PROGRESS = awk -v terminal="$$terminal" '\
  function say(line) { if (terminal) printf "\r\033[K%.76s", line; else print line; fflush() } \
  /^ *Installing collected/ { n = split($$0, part, ","); \
    say("  unpacking " n " package" (n > 1 ? "s" : "")); next } \
  /^ *Downloading .*\([0-9.]+ [MG]B\)/ { mb = substr($$(NF - 1), 2) * ($$NF ~ /^G/ ? 1000 : 1); \
    split($$2, part, "-"); \
    if (terminal || mb >= 50) say("  downloading " part[1] " " $$(NF - 1) " " $$NF); next } \
  terminal && /^ *(Collecting|Processing|Building|Preparing)/ { say("  " $$0) } \
  END { if (terminal) printf "\r\033[K" }'
install = test -t 1 && terminal=1; { $(INSTALL) $(1) 2>&1 || echo $$? >$(LOG).failed; } | tee -a $(LOG) | $(PROGRESS); \
  if test -e $(LOG).failed; then rm $(LOG).failed; tail -n 40 $(LOG); exit 1; fi

# Every pip below obeys these pins, also in the environments in which packages are built
# (older pips read the first name for that, newer ones the second).
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo demo-clicks test test-quick test-long test-alone test-torchrec mutants peer-tests bench lint house format docs wheel gpu-check constraints clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# A target installs what it needs and no more. Each level is an extra of pyproject.toml with a stamp
# in VENV, written last: an interrupted installation is taken up again. swpipe is built by the
# setuptools of VENV: to install one for each build takes longer than the builds.
LEVELS := demo clicks torchrec test lint docs bench
STAMPS := $(LEVELS:%=$(VENV)/.%)
SWPIPE := --no-build-isolation --editable
TORCHREC_CPU := --no-build-isolation --no-deps -r requirements-torchrec-cpu.txt

setup: $(VENV)/.setup ## install everything into .venv, for development

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "swpipe needs Python 3.11 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; \
	  exit 1; }
	@echo "Making $(VENV), an environment of $$($(PYTHON) --version)."
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) --quiet setuptools
	@touch $@

$(VENV)/.setup: pyproject.toml constraints.txt requirements-torchrec-cpu.txt | $(VENV)/.python
	@echo "Installing swpipe, and all that its tests and pages need, into $(VENV)."
	@$(call install,$(SWPIPE) '.[dev]')
	@$(call install,$(TORCHREC_CPU))
	@echo "Compiling what the tests import."
	@$(BIN)/python -W ignore -c 'from tests.support.servers import IMPORTED, import_all; [*map(import_all, IMPORTED)]'
	@touch $(STAMPS) $@

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/.python
	@echo "Installing swpipe, torch and matplotlib into $(VENV)."
	@$(call install,$(SWPIPE) '.[plot]')
	@echo "Compiling what the demo imports of torch."
	@$(BIN)/python -c 'import swpipe.cli.app, torch._dynamo'
	@touch $@

$(VENV)/.clicks: $(VENV)/.demo
	@echo "Installing polars, which the click model reads with, into $(VENV)."
	@$(call install,$(SWPIPE) '.[examples]')
	@touch $@

$(VENV)/.torchrec: requirements-torchrec-cpu.txt $(VENV)/.clicks
	@echo "Installing TorchRec and what it needs into $(VENV)."
	@$(call install,$(SWPIPE) '.[torchrec]')
	@$(call install,$(TORCHREC_CPU))
	@touch $@

$(filter-out %/.demo %/.clicks %/.torchrec,$(STAMPS)): $(VENV)/.%: $(VENV)/.torchrec
	@echo "Installing what $* needs into $(VENV)."
	@$(call install,$(SWPIPE) '.[$*]')
	@touch $@

demo: $(VENV)/.demo ## train an image model serially and pipelined, compare, break down, draw
	@$(BIN)/swpipe demo $(ARGS)

demo-clicks: $(VENV)/.clicks ## train a click model serially and pipelined, and compare
	@$(BIN)/python docs/examples/clicks/train_clicks.py $(ARGS)

# With the test backend a process sees an accelerator for ever: its tests have processes of their own,
# and few of them, since each simulated device has threads besides.
test: $(VENV)/.test ## run the tests; with ARGS those that they name, as ARGS=tests/loops
	@$(PYTEST) $(ARGS)
	@$(if $(ARGS),,$(PYTEST) -n 2 tests/device --accelerator)

test-quick: $(VENV)/.test ## run the tests that are not slow, with those of the accelerator
	@$(PYTEST) -m "not slow"
	@$(PYTEST) -n 2 -m "not slow" tests/device --accelerator

test-long: $(VENV)/.test ## run the random tests on new examples, for MINUTES=30
	@$(BIN)/python .ci/test_long.py $(MINUTES) $(ARGS)

test-alone: $(VENV)/.test ## run each quick test alone, in a fresh process; takes up where it was interrupted
	@$(BIN)/python .ci/test_alone.py $(ARGS)

# Without the pins, for other versions than theirs. Not as a variable of the target, which the
# targets that it needs would inherit.
UNPINNED := PIP_CONSTRAINT= PIP_BUILD_CONSTRAINT=

# In a folder ahead of the installed one. fbgemm is the installed one: older builds of it need an
# older torch.
$(VENV)/torchrec-%: | $(VENV)/.test
	@$(UNPINNED) $(INSTALL) --quiet --no-deps --target $@.new torchrec==$*
	@mv $@.new $@

# Where it needs another torch, in an environment of its own: with the packages that constraints.txt
# pins, but for those of OF_TORCH.
OTHER := .venv-torch-$(TORCH)-torchrec-$(TORCHREC)
OF_TORCH := ^(torch|torchrec|fbgemm[_-]gpu-cpu|triton|setuptools|pip)==|^(nvidia|cuda)-

$(OTHER)/.test: constraints.txt | $(VENV)/.python
	@$(PYTHON) -m venv --without-pip $(OTHER)
	@grep -v -i -E '^#|$(OF_TORCH)' constraints.txt >$(OTHER)/others.txt
	@echo "Installing torch $(TORCH) and TorchRec $(TORCHREC) into $(OTHER)."
	@$(UNPINNED) $(BIN)/python -m pip --python $(OTHER) install --quiet --no-compile torch==$(TORCH)
	@$(UNPINNED) $(BIN)/python -m pip --python $(OTHER) install --quiet --no-compile --no-deps \
	  -r $(OTHER)/others.txt torchrec==$(TORCHREC) fbgemm-gpu-cpu==$(FBGEMM)
	@echo "Compiling what the tests import of them."
	-@$(OTHER)/bin/python -W ignore -c 'import torch._dynamo, torchrec'  # the tests say what fails
	@touch $@

test-torchrec: $(if $(TORCH),$(OTHER)/.test,$(VENV)/torchrec-$(TORCHREC)) ## run the TorchRec tests on another version of it, as TORCHREC=1.5.0; TORCH=... with another torch
	@PYTHONPATH="$(if $(TORCH),$(CURDIR),$(abspath $<))" \
	  $(if $(TORCH),$(subst $(BIN),$(OTHER)/bin,$(PYTEST)),$(PYTEST)) \
	  tests/tasks/torchrec --ignore tests/tasks/torchrec/hstu $(ARGS)

mutants: $(VENV)/.test ## plant each fault of tests/mutants, and list those that no test finds; ARGS names rooms
	@$(BIN)/python -m tests.mutants $(ARGS)

peer-tests: $(if $(TORCH),$(OTHER),$(VENV))/.test ## run TorchRec's own pipeline tests, from the checkout TORCHREC_TESTS=path, on ours
	@test -n "$(TORCHREC_TESTS)" || { \
	  echo "name a checkout of TorchRec: make peer-tests TORCHREC_TESTS=path" >&2; exit 1; }
	@$(if $(TORCH),$(OTHER),$(VENV))/bin/python -m tests.peer $(TORCHREC_TESTS) $(ARGS)

bench: $(VENV)/.bench ## measure the costs of the engine and of others in one run
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
	@$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

# The interpreter's own packages may lack a pytest plug-in that pyproject.toml has settings for, or
# have one that warns beside another. Both parts run, whatever becomes of the first.
gpu-check: ## CUDA bench and tests, on PYTHON's own packages; elsewhere says that it skips
	@if $(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
	  export PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}"; \
	  failed=0; \
	  $(PYTHON) -m bench.gpu || failed=1; \
	  $(PYTHON) -m pytest tests/device --accelerator -o addopts=--import-mode=importlib -p no:benchmark \
	      -W ignore::pytest.PytestConfigWarning -q $(ARGS) || failed=1; \
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
	@rm -rf build dist .src/*.egg-info docs/_build out .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## and .venv, and those of other versions
	@rm -rf $(VENV) .venv-torch-*
