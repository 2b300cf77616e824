# Each target sets up what it needs in .venv, from nothing or after a change of its requirements.
# Another Python: make setup PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint clean

help:
	@echo "make setup   install into $(VENV)"
	@echo "make demo    compare layer 0 of the engine with the reference"
	@echo "make test    run the tests"
	@echo "make lint    check style and types"
	@echo "make clean   remove caches and build products"

setup: $(READY)

$(READY): pyproject.toml .ci/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: $(PYTHON) must be Python 3.11 or newer; try make PYTHON=..." >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		-c .ci/constraints.txt -e '.[dev]'
	touch $@

# Exit code 1 means that compare did its work and found faults, which this engine has.
demo: $(READY)
	@$(BIN)/python -m harness compare --layer 0; code=$$?; \
	case $$code in \
		0) echo "Nothing failed." ;; \
		1) echo "The demo is done: the ops listed above are at fault." ;; \
		*) exit $$code ;; \
	esac

test: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
