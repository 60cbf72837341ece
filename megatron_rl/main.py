"""Entry point and composition root: the only file that names the concrete classes behind the loop's parts.

Everything that can be refused is refused here before Ray starts; heavy imports come after that.
"""

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from megatron_rl.checks import check
from megatron_rl.config import Config, load_config
from megatron_rl.errors import BackendError, ConfigError, DataError, LayoutError, SyncError
from megatron_rl.run_directory import RunDirectory

logger = logging.getLogger(__name__)

USAGE = """usage: megatron-rl experiment=NAME [key=value ...]

  experiment=NAME   a file of configs/experiment, for example cpu_digits
  key=value         any key of megatron_rl/config.py, for example name=demo algorithm.lr=1e-4
"""
REFUSED, FAILED, INTERRUPTED = 2, 1, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for. Returns the exit code: 0 done, 1 failed, 2 refused, 130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or set(arguments) & {"-h", "--help"}:
        print(USAGE)
        return 0 if arguments else REFUSED
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        config = load_config(arguments)
        check(config)
        with RunDirectory(config) as run:
            MODES[config.mode](config, run)
        return 0
    except (ConfigError, LayoutError, DataError) as error:
        print(f"\nrefused: {error}", file=sys.stderr)
        return REFUSED
    except (SyncError, BackendError) as error:
        print(f"\nfailed: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("\ninterrupted; the same command resumes from the last checkpoint", file=sys.stderr)
        return INTERRUPTED


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
