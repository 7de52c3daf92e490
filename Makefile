# Two commands do everything, set-up included:  make demo   and   make test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLDEST := .venv-oldest

.PHONY: demo test test-fast test-oldest lint docs bench clean

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "laplax needs Python 3.11 or newer; this is $$($(PYTHON) --version). Try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@echo "setting up $(VENV) with everything that tests and demonstration need: a minute or two, once"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/python -m laplax demo --out out/demo

# One worker per core; LAPACK's own threads would only fight over them. A worker takes whole modules,
# whose tests share programs, until it has to help the other.
PYTEST := OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal
test: $(VENV)/.installed
	$(PYTEST)

# After every edit: the contracts of structures, likelihoods and estimators against closed forms, a
# pipeline from data to page, and what is said about wrong input.
FAST := import structures likelihoods conjugate last_layer features cli messages
test-fast: $(VENV)/.installed
	$(PYTEST) $(FAST:%=tests/test_%.py)

# The oldest releases that pyproject.toml allows, in an environment of their own: the same numbers.
$(OLDEST)/.installed: pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet $$($(PYTHON) -c 'import tomllib; \
		project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		print(*[name.replace(">=", "==") for name in project["dependencies"]])')
	@touch $@

test-oldest: $(VENV)/.installed $(OLDEST)/.installed
	PYTHONPATH=src $(BIN)/python tests/smoke.py $(VENV)/smoke.json
	PYTHONPATH=src $(OLDEST)/bin/python tests/smoke.py $(OLDEST)/smoke.json $(VENV)/smoke.json

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, with all its links and references checked. It fetches nothing while it builds.
$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "the documentation is in site/index.html"

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/compare --quick

clean:
	rm -rf $(VENV) $(OLDEST) site .pytest_cache .mypy_cache .ruff_cache
