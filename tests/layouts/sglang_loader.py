"""Loads a checkpoint with SGLang's own loader, one simulated rank after another, and compares with our layouts.

A program, because SGLang must find its CPU settings before it is imported: sglang_loader.py DIRECTORY CUTS, where
DIRECTORY holds a checkpoint of each family and CUTS is JSON, {family: [fields of SglangTopology]}. Prints one JSON line
per rank: {"family", "cut", "rank", "differences": [...]}.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from sglang.srt import runtime_context
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.dp_attention import initialize_dp_attention_flags
from sglang.srt.model_loader import get_model
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs

from megatron_rl.convert.fp8 import without_quantization
from megatron_rl.layouts.boxes import TensorLayout
from megatron_rl.layouts.compile import sglang_layouts
from megatron_rl.layouts.fp8 import with_scales
from megatron_rl.layouts.sglang_topology import SglangTopology
from megatron_rl.models import load_table
from megatron_rl.rollout.receiver import weights_of
from megatron_rl.rollout.sglang_cpu.hooks import activate_cpu

GROUPS = ("tp", "moe_ep", "moe_tp", "attn_tp", "attn_cp", "pp")


def load_rank(checkpoint: Path, cut: SglangTopology, rank: int) -> torch.nn.Module:
    """One rank's model, loaded by SGLang in this process; its process groups only say where the rank stands."""
    args = ServerArgs(
        model_path=str(checkpoint),
        device="cpu",
        attention_backend="torch_native",
        tp_size=cut.tp,
        ep_size=cut.ep,
        pp_size=cut.pp,
        attn_dp_size=cut.dp_attention,
        enable_dp_lm_head=cut.dp_lm_head,
        moe_dense_tp_size=cut.moe_dense_tp,
    )
    model_config = ModelConfig.from_server_args(args)
    runtime_context.reset_context()
    ranks = runtime_context.SpawnRanks(world_rank=rank)
    runtime_context.publish(args, role="scheduler", ranks=ranks, hf_config=model_config.hf_config)
    initialize_dp_attention_flags(args)
    parallel = runtime_context.get_parallel()
    groups = {f"{g}_group": group(getattr(parallel, f"{g}_rank"), getattr(parallel, f"{g}_size")) for g in GROUPS}
    with parallel.override(**groups):
        return get_model(model_config=model_config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))


def group(rank: int, size: int) -> SimpleNamespace:
    return SimpleNamespace(
        rank_in_group=rank,
        rank=rank,
        world_size=size,
        ranks=list(range(size)),
        is_first_rank=rank == 0,
        is_last_rank=rank == size - 1,
        cpu_group=None,
        device_group=None,
    )


def build(layout: TensorLayout, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """The tensor that a layout describes, zero where it is padding."""
    local = torch.zeros(layout.shape, dtype=getattr(torch, layout.dtype))
    for box in layout.boxes:
        lead = len(box.offset) - len(box.shape)
        target = local[box.offset[:lead]] if lead else local
        source = weights[box.hf]
        for dim, extent in enumerate(box.shape):
            target = target.narrow(dim, box.offset[lead + dim], extent)
            source = source.narrow(dim, box.hf_offset[dim], extent)
        target.copy_(source)
    return local


def differences(checkpoint: Path, cut: SglangTopology, rank: int) -> list[str]:
    theirs = weights_of(load_rank(checkpoint, cut, rank))
    config = json.loads((checkpoint / "config.json").read_text())
    table, in_fp8 = load_table(without_quantization(config)), "quantization_config" in config
    weights = load_file(checkpoint / "model.safetensors")
    own = sglang_layouts(table, cut, rank, dtype="bfloat16", quantized=in_fp8)
    layouts = {t.name: t for t in with_scales(own)}
    found = [f"{name} only on one side" for name in sorted(layouts.keys() ^ theirs.keys())]
    for name in sorted(layouts.keys() & theirs.keys()):
        ours, tensor = build(layouts[name], weights), theirs[name]
        same = (ours.shape, ours.dtype) == (tensor.shape, tensor.dtype)
        if not same or not torch.equal(*(t.contiguous().view(torch.uint8) for t in (ours, tensor))):
            found.append(f"{name}: {ours.dtype} {tuple(ours.shape)}, SGLang {tensor.dtype} {tuple(tensor.shape)}")
    return found


if __name__ == "__main__":
    activate_cpu()
    HookRegistry.apply_hooks()
    for family, cuts in json.loads(sys.argv[2]).items():
        for sizes in cuts:
            cut = SglangTopology(**sizes)
            for rank in range(cut.world_size):
                found = differences(Path(sys.argv[1], family), cut, rank)
                print(json.dumps({"family": family, "cut": sizes, "rank": rank, "differences": found}), flush=True)
