"""`megatron-rl -m`: reads the command line, lets Hydra's sweeper name the points, prints the table, says the exit code.

Hydra's basic sweeper names all points at once, so all are checked before the first starts. Another one
(hydra/sweeper=optuna) waits for the results of its points to choose the next.
"""

import contextlib
import fcntl
import importlib
import importlib.util
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException

from megatron_rl.config import Config
from megatron_rl.config_loading import CONFIG_DIR, as_hydra_takes
from megatron_rl.errors import BackendError, ConfigError
from megatron_rl.run_plan import describe, plan_run
from megatron_rl.sweeps.points import COMPLETED, Point, load, quoted
from megatron_rl.sweeps.sweep import Sweep, as_they_are
from megatron_rl.sweeps.table import table

FLAGS = ("-m", "--multirun", "--dry-run")
DONE, FAILED, INTERRUPTED = 0, 1, 130
_SWEEP_DIR = "hydra.sweep.dir="
_OF_HYDRA = ("hydra/launcher=", "hydra/sweeper", "hydra.launcher.", "hydra.sweeper.", _SWEEP_DIR)
_LAUNCHERS = ("local", "slurm_grpo")
_OPTUNA = "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper"
_PLUGINS = (
    "hydra_plugins.megatron_rl_launchers.LocalLauncher",
    "hydra_plugins.megatron_rl_launchers.SlurmLauncher",
    f"{_OPTUNA}.OptunaSweeper",
)
_SITES = (Path(__file__).parent / "plugin_site", Path(__file__).parents[2] / "build" / "optuna")
"""Where they lie; the latter is where `make optuna` puts it, in a clone."""


def run_sweep(arguments: Sequence[str], read: Callable[[Sequence[str]], Config]) -> int:
    """Run the points that `arguments`, with -m among them, ask for. `read` checks the command line of one run.

    Returns the exit code: 0 every point is done, 1 one is not, 130 interrupted. Raises: ConfigError, BackendError.
    """
    if wrong := [a for a in arguments if a.startswith("-") and a not in FLAGS]:
        raise ConfigError(f"{wrong[0]} is no option of a sweep. There are {', '.join(FLAGS)}.")
    _show_plugins()
    overrides, dry_run = _overrides([a for a in arguments if a not in FLAGS]), "--dry-run" in arguments
    grid = not any(o.startswith("hydra/sweeper=") and o != "hydra/sweeper=basic" for o in overrides)
    if dry_run and not grid:
        raise ConfigError(
            "--dry-run with hydra/sweeper: its points come from the results of points before. Leave the sweeper out "
            "and give each swept key a list of values."
        )
    with _hydra_errors(), initialize_config_dir(version_base=None, config_dir=str(CONFIG_DIR)):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        directory = _directory(hydra, overrides)
    sweep = Sweep(directory, read, grid=grid)
    with contextlib.ExitStack() as stack:
        # Hydra writes into its sweep directory before it has named a point of a grid.
        scratch = stack.enter_context(tempfile.TemporaryDirectory()) if grid else None
        if not grid:
            stack.enter_context(_owned(directory))
        task = [o for o in overrides if not o.startswith(_SWEEP_DIR)]
        try:
            with _hydra_errors():
                task.append(f"{_SWEEP_DIR}{quoted(scratch or str(directory))}")
                hydra.multirun("config", sweep, task, with_log_configuration=False)
            if dry_run:
                return _print_plans(sweep)
            if grid:
                stack.enter_context(_owned(directory))
                sweep.run()
        except KeyboardInterrupt:
            print(f"\ninterrupted. {_leave(sweep)}", file=sys.stderr)
            return INTERRUPTED
        except BackendError as error:
            raise BackendError(f"{error} {_leave(sweep)}") from error
        return _verdict(sweep)


def _show_plugins() -> None:
    """Let Hydra find our launchers, and Optuna's sweeper where it is installed."""
    for path in _SITES:
        if path.is_dir() and str(path) not in sys.path:
            sys.path.append(str(path))
    plugins = Plugins.instance()
    for plugin in _PLUGINS:  # it finds them itself, unless it had looked around before
        package, _, name = plugin.rpartition(".")
        if _installed(package):
            plugins.register(getattr(importlib.import_module(package), name))


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even its package
        return False


