import errno
import fcntl
import logging
import os
from pathlib import Path

import pytest

from megatron_rl.config import Config
from megatron_rl.config_loading import load_config
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.run_directory import RunDirectory


def config(runs: Path, *overrides: str) -> Config:
    return load_config(["experiment=cpu_digits", f"runs_dir={runs}", "name=run", *overrides])


def with_a_checkpoint(runs: Path) -> None:
    with RunDirectory(config(runs)) as run:
        (run.checkpoints / "step_000003").mkdir(parents=True)
        (run.checkpoints / "step_000003" / "state.json").write_text("{}")


def test_a_file_system_without_locks_is_no_other_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)

    with pytest.raises(ConfigError, match=r"gives no locks \(.*No locks available\).*Choose a runs_dir"):
        RunDirectory(config(tmp_path)).lock()


def test_a_second_process_in_the_same_run_is_refused(tmp_path: Path) -> None:
    with (
        RunDirectory(config(tmp_path)),
        pytest.raises(ConfigError, match="Another process is running in .*name="),
        RunDirectory(config(tmp_path)),
    ):
        pass


@pytest.mark.parametrize(
    ("override", "named"),
    [("seed=5", "seed: 0 -> 5"), ("data.seed=9", "data.seed: 0 -> 9"), ("sft.steps=1", "sft.steps")],
)
def test_continuing_as_another_experiment_is_refused(tmp_path: Path, override: str, named: str) -> None:
    with_a_checkpoint(tmp_path)

    with pytest.raises(ConfigError, match=f"{named}.*Choose another name"), RunDirectory(config(tmp_path, override)):
        pass


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("parallel.ep=1", "parallel.ep: 2 -> 1"),
        ("trainer.world_size=4", "trainer.world_size: 2 -> 4"),
        ("trainer.dtype=bfloat16", "trainer.dtype: 'float32' -> 'bfloat16'"),
        ("trainer.distributed_optimizer=false", "trainer.distributed_optimizer: True -> False"),
    ],
)
def test_continuing_on_another_layout_is_refused_with_both_mends(tmp_path: Path, override: str, named: str) -> None:
    with_a_checkpoint(tmp_path)

    mend = f"another layout: {named}.*Resume with the saved values, or .*model.path={tmp_path}/run/hf"
    with pytest.raises(ConfigError, match=mend), RunDirectory(config(tmp_path, override)):
        pass


def test_continuing_with_other_micro_batches_is_allowed(tmp_path: Path) -> None:
    with_a_checkpoint(tmp_path)

    with RunDirectory(config(tmp_path, "trainer.tokens_per_micro_batch=2048")):
        pass


@pytest.mark.parametrize(("text", "problem"), [("a: [1,", "while parsing"), ("- 1", "it holds a list")])
def test_a_damaged_config_of_the_run_is_named(tmp_path: Path, text: str, problem: str) -> None:
    with_a_checkpoint(tmp_path)
    (tmp_path / "run" / "config.yaml").write_text(text)

    with (
        pytest.raises(DataError, match=f"run/config.yaml cannot be read .*{problem}.*Put it back"),
        RunDirectory(config(tmp_path)),
    ):
        pass


def test_a_full_disk_under_the_log_does_not_hide_the_run_s_own_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / "log").mkdir(parents=True)
    (tmp_path / "run" / "log" / "driver.log").symlink_to("/dev/full")

    with pytest.raises(DataError, match="our message"), RunDirectory(config(tmp_path)):
        logging.getLogger("megatron_rl").info("a line")
        raise DataError("our message")

    assert "Logging error" not in capfd.readouterr().err


def test_continuing_with_more_steps_is_allowed(tmp_path: Path) -> None:
    with_a_checkpoint(tmp_path)

    with RunDirectory(config(tmp_path, "steps=500")):
        pass


@pytest.mark.parametrize("result", ["metrics.jsonl", "samples.jsonl", "checkpoints", "hf"])
def test_resume_never_refuses_an_earlier_run_and_leaves_its_config(tmp_path: Path, result: str) -> None:
    with RunDirectory(config(tmp_path)) as run:
        (run.path / result).mkdir()

    never = config(tmp_path, "resume=never", "steps=500")
    with pytest.raises(ConfigError, match=f"{result} exists and resume=never"), RunDirectory(never):
        pass
    assert "steps: 500" not in (run.path / "config.yaml").read_text()


def test_resume_never_begins_a_new_run(tmp_path: Path) -> None:
    with RunDirectory(config(tmp_path, "resume=never")):
        pass


def test_without_a_checkpoint_anything_may_change(tmp_path: Path) -> None:
    with RunDirectory(config(tmp_path)):
        pass
    with RunDirectory(config(tmp_path, "seed=5")) as run:
        assert "seed: 5" in (run.path / "config.yaml").read_text()


def test_a_run_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="cannot be made"), RunDirectory(config(tmp_path / "file")):
        pass
