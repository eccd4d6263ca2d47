# Everything a person or CI runs. `make up` and `make test` need Python 3.11 or newer with venv, and set up the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# An index of PyTorch wheels to look in as well, such as the one for CPU builds.
TORCH_INDEX ?=
PYTEST_WORKERS ?= 2

.PHONY: up test check format demo-model clean

up: $(VENV)/.ready
	@$(BIN)/tandem up

test: $(VENV)/.ready
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

check: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

demo-model: $(VENV)/.ready
	$(BIN)/python -m demo.train

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Tandem needs Python 3.11 or newer; say which one with make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
		|| { echo "Python's venv module is missing; on Debian: apt-get install python3-venv"; exit 1; }
	@echo "installing dependencies into $(VENV); this takes some minutes"
	@$(BIN)/python -m pip install --progress-bar off $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
		--constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .tandem .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
