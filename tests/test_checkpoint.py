import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.checkpoint import Checkpoints, Stopped, complete, read_state
from megatron_rl.errors import BackendError, DataError


class Files:
    """A trainer's file side: what `save` writes, `load` reads back."""

    def __init__(self, weights: str = "") -> None:
        self.weights = weights

    def save(self, directory: Path) -> None:
        (directory / "rank_0").write_text(self.weights)

    def load(self, directory: Path) -> None:
        self.weights = (directory / "rank_0").read_text()


class Cursor:
    def __init__(self, position: int = 0) -> None:
        self.position = position

    def state(self) -> dict[str, Any]:
        return {"position": self.position}

    def restore(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def checkpoints(directory: Path, **changes: Any) -> Checkpoints:
    arguments: dict[str, Any] = {
        "trainer": Files(), "prompts": Cursor(), "steps": 7, "every": 3, "keep": 2
    }  # fmt: skip
    return Checkpoints(directory, **(arguments | changes))


def test_a_fresh_run_has_nothing_to_restore(tmp_path: Path) -> None:
    assert checkpoints(tmp_path / "none").restore() is None


def test_restore_gives_back_weights_cursor_and_step(tmp_path: Path) -> None:
    checkpoints(tmp_path, trainer=Files("w6"), prompts=Cursor(60)).save(6)
    later = checkpoints(tmp_path)

    assert later.restore() == 6
    assert (later.trainer.weights, later.prompts.position) == ("w6", 60)


def test_a_directory_without_a_state_is_no_checkpoint(tmp_path: Path) -> None:
    checkpoints(tmp_path, trainer=Files("w3"), prompts=Cursor(30)).save(3)
    (tmp_path / "step_000006").mkdir()  # as of one that was copied in part

    assert checkpoints(tmp_path).restore() == 3


def test_due_at_every_third_step_and_the_last(tmp_path: Path) -> None:
    assert [s for s in range(1, 8) if checkpoints(tmp_path).due(s)] == [3, 6, 7]
    assert not any(checkpoints(tmp_path, every=0).due(s) for s in range(1, 8))


@pytest.mark.parametrize("every", [3, 0])
def test_who_is_asked_to_stop_saves_the_step_in_work_and_stops(tmp_path: Path, every: int) -> None:
    run = checkpoints(tmp_path, every=every)
    run.stop_if_asked("nothing")
    assert not run.due(2)

    run.stop_soon()

    assert run.due(2)
    with pytest.raises(Stopped, match=r"step_000002 is saved. The same command resumes"):
        run.save(2)
    assert checkpoints(tmp_path).restore() == 2


def test_the_last_step_is_saved_and_the_run_goes_on_to_its_end_though_asked_to_stop(tmp_path: Path) -> None:
    run = checkpoints(tmp_path)
    run.stop_soon()

    assert run.save(7) == tmp_path / "step_000007"


def test_who_is_asked_to_stop_where_nothing_can_be_saved_says_what_is_lost(tmp_path: Path) -> None:
    run = checkpoints(tmp_path)
    run.stop_soon()

    with pytest.raises(Stopped, match=r"5 steps are lost. The same command starts again"):
        run.stop_if_asked("5 steps are lost")


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (3, 6, 7):
        checkpoints(tmp_path).save(step)

    assert [step for step, _ in complete(tmp_path)] == [6, 7]


def test_a_checkpoint_is_replaced_when_its_step_is_saved_again(tmp_path: Path) -> None:
    checkpoints(tmp_path, trainer=Files("old")).save(3)
    checkpoints(tmp_path, trainer=Files("new")).save(3)
    later = checkpoints(tmp_path)
    later.restore()

    assert later.trainer.weights == "new"


def test_a_killed_save_leaves_the_earlier_checkpoint_the_newest(tmp_path: Path) -> None:
    checkpoints(tmp_path, trainer=Files("w3")).save(3)
    killed = textwrap.dedent(f"""
        import os, signal, sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_checkpoint import Files, checkpoints
        class Killed(Files):
            def save(self, directory):
                super().save(directory)
                os.kill(os.getpid(), signal.SIGKILL)
        checkpoints(Path({str(tmp_path)!r}), trainer=Killed("w6")).save(6)
    """)
    done = subprocess.run([sys.executable, "-c", killed], cwd=Path(__file__).parents[1])
    assert done.returncode == -signal.SIGKILL

    later = checkpoints(tmp_path)
    assert later.restore() == 3
    assert later.trainer.weights == "w3"
    later.save(6)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["step_000003", "step_000006"]


def test_a_killed_removal_leaves_nothing_that_looks_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (2, 3):
        checkpoints(tmp_path).save(step)
    seen = []
    rmtree = shutil.rmtree

    def killed(path: Path, **options: Any) -> None:
        seen.append([step for step, _ in complete(tmp_path)])
        if path.name == "step_000002":
            raise OSError(4, os.strerror(4))  # the process ends here; the files are still there
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", killed)
    checkpoints(tmp_path).save(6)
    assert seen[-1] == [3, 6]
    assert (tmp_path / "step_000002" / "rank_0").exists()


def test_what_kills_have_left_is_removed_by_the_next_save_and_nothing_else_is(tmp_path: Path) -> None:
    """A killed save of step 5 is not repeated when checkpoint.every has become 3."""
    for name in ("step_000005.partial", "step_000002", "step_000004.mine", "notes"):
        (tmp_path / name).mkdir()
    checkpoints(tmp_path).save(6)

    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes", "step_000004.mine", "step_000006"]


def test_a_full_disk_leaves_earlier_checkpoints_and_says_the_mend(tmp_path: Path) -> None:
    class Full(Files):
        def save(self, directory: Path) -> None:
            (directory / "rank_0").write_bytes(b"half")
            raise OSError(28, os.strerror(28))

    checkpoints(tmp_path).save(3)
    with pytest.raises(BackendError, match=r"step 6 could not be written .*No space left.*Free space"):
        checkpoints(tmp_path, trainer=Full()).save(6)

    assert [p.name for p in tmp_path.iterdir()] == ["step_000003"]


def test_a_garbled_state_file_is_named(tmp_path: Path) -> None:
    path = checkpoints(tmp_path).save(3)
    (path / "state.json").write_text('{"step": 3, ')

    with pytest.raises(DataError, match="state.json is not JSON"):
        read_state(path)
