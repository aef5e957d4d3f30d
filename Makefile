# Two commands on a fresh machine: each makes .venv when it is not there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUN_DIR := runs/demo

.PHONY: demo test check clean

demo: $(STAMP)
	rm -rf $(RUN_DIR)
	$(BIN)/deltaloom run pipelines/quickstart.py --run-dir $(RUN_DIR)

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" --numprocesses 2 --dist loadfile

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# torch first and by its exact pin: an unpinned torch takes a CUDA build of several gigabytes.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) runs
