#!/usr/bin/env bash
# Makes .venv in the current directory: a link to an environment cached under the hash of requirements/, built once.
# Usage: requirements/install.sh
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
key=$(cat "$here"/{base,cpu,cpu-nodeps,dev}.txt "$here/cpu.lock" "$here/install.sh" | sha256sum | cut -c1-16)
home=${HOME:-$(getent passwd "$(id -u)" | cut -d: -f6)}
cache=${XDG_CACHE_HOME:-$home/.cache}/megatron-rl/$key

if [ ! -e "$cache/complete" ]; then
  python=
  for candidate in python3.12 python3 "${PYENV_ROOT:-$home/.pyenv}"/versions/3.12*/bin/python; do
    if "$candidate" -c 'import sys, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
      python=$candidate
      break
    fi
  done
  if [ -z "$python" ]; then
    echo "No Python 3.12 found on PATH or among pyenv's versions. Install one: 'pyenv install 3.12', or 'apt-get install python3.12 python3.12-venv'." >&2
    exit 1
  fi
  mkdir -p "$(dirname "$cache")"
  exec 9>"$cache.lock"
  flock 9 # another clone may be building the same environment
  if [ ! -e "$cache/complete" ]; then
    echo "Building the environment $cache (6.5 GB, a few minutes, once) ..."
    rm -rf "$cache"
    "$python" -m venv "$cache"
    pip() { "$cache/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
    pip -r "$here/cpu.txt" -r "$here/dev.txt"
    pip --no-deps -r "$here/cpu-nodeps.txt"
    touch "$cache/complete"
  fi
fi
ln -sfn "$cache" .venv
