"""FP8 weights and their scales, without a checkpoint; test_contents has them in one."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.convert import fp8
from megatron_rl.formats.hf_files import Stored, read_checkpoint
from megatron_rl.layouts.fp8 import DTYPE, is_quantized


def test_fp8_is_for_the_linears_of_attention_and_experts() -> None:
    """As in DeepSeek-V3's model.safetensors.index.json: those and no others have a weight_scale_inv."""
    layer = "model.layers.3."
    yes = ["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.o_proj", "mlp.down_proj"]
    yes += ["mlp.experts.7.gate_proj", "mlp.shared_experts.up_proj", "block_sparse_moe.experts.0.w2"]
    no = ["input_layernorm", "mlp.gate", "mlp.shared_expert_gate", "eh_proj", "embed_tokens", "shared_head.head"]

    assert [name for name in yes + no if is_quantized(f"{layer}{name}.weight", (8, 8))] == yes
    assert not any(is_quantized(f"{name}.weight", (8, 8)) for name in ("lm_head", "model.embed_tokens"))
    assert not is_quantized(f"{layer}self_attn.q_proj.bias", (8,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_scales_are_read_in_the_dtypes_that_are_published(dtype: torch.dtype, tmp_path: Path) -> None:
    scale = torch.linspace(1e-4, 3e-4, 6).reshape(2, 3).to(dtype)
    save_file({"w_scale_inv": scale}, tmp_path / "model.safetensors")
    stored = read_checkpoint(tmp_path)["w_scale_inv"]

    assert fp8.wrong_scale(Stored("w", (130, 300), DTYPE, "", 0, 0), stored) is None
    assert torch.equal(torch.from_numpy(fp8.read_scale(tmp_path, stored)), scale.float())


def test_every_fp8_value_is_read_as_torch_reads_it() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    scale = np.array([[1.37]], np.float32)

    (found,) = fp8.dequantize(codes.numpy(), scale, first_row=0, columns=16)

    expected = (codes.view(torch.float8_e4m3fn).float() * 1.37).bfloat16()
    same = torch.frombuffer(bytearray(found), dtype=torch.bfloat16)
    assert torch.equal(same.isnan(), expected.isnan()) and torch.equal(same.nan_to_num(), expected.nan_to_num())


AFTER_THREADS = """
import torch
from megatron_rl.convert.workers import over_units

def total(count):
    return torch.ones(count).sum().item()

torch.set_num_threads(2)
total(1 << 22)
print(over_units(total, [1 << 22], [1], processes=1, what="sum"))
"""


def test_a_worker_computes_though_its_owner_has_computed_with_threads() -> None:
    command = ["timeout", "-s", "KILL", "60", sys.executable, "-c", AFTER_THREADS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "[4194304.0]\n", done.stderr


AFTER_A_STORE = """
import gc
import torch.distributed as dist
from megatron_rl.convert.workers import over_units

def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

def collect(_):
    own = store()
    gc.collect()
    return "lives"

gc.disable()
thrown_away = [store()]
thrown_away.append(thrown_away)
del thrown_away
print(over_units(collect, [1], [1], processes=1, what="collect"))
"""


def test_a_worker_leaves_alone_what_its_owner_has_thrown_away() -> None:
    """A store ends by joining its thread, which was not forked: under its handle libc may have one of the worker's."""
    command = ["timeout", "-s", "KILL", "60", sys.executable, "-c", AFTER_A_STORE]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "['lives']\n", done.stderr
