"""The commands as a user types them: exit codes, words, a kill in the middle."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_rl.checks import check
from megatron_rl.config_loading import load_config
from megatron_rl.convert import workers
from megatron_rl.convert.cli import COMMANDS, main
from megatron_rl.convert.workers import Meter, batches
from megatron_rl.errors import ConfigError
from tests.trainer.setup import write_checkpoint

ROOT = Path(__file__).parents[2]


def test_the_exit_code_says_done_different_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf, megatron = write_checkpoint(tmp_path / "hf", "qwen3_moe", dtype="bfloat16"), str(tmp_path / "megatron")
    other = write_checkpoint(tmp_path / "other", "qwen3_moe", dtype="float32")

    assert main(["import", "--hf", hf, "--out", megatron]) == 0
    assert f"135 tensors, 0.00 GB -> {megatron}" in capsys.readouterr().out
    assert main(["import", "--hf", hf, "--out", megatron]) == 2
    assert "refused: " in (error := capsys.readouterr().err) and "is not empty" in error
    assert main(["export", "--checkpoint", megatron, "--out", str(tmp_path / "again")]) == 0
    assert main(["verify", "--checkpoint", megatron, "--hf", hf]) == 0
    assert "equal: 135 tensors" in capsys.readouterr().out
    assert main(["verify", "--checkpoint", megatron, "--hf", other]) == 1
    assert "lm_head.weight is bfloat16 [" in capsys.readouterr().out
    assert main(["verify", "--checkpoint", hf]) == 2
    assert "refused: " in capsys.readouterr().err


def test_neither_a_disk_nor_a_bug_says_that_checkpoints_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = write_checkpoint(tmp_path / "hf", "qwen3_moe", dtype="bfloat16")
    (tmp_path / "out.partial").touch()

    assert main(["import", "--hf", hf, "--out", str(tmp_path / "out")]) == 2
    assert re.fullmatch(r"failed: .*out\.partial'\. Mend that; the same command .*\n", capsys.readouterr().err)
    monkeypatch.setitem(COMMANDS, "import", lambda asked: 1 // 0)
    assert main(["import", "--hf", hf, "--out", str(tmp_path / "out")]) == 2
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_converted_checkpoint_starts_what_it_can(tmp_path: Path) -> None:
    hf, megatron = write_checkpoint(tmp_path / "hf", "qwen3_moe", dtype="bfloat16"), tmp_path / "megatron"
    assert main(["import", "--hf", hf, "--out", str(megatron)]) == 0
    words = ["experiment=cpu_digits", "model=hf", f"model.path={megatron}"]

    check(load_config(words))
    with pytest.raises(ConfigError, match=r"leave 4 for 3 of parallel\.pp=3 stages: each of those needs as many"):
        check(load_config([*words, "parallel.pp=3", "parallel.ep=1", "trainer.world_size=3"]))
    with pytest.raises(
        ConfigError, match=r"mode=rollout_only has no trainer .*tools/convert export --checkpoint .*meg"
    ):
        check(load_config([*words, "mode=rollout_only"]))
    (megatron / ".metadata").unlink()
    with pytest.raises(ConfigError, match=r"no weights, neither \*\.safetensors nor what tools/convert writes"):
        check(load_config(words))


def test_units_are_bounded_and_in_order() -> None:
    assert batches([3, 4, 2, 9, 1, 1], lambda n: n, 7) == [[3, 4], [2], [9], [1, 1]]
    assert batches([], lambda n: n, 7) == []


def test_progress_without_a_terminal_is_plain_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter((0.0, 8.0, 9.0, 15.0))
    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    with Meter("import", 3_000_000_000) as meter:
        meter.add(1_000_000_000)
        meter.add(1_000_000_000)  # a second after the last line
        meter.add(1_000_000_000)

    assert capsys.readouterr().err.splitlines() == [
        "import  1.00 of 3.00 GB  125 MB/s  0:00:16 left",
        "import  3.00 of 3.00 GB  200 MB/s  0:00:00 left",
    ]


def test_the_benchmark_says_which_limit_was_missed() -> None:
    spec = importlib.util.spec_from_file_location("bench_convert", ROOT / "tools" / "bench_convert.py")
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)

    assert bench.over_limits("import", 8_000_000_000, speed=0.5, peak_bytes=2e9) == []
    assert bench.over_limits("export", 256_000_000, speed=0.1, peak_bytes=1e9) == []  # all of it is the start
    assert bench.over_limits("export", 8_000_000_000, speed=0.45, peak_bytes=2.1e9) == [
        "export takes 2.10 GB, more than 2",
        "export has 0.45 of cp's speed, less than 0.5",
    ]


@pytest.mark.live
def test_a_quarter_of_a_gigabyte_fits_in_memory_and_survives_a_kill(tmp_path: Path) -> None:
    """Speed is not compared: at this size the start takes longest. `tools/bench_convert.py --gb 8` compares it."""
    command = [sys.executable, str(ROOT / "tools" / "bench_convert.py"), "--gb", "0.256", "--directory", str(tmp_path)]

    out = subprocess.run(command, capture_output=True, text=True)

    assert out.returncode == 0, out.stderr
    peaks = [float(found) for found in re.findall(r"peak memory ([\d.]+) GB PSS", out.stdout)]
    assert len(peaks) == 2 and max(peaks) < 2
    assert "export is equal to what was imported, bit for bit" in out.stdout
    (redone, total, unit) = map(
        int, re.findall(r"again: (\d+) MB redone of (\d+), in files of at most (\d+)", out.stdout)[0]
    )
    assert redone <= 2 * unit and unit < total / 4  # a unit for each of the two processes
    assert "the result is the same" in out.stdout
