# Two commands on a machine with Python >= 3.11, pip and make: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test lint docs setup browser clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "== Setting up $(VENV): a few minutes the first time =="
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --progress-bar on -c constraints.txt -e ".[dev]"
	@touch $@

demo: setup
	$(BIN)/python examples/demo.py

test: setup lint browser
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=10

# Pages are tested in Chromium, where it is there or can be installed; otherwise those tests say so and are skipped.
browser:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	  && apt-get update -qq && apt-get install -y -qq chromium; } || echo "Chromium is not here: its tests are skipped."

lint: setup
	$(BIN)/ruff check src tests benchmarks examples training docs comfyui
	$(BIN)/ruff format --check src tests benchmarks examples training docs comfyui
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: setup
	$(BIN)/mkdocs build --strict --site-dir site

clean:
	rm -rf $(VENV) site demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
