import os
from pathlib import Path

from megatron_rl.config import load_config
from megatron_rl.main import is_finished
from megatron_rl.run_directory import RunDirectory


def test_a_run_is_finished_when_its_last_step_is_exported(tmp_path: Path) -> None:
    config = load_config(["experiment=cpu_digits", "name=run", f"runs_dir={tmp_path}", "steps=6"])
    run = RunDirectory(config)
    state, exported = run.checkpoints / "step_000006" / "state.json", run.hf / "config.json"
    for path, written_s in ((state, 200), (exported, 300)):
        path.parent.mkdir(parents=True)
        path.write_text("{}")
        os.utime(path, (written_s, written_s))

    assert is_finished(config, run)
    assert not is_finished(load_config(["experiment=cpu_digits", "name=run", f"runs_dir={tmp_path}", "steps=7"]), run)
    os.utime(exported, (100, 100))  # by the run when it had fewer steps
    assert not is_finished(config, run)
    exported.unlink()
    assert not is_finished(config, run)
