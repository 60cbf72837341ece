import json
from pathlib import Path

import pytest

from megatron_rl.sweeps.points import Point
from megatron_rl.sweeps.table import best_reward, table


def write(path: Path, *records: dict[str, float]) -> None:
    (path / "log").mkdir(parents=True)
    (path / "log" / "job.log").touch()
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 9')


def test_a_table_has_state_best_reward_time_and_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rewards = ({"step": 0, "eval/reward": 0.25}, {"step": 1}, {"step": 2, "eval/reward": 0.75}, {"step": 3})
    write(tmp_path / "s" / "lr_1", *rewards, {"step": 4, "eval/reward": 0.5})
    write(tmp_path / "s" / "lr_2", {"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5})
    points = [
        Point(0, "lr_1", (), tmp_path / "s" / "lr_1", state="COMPLETED", seconds=3661.2),
        Point(1, "lr_2", (), tmp_path / "s" / "lr_2", state="FAILED", note="The disk\nis full.", seconds=59.6),
        Point(2, "lr_10", (), tmp_path / "s" / "lr_10", state="PENDING", note="Priority"),
    ]

    assert table(points).splitlines() == [
        "point  state      best eval/reward  step  time     path",
        "lr_1   COMPLETED  0.750 (step 2)    4     1:01:01  s/lr_1",
        "lr_2   FAILED     loss 1.5          2     0:01:00  s/lr_2/log/job.log",
        "    The disk is full.",
        "lr_10  PENDING    -                 -     -        s/lr_10",
        "    Priority",
    ]
    assert best_reward(points[0].path) == (0.75, 2)
    assert best_reward(points[1].path) is None
