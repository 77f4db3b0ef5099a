# Two commands on a fresh machine: `make demo` and `make test`. Everything is installed into .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Empty it to install the newest versions instead of the tested ones.
CONSTRAINTS ?= -c constraints.txt
QUESTION ?= What is this report about?

# How many tests run at a time.
JOBS ?= 2
PYTEST := pytest -n $(JOBS) --dist worksteal

OLDEST ?= .venv-oldest

.PHONY: demo test test-slow test-long test-oldest check format bench pictures clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(CONSTRAINTS) -e ".[dev]"
	touch $@

demo: $(VENV)/.installed
	$(BIN)/tidekv run examples/lighthouse.txt -p "$(QUESTION)" -n 80

test: $(VENV)/.installed
	$(BIN)/$(PYTEST) -m "not slow and not gpu"

test-slow: $(VENV)/.installed
	$(BIN)/$(PYTEST) -m "slow and not gpu"

test-long: $(VENV)/.installed
	$(BIN)/$(PYTEST) -m "long and not gpu"

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/pip install --quiet --disable-pip-version-check -c constraints-oldest.txt -e ".[dev]"
	touch $@

test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/$(PYTEST) -m "not slow and not gpu"

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/prefill.py

pictures: $(VENV)/.installed
	$(BIN)/python benchmarks/pictures.py

clean:
	rm -rf $(VENV) $(OLDEST) build dist .mypy_cache .ruff_cache .pytest_cache
