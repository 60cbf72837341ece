"""One point of a sweep: its name, its run directory below the sweep's, and the file there that says how far it is."""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatron_rl.errors import BackendError, DataError
from megatron_rl.run_directory import ENDING, INTERRUPTED, read_ending

MISSING, SUBMITTING, RUNNING, COMPLETED, FAILED, CANCELLED = (
    *("MISSING", "SUBMITTING", "RUNNING", "COMPLETED", "FAILED", "CANCELLED"),
)
ENDED = (
    *(MISSING, COMPLETED, FAILED, CANCELLED, "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"),
    *("PREEMPTED", "REVOKED", "LAUNCH_FAILED"),
)
"""States in which nothing runs or waits; all others are Slurm's words for jobs that do."""
_FILE = "point.json"
_LONGEST_NAME = 100


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep. States are Slurm's words, for local runs too."""

    index: int
    """Place in its sweep."""
    name: str
    overrides: tuple[str, ...]
    """As the program takes them, without those that place the run."""
    path: Path
    """The run directory."""
    launcher: str = ""
    """That started it last."""
    job: str = ""
    """Slurm's number, or a process of this machine as PID@START."""
    state: str = MISSING
    note: str = ""
    """Why it waits, or why it failed."""
    seconds: float | None = None
    """Of its last job or process."""

    @property
    def arguments(self) -> list[str]:
        """The program's command line."""
        return [*self.overrides, f"runs_dir={quoted(str(self.path.parent))}", f"name={quoted(self.name)}"]

    @property
    def log(self) -> Path:
        """What its processes print, start after start."""
        return self.path / "log" / "job.log"

    @property
    def is_active(self) -> bool:
        """Whether it waits or runs."""
        return self.state not in ENDED


def quoted(value: str) -> str:
    """A value for Hydra's grammar, in quotes where it would not be read as plain text."""
    if re.fullmatch(r"(/|[A-Za-z]+_)[\w/.+-]*", value, flags=re.ASCII):
        return value
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", value)
    return f"'{escaped}'"


def point_name(swept: Iterable[str]) -> str:
    """A name for the overrides that tell a point from the others of its sweep: "lr_1e-6+seed_3".

    It depends on keys and values alone, not on their order. Keys are cut to their last part where that tells them
    apart. A value that no directory can be called by leaves a digest in the name.
    """
    pairs = sorted(override.lstrip("+").partition("=")[::2] for override in swept)
    keys = [key for key, _ in pairs]
    leaves = [re.split(r"[./]", key)[-1] for key in keys]
    short = leaves if len(set(leaves)) == len(leaves) else keys
    exact = "+".join(f"{key}_{value}" for key, (_, value) in zip(short, pairs, strict=True))
    name = re.sub(r"[^\w.+-]+", "-", exact, flags=re.ASCII).strip("-")
    if name == exact and len(name) <= _LONGEST_NAME:
        return name or "one_point"
    digest = hashlib.sha256("\n".join("=".join(pair) for pair in pairs).encode()).hexdigest()[:8]
    return f"{name[:_LONGEST_NAME]}-{digest}"


def save(point: Point) -> None:
    """Write it into its run directory. Raises: BackendError when the disk refuses."""
    values = {key: value for key, value in asdict(point).items() if key != "path"}
    partial = point.path / f"{_FILE}.partial"
    try:
        point.log.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(values, indent=1) + "\n")
        partial.rename(point.path / _FILE)
    except OSError as error:
        raise BackendError(
            f"{point.path / _FILE} cannot be written ({error.strerror}), so nobody would know of its job. Free space "
            "there and start the same command again."
        ) from error


def begin(point: Point, *, launcher: str) -> Point:
    """Note that `point` is about to be started, and forget how an earlier start ended. `job` is still the old one's."""
    job = point.job if point.launcher == launcher else ""
    begun = replace(point, launcher=launcher, job=job, state=SUBMITTING, note="", seconds=None)
    save(begun)
    (point.path / ENDING).unlink(missing_ok=True)
    return begun


def load(path: Path) -> Point | None:
    """The point whose run directory `path` is, as last saved; None where there is none. Raises: DataError."""
    file = path / _FILE
    try:
        values = json.loads(file.read_text())
        return Point(**{**values, "overrides": tuple(values["overrides"]), "path": path})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{file} does not describe a point of a sweep ({error}): it was changed after it was written. Put it back, "
            "or remove the directory to run the point again."
        ) from error


def load_all(directory: Path) -> list[Point]:
    """Every point of the sweep in `directory`, in order. Raises: DataError."""
    found = [point for file in directory.glob(f"*/{_FILE}") if (point := load(file.parent))]
    return sorted(found, key=lambda point: (point.index, point.name))


def as_ended(point: Point) -> Point:
    """`point`, of which nothing runs any more, in the state that its run recorded at its end: FAILED if it did not."""
    ending = read_ending(point.path)
    if ending is None:
        return replace(point, state=FAILED, note="ended without a word")
    state = {"": COMPLETED, INTERRUPTED: CANCELLED}.get(ending.error, FAILED)
    return replace(point, state=state, note=ending.error if state == FAILED else "", seconds=ending.seconds)
