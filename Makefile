# Four words: demo, test, check, fix. Everything runs in .venv, made from nothing on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A CPU build where one is at hand; pyproject asks only for a range that it satisfies.
TORCH ?= torch==2.13.0

.PHONY: demo test check fix judges clean

demo: $(VENV)/installed
	$(BIN)/eyas demo

test: $(VENV)/installed
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fix: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Outside judges: minutes, a network, and 2 GB under .engines. Their words are committed; the tests need none of it.
judges: $(VENV)/installed
	PYTHON=$(PYTHON) TORCH="$(TORCH)" runs/judges.sh

$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "eyas needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) demo-out
