# `make quickstart` and `make test` need Python 3.11 to 3.13, a C compiler and nothing else.
PYTHON ?= python3
VENV ?= .venv
# results of `make quickstart`
OUT ?= runs/quickstart
# the package alone, and the package with the tools for tests, linting and documentation
INSTALLED := $(VENV)/.installed
TOOLS := $(VENV)/.installed-tools

.PHONY: quickstart test test-fast test-engines test-exhaustive lint docs readme-tables settings-page validate-planner versions venv clean

quickstart: versions
	@test ! -e $(OUT) || { echo "$(OUT) already exists. Use another directory: make quickstart OUT=runs/NAME"; exit 1; }
	$(VENV)/bin/megabench compare quickstart --out $(OUT)

test: versions $(TOOLS)
	$(VENV)/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# the tests that start no processes and open no pages
test-fast: versions $(TOOLS)
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile -m "not distributed and not e2e"

# what depends on the version of megatron-core: its engine and its pitfalls, checkpoints and conversion
test-engines: versions $(TOOLS)
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not e2e" \
		tests/engines/test_equivalence.py tests/engines/test_traps.py tests/checkpoint tests/convert

# All cases of the matrices of which `make test` runs representatives. The outcomes of every causal model of
# transformers under every engine are in build/causal-families.md.
test-exhaustive: versions $(TOOLS)
	$(VENV)/bin/python -m pytest -m "distributed or exhaustive" tests/engines/test_causal_families.py
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile -m exhaustive --ignore tests/engines/test_causal_families.py

lint: $(TOOLS)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-logo

# the documentation as a website in build/site; a broken link is an error
docs: $(TOOLS)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

# the tables of README.md and docs/results.md, from the records in benchmarks/
readme-tables: $(INSTALLED)
	$(VENV)/bin/python tools/readme_tables.py

# docs/settings.md, from the declarations in megabench/settings/run_settings.py
settings-page: $(INSTALLED)
	$(VENV)/bin/python -m tools.settings_page

# fits the planner to tools/planner_validation/data/, or to the tables in DATA; WRITE=--write ships what was fitted
validate-planner: $(INSTALLED)
	$(VENV)/bin/python -m tools.planner_validation $(DATA) $(WRITE)

versions: $(INSTALLED)
	@$(VENV)/bin/python -c 'from importlib.metadata import version as of; from platform import python_version; print("Python", python_version(), *(f"· {name} {of(name)}" for name in ("torch", "megatron-core")))'

venv: $(TOOLS)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --constraint constraints.txt --editable .
	touch $@

$(TOOLS): $(INSTALLED)
	$(VENV)/bin/pip install --constraint constraints.txt --editable '.[test,docs]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
