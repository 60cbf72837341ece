"""Entry point: the command line, signals, exit codes. What can be refused by the config alone is refused here."""

import logging
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack

from megatron_rl.checkpoint import Stopped
from megatron_rl.checks import check
from megatron_rl.config import Config
from megatron_rl.config_loading import load_config, to_yaml
from megatron_rl.errors import BackendError, ConfigError, DataError, LayoutError, SyncError
from megatron_rl.rollout.options import check_sglang_options
from megatron_rl.run import run_mode
from megatron_rl.run_directory import RunDirectory

logger = logging.getLogger(__name__)

USAGE = """usage: megatron-rl [-m [--dry-run]] experiment=NAME [key=value ...]

  experiment=NAME   a file of configs/experiment, for example cpu_digits
  key=value         any key of megatron_rl/config.py, for example name=demo algorithm.lr=1e-4
  --cfg job         prints the config that this makes, all keys, and starts nothing
  -m                a sweep: one run for each of key=value,value; hydra/launcher=slurm_grpo submits each to Slurm
  --dry-run         prints what the sweep would start, and what each run would take
"""
DONE, FAILED, REFUSED, STOPPED, INTERRUPTED = 0, 1, 2, 85, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for.

    Returns: the exit code: 0 done, 1 failed, 2 refused, 85 stopped by SIGUSR1 after a checkpoint, 130 interrupted.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE)
        return DONE if arguments else REFUSED
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGUSR1, _stop)
    warnings.filterwarnings("ignore", module=r"megatron\.core")  # that Transformer Engine is not there
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # nor a CUDA runtime
    try:
        if {"-m", "--multirun"} & set(arguments):
            from megatron_rl.sweeps.command import run_sweep

            return run_sweep(arguments, read=read_config)
        if "--cfg" in arguments:  # as Hydra has it
            print(to_yaml(load_config([a for a in arguments if a not in ("--cfg", "job")])), end="")
            return DONE
        config = read_config(arguments)
        with RunDirectory(config) as run, ExitStack() as stack:
            run_mode(config, run, stack)
        return DONE
    except (ConfigError, LayoutError, DataError) as error:
        print(f"\nrefused: {error}", file=sys.stderr)
        return REFUSED
    except (SyncError, BackendError) as error:
        print(f"\nfailed: {error}", file=sys.stderr)
        return FAILED
    except Stopped as stopped:
        print(f"\nstopped: {stopped}", file=sys.stderr)
        return STOPPED
    except (KeyboardInterrupt, SystemExit):  # the latter from Ray's handler of SIGTERM, while Ray starts
        print("\ninterrupted; the same command resumes from the newest checkpoint", file=sys.stderr)
        return INTERRUPTED


def read_config(arguments: Sequence[str]) -> Config:
    """The config of one run. Raises: ConfigError, LayoutError or DataError for what cannot work."""
    if of_sweep := [a for a in arguments if a == "--dry-run" or a.startswith(("hydra.", "hydra/"))]:
        raise ConfigError(f"{of_sweep[0]} belongs to a sweep, which starts with -m. Add that, or leave this out.")
    config = load_config(arguments)
    check(config)
    direct = [f"weights.{key}" for key in ("verify", "delta") if getattr(config.weights, key)]
    check_sglang_options(config.rollout.sglang, direct=direct, fp8=config.rollout.fp8)
    return config


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _stop(*_: object) -> None:
    """SIGUSR1 where there is nothing to save: before training, and with mode=rollout_only."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    raise Stopped("there was nothing to save yet. The same command goes on")


if __name__ == "__main__":
    sys.exit(main())
