#!/usr/bin/env bash
# An interpreter for MRL_PYTHON, the clone's own, which runs driver.py where megatron_rl.main is asked for.
[[ ${*:1:2} == "-m megatron_rl.main" ]] && set -- -m tests.slurm.driver "${@:3}"
exec "$(cd -P "$(dirname "${BASH_SOURCE[0]}")/../../.venv/bin" && pwd)/python" "$@"
