# The two commands of the README: `make demo` and `make test`. Each makes its own .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-all lint clean

demo: .venv/ready
	$(BIN)/python -m ghostnoise.lab.demo

test: .venv/ready lint
	$(BIN)/pytest -n 2

# Also what takes longer; nothing does so far.
test-all: test

lint: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# torch first and pinned: an unpinned torch may pull gigabytes that a CPU has no use for.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch numpy
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[lab,dev]'
	touch $@

clean:
	rm -rf .venv build dist out .mypy_cache .pytest_cache .ruff_cache .hypothesis
