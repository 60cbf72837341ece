"""Points as jobs of Slurm: one `sbatch launch/slurm_grpo.sh` each. Needs sbatch and squeue, and no accounting."""

import logging
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rl.arrangement import cpus_of_node
from megatron_rl.config import Config
from megatron_rl.errors import BackendError, ConfigError
from megatron_rl.run_directory import read_ending
from megatron_rl.sweeps.points import COMPLETED, ENDED, MISSING, SUBMITTING, Point, as_ended, begin

logger = logging.getLogger(__name__)

NAME = "slurm_grpo"
SCRIPT = Path(__file__).parents[2] / "launch" / "slurm_grpo.sh"
OURS = ("array", "comment", "job-name", "open-mode", "output", "parsable", "test-only", "wait", "wrap")
"""Options of sbatch that the sweep sets for each point, or that would make it something else."""
SPREAD = ("gpus", "gpus-per-task")
"""Options that the job script refuses."""
_TIMEOUT_S = 120.0
"""For one answer of a busy controller."""
_SILENCE_S = 600.0
"""That the controller may not answer squeue before the sweep gives up watching."""


class Slurm:
    """Submits points, at most `at_once` of them in the queue at the same time."""

    name = NAME
    added: Sequence[str] = ("cluster.address=auto",)
    """The job script says where its Ray is."""

    def __init__(self, *, sbatch: Mapping[str, Any], at_once: int | None, poll_s: float, script: str | None) -> None:
        """sbatch: options by name, with - or _; true gives one without a value, null and false none."""
        if at_once is not None and at_once < 1:
            raise ConfigError(f"hydra.launcher.at_once={at_once} lets nothing run. Set it to 1 or more, or to null.")
        self.at_once, self.poll_s = at_once, poll_s
        self._script = Path(script).absolute() if script else SCRIPT
        self._given = {str(key).replace("_", "-"): value for key, value in sbatch.items()}
        if ours := [key for key in self._given if key in OURS]:
            raise ConfigError(
                f"hydra.launcher.sbatch.{ours[0]} is set by the sweep, for each point. Remove it from the command."
            )
        if spread := [key for key in self._given if key in SPREAD]:
            raise ConfigError(
                f"hydra.launcher.sbatch.{spread[0]} gives no node GPUs of its own, and the job script refuses it. Set "
                "hydra.launcher.sbatch.gpus_per_node, or gres."
            )
        if self._given.get("dependency"):  # else a job whose dependency failed waits for ever, and the sweep with it
            self._given.setdefault("kill-on-invalid-dep", "yes")
        self._answered_s = time.monotonic()

    def check(self, point: Point, config: Config) -> None:
        """Ask Slurm whether it would take a job like this. Raises: ConfigError, BackendError."""
        if not self._script.is_file():
            raise ConfigError(f"{self._script} is not there. Name the job script: hydra.launcher.script=PATH.")
        for tool in ("sbatch", "squeue"):
            if shutil.which(tool) is None:
                raise ConfigError(
                    f"{tool} is not on PATH: this machine submits nothing to Slurm. Start the sweep on a login node, "
                    "or without hydra/launcher."
                )
        command = ["sbatch", "--test-only", *self.command(point, config)[1:]]
        _call(command, what="Slurm would not take the sweep's jobs")

    def command(self, point: Point, config: Config) -> list[str]:
        """What submits it. The comment is how a job is found again whose number was not written down.

        cluster.nodes and what their ranks take are asked of Slurm too. Raises: ConfigError where sbatch's are others,
        and for paths that mean another place in the job.
        """
        clone = self._script.resolve().parent.parent
        for key, path in (
            ("model.path", config.model.path),
            ("data.path", config.data.path),
            ("samples", config.samples),
        ):
            if path is not None and not Path(path).is_absolute() and Path.cwd() != clone:
                raise ConfigError(
                    f"{key}={path}: jobs run in {clone}, and this is {Path.cwd()}. Write the whole path, or start the "
                    "sweep there."
                )
        cluster, wanted = config.cluster, dict(self._given)
        if cluster.nodes is not None:
            if (asked := wanted.setdefault("nodes", cluster.nodes)) != cluster.nodes:
                raise ConfigError(
                    f"hydra.launcher.sbatch.nodes={asked} and cluster.nodes={cluster.nodes}: the layout was checked "
                    "against the latter. Leave the former out, or set both to the same."
                )
            if not wanted.keys() & {"gpus-per-node", "gres"}:
                wanted["gpus-per-node"] = cluster.gpus_per_node
            wanted.setdefault("cpus-per-task", cpus_of_node(cluster.gpus_per_node))
        options = [f"--{k}" if v is True else f"--{k}={v}" for k, v in wanted.items() if v not in (None, False)]
        output = str(point.log).replace("%", "%%")
        ours = [f"--job-name={point.name}", f"--comment={point.path}", f"--output={output}", "--open-mode=append"]
        return ["sbatch", "--parsable", *options, *ours, str(self._script), *point.arguments]

    def submit(self, point: Point, config: Config) -> Point:
        """Submit its job. Raises: BackendError with Slurm's own words."""
        point = begin(point, launcher=NAME)
        what = f"Slurm did not take {point.name} (hydra.launcher.at_once limits how many are in the queue)"
        job = _call(self.command(point, config), what=what).strip().partition(";")[0]
        return replace(point, state="PENDING", job=job)

    def look(self, points: Sequence[Point]) -> list[Point]:
        """As `look`; while the controller is silent, as they were. Raises: BackendError when it stays so."""
        try:
            now = look(points)
        except BackendError as error:
            if time.monotonic() - self._answered_s > _SILENCE_S:
                raise
            logger.warning("%s Asking again.", error)
            return list(points)
        self._answered_s = time.monotonic()
        return now

    def leave(self, active: Sequence[Point]) -> str:
        """The sweep was interrupted: say what goes on without it, and how to end that."""
        jobs = " ".join(point.job for point in active)
        return f"{len(active)} job(s) go on. The same command watches them again. To end them: scancel {jobs}"


