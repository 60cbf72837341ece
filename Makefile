# Each target does its own set-up: see requirements/install.sh.
export HF_HUB_OFFLINE := 1
export PYTHONPATH := $(CURDIR)
PY := .venv/bin/python
UV := .venv/bin/uv
# Two processes, which take whole groups of tests (tests/conftest.py) in order.
TWO := -n 2 --dist loadscope --no-loadscope-reorder

.PHONY: env demo bench optuna lock check test test-fast slurm-test format

env:
	@requirements/install.sh

# The environment is for a CPU, also on a machine that has a GPU.
demo bench test test-fast slurm-test: export CUDA_VISIBLE_DEVICES :=

demo: env  ## GRPO on a small DeepSeek-V3-shaped MoE, on this machine's CPU
	$(PY) -m megatron_rl.main experiment=cpu_digits name=demo

bench: env build/bench/complete  ## What a step costs, against bare megatron-core and against TRL
	$(PY) tools/bench_step.py

build/bench/complete: requirements/bench.txt | env
	rm -rf build/bench
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target build/bench -r requirements/bench.txt
	touch $@

optuna: env build/optuna/complete  ## For sweeps that choose their points by the results so far: hydra/sweeper=optuna

build/optuna/complete: requirements/optuna.txt | env
	rm -rf build/optuna
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target build/optuna -r requirements/optuna.txt
	touch $@

lock: env  ## requirements/gpu.lock from gpu.txt: what a machine with GPUs gets. No version is raised without need
	$(UV) pip compile requirements/gpu.txt --python-version 3.12 --python-platform x86_64-manylinux_2_39 --native-tls --no-annotate --no-header --quiet --output-file requirements/gpu.lock

check: env  ## Style and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

test: env build/optuna/complete  ## Everything, with live servers and whole runs
	$(PY) -m pytest -q $(TWO) -m "not slurm"

test-fast: env build/optuna/complete  ## Without live servers: seconds to a few minutes
	$(PY) -m pytest -q $(TWO) -m "not live and not slurm"

# What measures time goes first, alone.
slurm-test: env  ## launch/ on a real Slurm of three nodes, all on this machine, as root
	@$(PY) -m tests.slurm.machines
	$(PY) -m pytest -q -m slurm tests/slurm/test_overhead.py
	$(PY) -m pytest -q $(TWO) -m slurm tests/slurm --ignore=tests/slurm/test_overhead.py

format: env
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
