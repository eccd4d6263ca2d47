# Everything a person or CI runs. `make up` and `make test` need Python 3.11 or newer with venv, and set up the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# An index of PyTorch wheels to look in as well, such as the one for CPU builds.
TORCH_INDEX ?=
PYTEST_WORKERS ?= 2

.PHONY: up test check bench-gateway bench-encoder bench-decoder bench-structured bench-interference fuzz format demo-model clean images-test

up: $(VENV)/.ready
	@$(BIN)/tandem up

test: $(VENV)/.ready
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

check: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# How light the gateway is: beside a bare server, on one core, between stubs.
bench-gateway: $(VENV)/.ready
	$(BIN)/python -m benchmarks.bench_gateway

# The encoder: tower, preprocessing, the whole process and its transport, each beside a peer.
bench-encoder: $(VENV)/.ready
	$(BIN)/python -m benchmarks.bench_encoder

# The engine of the decoder, beside transformers' generate, and with VLLM=path/to/vllm beside vLLM's server.
bench-decoder: $(VENV)/.ready
	$(BIN)/python -m benchmarks.bench_decoder $(if $(VLLM),--vllm $(VLLM))

# What grammars cost a full batch of answers.
bench-structured: $(VENV)/.ready
	$(BIN)/python -m benchmarks.bench_structured

# Text streams beside new pictures: our processes, or any server by URL=http://host:port/v1; VLLM=path/to/vllm adds its.
bench-interference: $(VENV)/.ready
	$(BIN)/python -m benchmarks.bench_interference $(if $(URL),--url $(URL)) $(if $(VLLM),--vllm $(VLLM))

# Every route against thousands of requests that its documentation describes; takes about twenty minutes.
fuzz: $(VENV)/.ready
	TANDEM_FUZZ_EXAMPLES=$(or $(FUZZ_EXAMPLES),5000) $(BIN)/python -m pytest --timeout 0 tests/gateway_svc/test_fuzz.py

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

# Builds the images on a base of its own and starts what is in them; needs root, buildah and debootstrap.
images-test: $(VENV)/.ready
	$(BIN)/python -m tests.deploy.images $(IMAGES) || [ $$? = 77 ]

clean:
	rm -rf $(VENV) .tandem .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
