import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from megatron_rl.config import Config
from megatron_rl.config_loading import load_config
from megatron_rl.errors import BackendError, ConfigError, DataError
from megatron_rl.main import main, read_config
from megatron_rl.models.random_checkpoint import write_random_checkpoint
from megatron_rl.run import check_model, is_finished, make_model, rounding
from megatron_rl.run_directory import RunDirectory
from tests.tiny import CHARACTERS, TINY


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


def test_cfg_job_prints_a_config_that_a_run_reads_back(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["experiment=cpu_digits", "sft.lr=1e-4", "trainer.megatron.moe_router_dtype=fp32"]

    assert main([*words[:1], "--cfg", "job", *words[1:]]) == 0

    printed = OmegaConf.to_object(
        OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(capsys.readouterr().out))
    )
    assert printed == load_config(words)
    assert main([*words, "--cfg", "hydra"]) == 2


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


GATE = "model.layers.0.mlp.experts.0.gate_proj.weight"


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"num_hidden_layers": 3}, {}, r"has 33 that the model does not: extra: model\.layers\.3\."),
        ({"num_experts": 4}, {}, r"has 48 that the model does not: extra: .*experts\.4\."),
        ({"moe_intermediate_size": 20}, {}, r"gate_proj.weight is \[40, 56\], config.json makes it \[20, 56\]"),
        ({"vocab_size": 60}, {}, r"embed_tokens.weight is \[61, 56\], config.json makes it \[60, 56\]"),
        ({}, {"model.layers.0.self_attn.q_proj.bias": torch.ones(192)}, r"has 1 that .*extra: .*q_proj\.bias"),
        ({}, {GATE: torch.ones(40, 56).to(torch.float8_e4m3fn)}, rf"{GATE} is FP8 with no scale"),
        ({}, {GATE: torch.ones(40, 56).to(torch.int8)}, rf"{GATE} has dtype I8, which is not supported"),
    ],
    ids=["layers", "experts", "half-experts", "vocabulary", "bias", "fp8", "int8"],
)
def test_a_checkpoint_that_holds_another_model_than_its_config_is_refused(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], message: str
) -> None:
    write_random_checkpoint(tmp_path, TINY["qwen3_moe"], characters=CHARACTERS, seed=0)
    check_model(tmp_path, report=tmp_path / "report")
    path, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    save_file(load_file(weights) | tensors, weights, metadata={"format": "pt"})

    with pytest.raises(DataError, match=message):
        check_model(tmp_path, report=tmp_path / "report")


def test_a_cast_of_the_starting_weights_is_said() -> None:
    for stored in ("float32", "float16"):
        assert rounding({"torch_dtype": stored}, "bfloat16") == (
            f"the checkpoint is {stored}: its weights are rounded to trainer.dtype=bfloat16 before the first step"
        )
    for stored, dtype in (("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")):
        assert rounding({"dtype": stored}, dtype) is None
