import os
import resource
from pathlib import Path

import pytest

from megatron_rl.config import load_config
from megatron_rl.errors import BackendError, ConfigError
from megatron_rl.main import is_finished, make_model, read_config, rounding
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


@pytest.mark.parametrize("argument", ["--dry-run", "hydra/launcher=slurm_grpo", "hydra.sweep.dir=x"])
def test_what_belongs_to_a_sweep_asks_for_one(argument: str) -> None:
    with pytest.raises(ConfigError, match=f"{argument} belongs to a sweep, which starts with -m"):
        read_config(["experiment=cpu_digits", argument])


def test_a_list_of_values_asks_for_a_sweep() -> None:
    with pytest.raises(ConfigError, match="Ambiguous value .*seed=1,2.* To sweep over it, add --multirun"):
        read_config(["experiment=cpu_digits", "seed=1,2"])


@pytest.mark.parametrize("limit", [10, 1300, 3000], ids=["config.json", "tokenizer.json", "model.safetensors"])
def test_a_full_disk_under_the_starting_model_is_named_and_leaves_none(tmp_path: Path, limit: int) -> None:
    config = load_config(["experiment=cpu_digits"])
    make_model(config, tmp_path / "before", "0123456789 =")  # imports first: they write files too
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(BackendError, match="starting model could not be written into .*model: .*Free space"):
            make_model(config, tmp_path / "model", "0123456789 =")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "model").exists()


def test_a_cast_of_the_starting_weights_is_said() -> None:
    assert rounding({"torch_dtype": "float32"}, "bfloat16") == (
        "the checkpoint is float32: its weights are rounded to trainer.dtype=bfloat16 before the first step"
    )
    for stored, dtype in (("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")):
        assert rounding({"dtype": stored}, dtype) is None