@dataclass(frozen=True, slots=True)
class _Row:
    """A job, as squeue prints it."""

    job: str
    state: str
    used: str
    reason: str
    comment: str


def look(points: Sequence[Point]) -> list[Point]:
    """`points`, active when last looked at, as they are now. Raises: BackendError when Slurm does not answer."""
    if not points:
        return []
    owner = points[0].path.parent.stat().st_uid  # not who looks
    command = ["squeue", "--noheader", f"--user={owner}", "--states=all", "--format=%A|%T|%M|%r|%k"]
    listed = _call(command, what="Slurm does not say how the jobs are")
    rows = [_Row(*line.strip().split("|", 4)) for line in listed.splitlines() if line.count("|") >= 4]
    return [_look(point, rows) for point in points]


def _look(point: Point, rows: Sequence[_Row]) -> Point:
    if point.state == SUBMITTING:  # the sweep was killed before it wrote down the number, which is none of before
        mine = [row for row in rows if row.comment == str(point.path) and int(row.job) > int(point.job or 0)]
    else:
        mine = [row for row in rows if row.job == point.job]
    if not mine:  # Slurm forgets a job minutes after its end
        return replace(point, state=MISSING) if point.state == SUBMITTING else as_ended(point)
    row = mine[-1]
    now = replace(point, job=row.job, state=row.state, note="", seconds=_seconds(row.used))
    if row.state == "PENDING" and row.reason != "None":
        return replace(now, note=row.reason)
    if row.state in ENDED and row.state != COMPLETED and (ending := read_ending(point.path)):
        return replace(now, note=ending.error)
    return now


def _seconds(used: str) -> float | None:
    """Of squeue's [days-][hours:]minutes:seconds."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", used)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _call(command: Sequence[str], *, what: str) -> str:
    # What the user likes squeue to show, and how, is not for us.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendError(f"{what}: {error}.") from error
    if done.returncode:
        raise BackendError(f"{what}: {done.stderr.strip() or done.returncode}.")
    return done.stdout
