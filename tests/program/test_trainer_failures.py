"""The trainer's failures: a loss that is no number, a damaged checkpoint, a full disk. None loses what was written."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.program.conftest import MIDDLE, STEPS, Finished, World
from tests.program.program import DONE, FAILED, REFUSED, finish
from tests.program.states import differences, records

pytestmark = [pytest.mark.live, pytest.mark.timeout(3600)]

FREE_BYTES = 1 << 20
"""Left on the small disk: enough for records and logs, less than a checkpoint."""


def test_a_loss_that_is_not_a_number_is_refused_and_a_lower_rate_resumes(
    world: World, trained: Finished, replayed: Finished
) -> None:
    path = world.cut(replayed.path, "diverged")

    def arguments(lr: float) -> list[str]:
        return world.replay_arguments("diverged", trained.path / "samples.jsonl", algorithm__lr=lr)

    finish(arguments(1e30), world.output("diverged")).said(
        rf"(loss|gradient norm) of optimizer step {MIDDLE + 2} is nan.*no weight was changed.*Lower the learning rate",
        code=FAILED,
    )
    assert [r["step"] for r in records(path)] == list(range(MIDDLE + 2))  # the last one with weights of 1e30

    ended = finish(arguments(1e-3), world.output("mended"))
    assert ended.code == DONE, ended.text
    assert differences(replayed.path, path, step=STEPS) == []
    assert records(path) == records(replayed.path)


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("rank-1.pt", r"rank-1\.pt is damaged .*Remove the directory .*step_000003: the same command then resumes"),
        (
            "weights/__0_0.distcp",
            r"step_000003/weights is damaged \(EOFError.*Remove the directory .*step_000003: the same",
        ),
    ],
)
def test_a_damaged_checkpoint_is_named(
    world: World, trained: Finished, replayed: Finished, file: str, pattern: str
) -> None:
    path = world.cut(replayed.path, "damaged" + file.replace("/", "-"))
    damaged = path / f"checkpoints/step_{MIDDLE:06d}" / file
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])

    ended = finish(world.replay_arguments(path.name, trained.path / "samples.jsonl"), world.output("damaged"))

    ended.said(pattern, code=REFUSED)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system of so many bytes, or gives it another size."""
    path = tmp_path / "disk"
    path.mkdir()

    def resize(size: int) -> Path:
        options = f"size={size}" + (",remount" if path.is_mount() else "")
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
        return path

    yield resize
    if path.is_mount():
        subprocess.run(["umount", path], check=True)


def test_a_full_disk_at_a_save_loses_no_checkpoint_and_the_run_resumes(
    world: World, trained: Finished, replayed: Finished, small_disk: Callable[[int], Path]
) -> None:
    disk = small_disk(1 << 30)
    path = world.cut(replayed.path, "full", runs=disk)
    used = shutil.disk_usage(disk).used
    small_disk(used + FREE_BYTES)
    arguments = world.replay_arguments("full", trained.path / "samples.jsonl", runs_dir=disk)

    finish(arguments, world.output("full")).said(
        rf"checkpoint of step {STEPS} could not be written .*, where \d\.\d MB were free: .*Earlier .* are untouched",
        code=FAILED,
    )
    assert [p.name for p in (path / "checkpoints").iterdir()] == [f"step_{MIDDLE:06d}"]
    assert [r["step"] for r in records(path)] == list(range(STEPS + 1))

    small_disk(1 << 30)
    ended = finish(arguments, world.output("space"))
    assert ended.code == DONE, ended.text
    assert differences(replayed.path, path, step=STEPS) == []
    assert records(path) == records(replayed.path)