def _overrides(given: Sequence[str]) -> list[str]:
    """As Hydra takes them, with the launcher named. Raises: ConfigError for what nothing reads."""
    taken: list[str] = []
    for override in given:
        key, equals, value = override.partition("=")
        if not override.startswith("hydra"):
            taken.append(_checked(override))
        elif not override.startswith(_OF_HYDRA) or not equals:
            raise ConfigError(f"{override} has no effect on a sweep. Of Hydra's keys there are {', '.join(_OF_HYDRA)}.")
        elif key == "hydra/launcher" and value not in _LAUNCHERS:
            raise ConfigError(f"{override} cannot start this program. Choose one of {', '.join(_LAUNCHERS)}.")
        elif key == "hydra.sweeper.max_batch_size":
            raise ConfigError(f"{override} has no effect. To limit the jobs in the queue set hydra.launcher.at_once.")
        else:
            taken.append(f"++{override}" if key.startswith("hydra.launcher.sbatch.") else override)
    if not any(o.startswith("hydra/launcher=") for o in taken):
        taken.append("hydra/launcher=local")
    if "hydra/sweeper=optuna" in taken:
        if not _installed(_OPTUNA):
            raise ConfigError("hydra/sweeper=optuna: hydra-optuna-sweeper is not installed. In a clone: make optuna")
        if not any(o.startswith("hydra.sweeper.direction=") for o in taken):
            taken.append("hydra.sweeper.direction=maximize")  # Optuna's own is down, and rewards go up
    return taken


def _checked(override: str) -> str:
    """One of the program's own, each of whose values may be given to it."""
    key, equals, _ = override.partition("=")
    values = [override]
    if equals and not key.startswith("~"):
        with _hydra_errors():
            parsed = OverridesParser.create().parse_override(override)
            if parsed.is_interval_sweep():
                values = [f"{key}={parsed.value().start}"]  # type: ignore[union-attr]
            elif parsed.is_sweep_override():
                values = [f"{key}={value}" for value in parsed.sweep_string_iterator()]
    return ("++" if as_hydra_takes(values)[0].startswith("++") else "") + override.lstrip("+")


def _directory(hydra: Any, overrides: Sequence[str]) -> Path:
    """Where the points' run directories go. Raises: ConfigError where nothing says it."""
    config = hydra.compose_config("config", list(overrides), run_mode=RunMode.MULTIRUN, with_log_configuration=False)
    if any(override.startswith(_SWEEP_DIR) for override in overrides):
        return Path(config.hydra.sweep.dir).absolute()
    if config.get("name") is None:
        raise ConfigError("The sweep has no name. Set name=..., which its directory is called by.")
    return Path(config.get("runs_dir", "runs"), f"{config.name}-sweep").absolute()


@contextlib.contextmanager
def _hydra_errors() -> Iterator[None]:
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        if isinstance(error.__cause__, ConfigError):  # a launcher's
            raise error.__cause__ from error
        raise ConfigError(f"The sweep cannot be composed: {str(error).splitlines()[0]}") from error


@contextlib.contextmanager
def _owned(directory: Path) -> Iterator[None]:
    """One process at a time submits points there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"The sweep's directory {directory} cannot be made: {error}. Choose another.") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"Another process runs the sweep in {directory}: two would submit its points twice. To see how far it "
                f"is: python -m megatron_rl.sweeps {shlex.quote(str(directory))}"
            ) from error
        yield


def _print_plans(sweep: Sweep) -> int:
    """What would be started, and what each point would take."""
    assert sweep.jobs is not None
    syncs: dict[str, Any] = {}
    for point in _in_order(sweep.points.values()):
        config = sweep.configs[point.name]
        found = load(point.path)
        state = f"  (here already: {as_they_are([found])[0].state})" if found else ""
        print(f"{point.name}{state}\n  {shlex.join(sweep.jobs.command(point, config))}")
        # Points mostly share their layout, and the plan of a thousand ranks' sync takes seconds.
        layout = repr((config.mode, config.model, config.parallel, config.trainer, config.rollout, config.cluster))
        planned = plan_run(config, with_sync=layout not in syncs)
        syncs.setdefault(layout, planned.sync)
        print(textwrap.indent(describe(config, replace(planned, sync=syncs[layout])), "  "))
    return DONE


def _leave(sweep: Sweep) -> str:
    """See to what still runs, as the launcher does, and print the table. Returns: what became of it."""
    active = sweep.active()
    text = "Nothing runs. The same command goes on with what is missing."
    if sweep.jobs is not None and active:
        text = sweep.jobs.leave(active)
        with contextlib.suppress(BackendError):  # the states as last seen then
            sweep.look()
    print(table(_in_order(sweep.points.values())))
    return text


def _verdict(sweep: Sweep) -> int:
    print(table(_in_order(sweep.points.values())))
    missed = [point for point in sweep.points.values() if point.state != COMPLETED]
    if missed:
        print(
            f"\nfailed: {len(missed)} of {len(sweep.points)} points are not done. The same command runs them again.",
            file=sys.stderr,
        )
    return FAILED if missed else DONE


def _in_order(points: Iterable[Point]) -> list[Point]:
    return sorted(points, key=lambda point: point.index)
