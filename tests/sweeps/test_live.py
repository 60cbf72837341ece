"""A sweep on this machine, with the real program."""

import signal
from pathlib import Path

import pytest

from megatron_rl.sweeps.__main__ import main as show
from tests.program.program import FAILED, INTERRUPTED, finish, running

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


def test_an_interrupted_sweep_goes_on_with_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "my sweep"
    schedule = ["mode=sft", "sft.steps=0", "sft.warmup_steps=0", "algorithm.warmup_steps=0", "steps=1"]
    layout = ["trainer.world_size=1", "parallel=single", f"hydra.sweep.dir='{directory}'"]
    command = ["-m", "experiment=cpu_digits", *schedule, *layout, "data.held_out=8,9,99999"]
    logs = [directory / f"held_out_{n}" / "log" / "job.log" for n in (8, 9, 99999)]

    with running(command, tmp_path / "first.out") as run:
        run.wait_until(
            lambda: logs[1].exists() and "starting Ray" in logs[1].read_text(), what="the second point starts"
        )
        run.signal(signal.SIGINT)
        ended = run.end()

    assert ended.code == INTERRUPTED and ended.left_behind == (), ended
    assert "interrupted. held_out_9 ended too. The same command goes on" in ended.text
    assert show([str(directory)]) == 0
    states = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:]]
    assert states == [["held_out_8", "COMPLETED"], ["held_out_9", "CANCELLED"]]
    assert not logs[2].exists()

    ended = finish(command, tmp_path / "second.out")

    assert ended.code == FAILED and ended.left_behind == (), ended
    lines = ended.text[ended.text.index("point  ") :].splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [
        ["held_out_8", "COMPLETED"],
        ["held_out_9", "COMPLETED"],
        ["held_out_99999", "FAILED"],
    ]
    assert lines[1].split()[2] == "loss" and lines[1].endswith("held_out_8")
    assert lines[3].endswith("held_out_99999/log/job.log") and "data.held_out=99999" in lines[4]
    assert "failed: 1 of 3 points are not done" in ended.text
    starts = [log.read_text().count("-m megatron_rl.main") for log in logs]
    assert starts == [1, 2, 1]
