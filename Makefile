# Everything a fresh clone needs: `make demo` runs the main job, `make test` passes the tests.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test check long portability bench wheel clean

demo: $(STAMP)
	$(BIN)/anytime demo

test: check
	$(BIN)/python -m pytest -m "not long" -n auto --maxprocesses 4 --dist loadgroup

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/api/test_layers.py

long: check
	$(BIN)/python -m pytest

# The tests that compare floating-point numbers, as other processors, thread counts and loads would run them.
portability: $(STAMP)
	$(BIN)/python tools/portability.py

bench: $(STAMP)
	$(BIN)/python benchmarks/evaluate.py

wheel: $(STAMP)
	$(BIN)/python -m build --wheel

# PyTorch first and by its exact version: what else is installed then finds its need met.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

clean:
	rm -rf .venv build dist anytime-demo src/*.egg-info
