"""The benchmarks that nothing else runs: that they run, on little, and print what their readers look for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.config_loading import load_config
from megatron_rl.run import make_model

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.live


def run(*arguments: object) -> str:
    """What a tool printed."""
    command, environment = [sys.executable, *map(str, arguments)], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_bench_update_times_both_updates(tmp_path: Path) -> None:
    overrides = ["experiment=cpu_digits", "name=bench", "sft.steps=0", "prompts_per_step=8"]
    make_model(load_config(overrides), tmp_path / "model", "0123456789=")
    settings = {"overrides": overrides, "model": str(tmp_path / "model"), "repeats": 2}
    run("tools/bench_update.py", json.dumps(settings), tmp_path / "out.json")
    figures = json.loads((tmp_path / "out.json").read_text())
    assert {arm: len(seconds) for arm, seconds in figures.items()} == {"ours_s": 2, "bare_s": 2}
    assert min(figures["ours_s"] + figures["bare_s"]) > 0


def test_bench_sync_moves_what_is_needed_in_both_arms(tmp_path: Path) -> None:
    """It ends with an error itself when the arms leave the server with different weights."""
    arguments = ["--small", "--rounds", 1, "--layouts", "tp2_ep2", "--json", tmp_path / "out.json"]
    printed = run("tools/bench_sync.py", *arguments)
    figures = json.loads((tmp_path / "out.json").read_text())["tp2_ep2"]
    assert figures["bytes_received"] == figures["bytes_needed"] > 0
    assert min(figures["ours_s"], figures["gather_s"], figures["memcpy_gb_per_s"]) > 0
    assert "gather everything" in printed and "of memcpy's" in printed
