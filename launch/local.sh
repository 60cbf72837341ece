#!/usr/bin/env bash
# A run on this machine, without Slurm, from any directory:  launch/local.sh experiment=NAME key=value ...
#
# The program starts Ray, trainer and engines itself, and ends them. This gives it the clone as its directory, as
# launch/slurm_grpo.sh does, and its interpreter: exit codes, the logs in the run directory, and what SIGUSR1 and
# SIGTERM do to this process are the program's own. MRL_PYTHON as there.
set -euo pipefail
unset CDPATH
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -z ${MRL_PYTHON:-} ]]; then
  [[ -x .venv/bin/python ]] || requirements/install.sh
  MRL_PYTHON=$(cd -P .venv/bin && pwd)/python # Ray starts no interpreter whose path has spaces
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec "$MRL_PYTHON" -m megatron_rl.main "$@"
