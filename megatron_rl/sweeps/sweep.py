"""The points of one start of a sweep: which there are, which are there already, and their way to the end."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig

from megatron_rl.config import Config
from megatron_rl.errors import BackendError, ConfigError, DataError, LayoutError
from megatron_rl.sweeps import local, slurm
from megatron_rl.sweeps.points import COMPLETED, MISSING, Point, load, point_name, save
from megatron_rl.sweeps.table import best_reward

PLACES = ("name", "runs_dir")
"""Keys that say where a run lies: the sweep gives each point its own."""


class Jobs(Protocol):
    """Starts points and looks after them."""

    name: str
    at_once: int | None
    """Points that may be active at the same time."""
    poll_s: float
    added: Sequence[str]
    """What a point's command line gets on its way."""

    def check(self, point: Point, config: Config) -> None:
        """Raises: ConfigError or BackendError when it cannot start points like this one."""

    def command(self, point: Point, config: Config) -> list[str]:
        """What starts `point`. Raises: ConfigError where that cannot be."""

    def submit(self, point: Point, config: Config) -> Point:
        """Start it. Raises: BackendError."""

    def look(self, points: Sequence[Point]) -> list[Point]:
        """Points that it, or a sweep before, started: as they are now."""

    def leave(self, active: Sequence[Point]) -> str:
        """The sweep ends early: what becomes of these, for the user."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Points that a sweeper of Hydra's wants."""

    jobs: Jobs
    config: DictConfig
    """Of the sweep, with its `hydra` node."""
    overrides: Sequence[Sequence[str]]
    first: int
    """Place of the first in the sweep."""


class Sweep:
    """What one start knows of its points. Hydra's launchers call it, as their task function."""

    def __init__(self, directory: Path, read: Callable[[Sequence[str]], Config], *, grid: bool):
        """read: checks a run's command line. grid: all points are named before the first starts, by `run`."""
        self.directory, self._read, self._grid = directory, read, grid
        self.points: dict[str, Point] = {}
        self.configs: dict[str, Config] = {}
        self._new: list[str] = []
        """Points that `run` has not seen yet."""
        self.jobs: Jobs | None = None

    def __call__(self, batch: Batch) -> list[JobReturn]:
        """Take on a sweeper's points. Returns: for each its best eval/reward, once it has ended; a grid asks for none.

        Raises: ConfigError naming every point that cannot work, before any of them starts.
        """
        self.jobs = batch.jobs
        named = _named(batch, self.directory)
        self._check(named, batch.jobs)
        for point in named:
            if point.name not in self.points:  # which a sweeper may ask for twice
                self.points[point.name] = point
                self._new.append(point.name)
        if not self._grid:
            self.run()
        returns = []
        for point, overrides in zip(named, batch.overrides, strict=True):
            returned = JobReturn(overrides=overrides, status=JobStatus.COMPLETED)
            if not self._grid:
                returned.status, returned.return_value = _value(self.points[point.name])
            returns.append(returned)
        return returns

    def run(self) -> None:
        """Start what is missing of the points taken on since the last call, and watch them to their end."""
        assert self.jobs is not None, "a sweeper has named the points"
        jobs = self.jobs
        self._meet()
        waiting = [self.points[name] for name in self._new if self.points[name].state == MISSING]
        self._new.clear()
        if waiting:
            jobs.check(waiting[0], self.configs[waiting[0].name])
        while waiting or self.active():
            while waiting and (jobs.at_once is None or len(self.active()) < jobs.at_once):
                point = waiting.pop(0)
                self._note(jobs.submit(point, self.configs[point.name]))
            time.sleep(jobs.poll_s)
            self.look()

    def look(self) -> None:
        """See how the active points are, and write down what is new."""
        if self.jobs is not None and (active := self.active()):
            for point in self.jobs.look(active):
                self._note(point)

    def active(self) -> list[Point]:
        """Points that wait or run."""
        return [point for point in self.points.values() if point.is_active]

    def _note(self, point: Point) -> None:
        before = self.points[point.name]
        self.points[point.name] = point
        if (before.state, before.note, before.job) != (point.state, point.note, point.job):
            save(point)
            job = f"job {point.job}" if point.launcher == slurm.NAME else ""
            print("  ".join(part for part in (point.name, point.state, job, point.note) if part), flush=True)
        elif not point.is_active:
            save(point)

    def _check(self, points: Iterable[Point], jobs: Jobs) -> None:
        problems = []
        for point in points:
            try:
                config = self._read([*point.arguments, *jobs.added])
                if not self._grid and (config.mode != "train" or config.data.held_out == 0):
                    raise ConfigError(
                        f"mode={config.mode} with data.held_out={config.data.held_out} has no eval/reward, by which "
                        "the sweeper chooses its next points. Use mode=train and held-out prompts."
                    )
                jobs.command(point, config)
                self.configs[point.name] = config
            except (ConfigError, LayoutError, DataError) as error:
                problems.append(f"point {point.name}: {error}")
        if problems:
            raise ConfigError("\n  - ".join(["none of these was started.", *problems]) if problems[1:] else problems[0])

    def _meet(self) -> None:
        """Go on with what an earlier start has left. Raises: ConfigError where that was another run."""
        assert self.jobs is not None
        for point in as_they_are([found for name in self._new if (found := load(self.directory / name))]):
            wanted = self.points[point.name]
            if not point.is_active and point.state != COMPLETED:
                self.points[point.name] = replace(wanted, launcher=point.launcher, job=point.job)
                continue
            if sorted(point.overrides) != sorted(wanted.overrides):
                raise ConfigError(
                    f"{point.path} is {point.state} with {' '.join(point.overrides)}, and this sweep asks for "
                    f"{' '.join(wanted.overrides)}. Give it a directory of its own: name=... or hydra.sweep.dir=..."
                )
            if point.is_active and point.launcher != self.jobs.name:
                raise ConfigError(
                    f"{point.path} is {point.state} by hydra/launcher={point.launcher} ({point.job}). End that first, "
                    "or start the sweep with the same launcher."
                )
            self._note(replace(point, index=wanted.index))


