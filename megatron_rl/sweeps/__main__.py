"""Prints how far the sweep in a directory is, also while it runs. Changes nothing.

python -m megatron_rl.sweeps DIR
"""

import sys
from pathlib import Path

from megatron_rl.errors import BackendError, ConfigError, DataError
from megatron_rl.sweeps.points import load_all
from megatron_rl.sweeps.sweep import as_they_are
from megatron_rl.sweeps.table import table


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 printed, 2 refused."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(__doc__)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    try:
        points = load_all(Path(arguments[0]).absolute())
        if not points:
            raise ConfigError(f"{arguments[0]} holds no points of a sweep. Name a directory that a sweep has made.")
        try:
            points = as_they_are(points)
        except BackendError as error:
            print(f"{error} What follows is as last written down.", file=sys.stderr)
        print(table(points))
    except (ConfigError, DataError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
