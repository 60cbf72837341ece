"""Import, stock megatron-core, export: bit for bit, for every family."""

import filecmp
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from megatron_rl.convert.exporting import export_checkpoint
from megatron_rl.convert.importing import import_checkpoint
from tests.tiny import TINY
from tests.trainer.ranks import run_ranks
from tests.trainer.setup import make_config, start, write_checkpoint


@pytest.mark.parametrize("family", TINY)
def test_export_of_an_import_is_the_same_files(family: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf", family, dtype="bfloat16")

    import_checkpoint(tmp_path / "hf", tmp_path / "megatron", processes=2)
    differing, _ = export_checkpoint(tmp_path / "megatron", tmp_path / "again", processes=2, quantize=False)

    names = sorted(p.name for p in (tmp_path / "hf").iterdir())
    assert differing == []
    assert sorted(p.name for p in (tmp_path / "again").iterdir()) == names
    assert filecmp.cmpfiles(tmp_path / "hf", tmp_path / "again", names, shallow=False) == (names, [], [])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "hf", "megatron"]


def tensors(rank: int, directory: str, config: Any, meeting: str) -> dict[str, Tensor]:
    """Numbers and dtypes that a rank starts with."""
    return {name: t.clone() for name, t in start(rank, config, directory, meeting).tensors.items()}


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_ranks_start_from_it_with_the_tensors_of_the_hf_checkpoint(family: str, tmp_path: Path) -> None:
    """They load it with megatron-core's own dist_checkpointing."""
    directory = write_checkpoint(tmp_path / "hf", family, dtype="bfloat16")
    import_checkpoint(tmp_path / "hf", tmp_path / "megatron", processes=1)
    config = make_config({"tp": 2, "sp": True, "pp": 2, "ep": 2}, world_size=4, dtype="bfloat16")

    expected = run_ranks(4, tensors, directory, config, f"file://{tmp_path}/m0")
    found = run_ranks(4, tensors, str(tmp_path / "megatron"), config, f"file://{tmp_path}/m1")

    for rank in range(4):
        assert expected[rank].keys() == found[rank].keys()
        for name, tensor in expected[rank].items():
            assert found[rank][name].dtype == tensor.dtype and torch.equal(found[rank][name], tensor), (rank, name)


def test_what_transformer_engine_asks_for_is_there(tmp_path: Path) -> None:
    """Keys as megatron-core makes them on a GPU: by layer where layers are alike, by layer and expert for experts."""
    write_checkpoint(tmp_path / "hf", "qwen3_moe", dtype="bfloat16")
    import_checkpoint(tmp_path / "hf", tmp_path / "megatron", processes=1)

    objects = set(FileSystemReader(tmp_path / "megatron").read_metadata().state_dict_metadata)

    assert {
        "decoder.layers.self_attention.linear_qkv._extra_state/shard_3_4",
        "decoder.layers.mlp.experts.experts.linear_fc2._extra_state/shard_1.7_4.8",
        "decoder.layers.pre_mlp_layernorm._extra_state/shard_0_4",
        "decoder.final_layernorm._extra_state/shard_0_1",
        "common_state/shard_0_1",
    } <= objects