def as_they_are(points: Sequence[Point]) -> list[Point]:
    """`points` as last written down; what was active then is looked at again. Raises: BackendError."""
    now = {point.name: point for point in points}
    for launcher in (local, slurm):
        active = [point for point in points if point.is_active and point.launcher == launcher.NAME]
        now |= {point.name: point for point in launcher.look(active)}
    return list(now.values())


def _named(batch: Batch, directory: Path) -> list[Point]:
    """The points of a batch. Raises: ConfigError for a swept key that the sweep itself sets."""
    common = set()
    for parsed in OverridesParser.create().parse_overrides(list(batch.config.hydra.overrides.task)):
        if not parsed.is_sweep_override():
            common.add(f"{parsed.get_key_element()}={parsed.get_value_element_as_str()}")
    points = []
    for i, overrides in enumerate(batch.overrides):
        swept = [override for override in overrides if override not in common]
        if own := [override for override in swept if override.lstrip("+").partition("=")[0] in PLACES]:
            raise ConfigError(
                f"{own[0].lstrip('+')}: the sweep places each point itself. To run one again, sweep over seed."
            )
        plain = (override.lstrip("+") for override in overrides)
        taken = tuple(override for override in plain if override.partition("=")[0] not in PLACES)
        name = point_name(swept)
        points.append(Point(index=batch.first + i, name=name, overrides=taken, path=directory / name))
    return points


def _value(point: Point) -> tuple[JobStatus, float | Exception]:
    """What a sweeper is told of a point."""
    best = best_reward(point.path)
    if point.state == COMPLETED and best is not None:
        return JobStatus.COMPLETED, best[0]
    return JobStatus.FAILED, BackendError(f"{point.name} is {point.state}; its log is {point.log}.")
