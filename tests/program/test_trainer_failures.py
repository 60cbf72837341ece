"""The trainer's failures: a loss that is no number, a damaged checkpoint, a full disk. None loses what was written."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.program.conftest import MIDDLE, STEPS, Finished, World
from tests.program.program import DONE, FAILED, REFUSED, Ended, finish
from tests.program.states import differences, records

pytestmark = [pytest.mark.live, pytest.mark.timeout(3600)]

LARGE_BYTES = 1 << 30
FREE_BYTES = 1 << 20
"""Left on the small disk: enough for records and logs, less than a checkpoint."""


@pytest.fixture(scope="module")
def resize_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system of so many bytes, or gives it another size."""
    path = tmp_path_factory.mktemp("disk")

    def resize(size: int) -> Path:
        options = f"size={size}" + (",remount" if path.is_mount() else "")
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
        return path

    yield resize
    if path.is_mount():
        subprocess.run(["umount", path], check=True)


@dataclass(frozen=True, slots=True)
class Mended:
    """A run that was started three times on a small disk, and its records after each."""

    path: Path
    diverged: Ended
    """With a learning rate of 1e30."""
    full: Ended
    """With the first learning rate again, and no room for another checkpoint."""
    last: Ended
    steps: tuple[list[int], list[int]]
    """Recorded after the first two."""
    kept: tuple[list[str], list[str]]
    """Checkpoints after the first two."""


@pytest.fixture(scope="module")
def mended(world: World, trained: Finished, replayed: Finished, resize_disk: Callable[[int], Path]) -> Mended:
    disk = resize_disk(LARGE_BYTES)
    path = world.cut(replayed.path, "mended", runs=disk)
    resize_disk(shutil.disk_usage(disk).used + FREE_BYTES)
    ended, steps, kept = [], [], []
    for lr, size in ((1e30, None), (1e-3, None), (1e-3, LARGE_BYTES)):
        if size:
            resize_disk(size)
        samples = trained.path / "samples.jsonl"
        arguments = world.replay_arguments("mended", samples, runs_dir=disk, algorithm__lr=lr)
        ended.append(finish(arguments, world.output("mended")))
        steps.append([r["step"] for r in records(path)])
        kept.append(sorted(p.name for p in (path / "checkpoints").iterdir()))
    return Mended(path, *ended, steps=(steps[0], steps[1]), kept=(kept[0], kept[1]))


def test_a_loss_that_is_not_a_number_is_refused(mended: Mended) -> None:
    mended.diverged.said(
        rf"(loss|gradient norm) of optimizer step {MIDDLE + 2} is nan.*no weight was changed.*Lower the learning rate",
        code=FAILED,
    )
    assert mended.steps[0] == list(range(MIDDLE + 2))  # the last one with weights of 1e30
    assert mended.kept[0] == [f"step_{MIDDLE:06d}"]


def test_a_full_disk_at_a_save_says_so_and_loses_no_checkpoint(mended: Mended) -> None:
    mended.full.said(
        rf"(?s)checkpoint of step {STEPS} could not be written .*, where \d\.\d MB were free: .*"
        "Earlier .* are untouched",
        code=FAILED,
    )
    assert mended.steps[1] == list(range(STEPS + 1))
    assert mended.kept[1] == [f"step_{MIDDLE:06d}"]


def test_with_the_mends_the_run_ends_as_if_nothing_had_happened(mended: Mended, replayed: Finished) -> None:
    assert mended.last.code == DONE, mended.last.text
    assert differences(replayed.path, mended.path, step=STEPS) == []
    assert records(mended.path) == records(replayed.path)


def test_a_damaged_checkpoint_is_named(world: World, trained: Finished, replayed: Finished) -> None:
    path = world.cut(replayed.path, "damaged")
    damaged = path / f"checkpoints/step_{MIDDLE:06d}/weights/__0_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])

    ended = finish(world.replay_arguments("damaged", trained.path / "samples.jsonl"), world.output("damaged"))

    ended.said(r"step_000003/weights is damaged \(EOFError.*Remove the directory .*step_000003: the same", code=REFUSED)
