"""Where megatron-core keeps every tensor of a torch_dist checkpoint: asked of a model without data, on one rank."""

import logging
import tempfile
import warnings

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from torch._subclasses import FakeTensorMode

from megatron_rl.config import ParallelConfig, TrainerConfig
from megatron_rl.formats.torch_dist import Piece, Skeleton
from megatron_rl.layouts.megatron_topology import MegatronTopology
from megatron_rl.models import Architecture
from megatron_rl.trainer.build import build_chunk, start_megatron, transformer_config


def skeleton(model: Architecture, topology: MegatronTopology) -> Skeleton:
    """Pieces of every tensor on the only rank, named as in the layout table, and the keys of what is no tensor.

    `topology` is of one rank. Makes this process a megatron rank: call it in one that ends afterwards.
    """
    warnings.filterwarnings("ignore", module=r"(torch|megatron)\.")
    logging.disable(logging.WARNING)
    assert topology.world_size == 1, topology
    parallel, trainer = ParallelConfig(), TrainerConfig(world_size=1)
    with tempfile.TemporaryDirectory() as meeting:
        dist.init_process_group("gloo", init_method=f"file://{meeting}/store", rank=0, world_size=1)
        has_cuda = start_megatron(model, parallel, topology, seed=0)
        config = transformer_config(model, parallel, trainer, has_cuda=has_cuda)
        groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        with FakeTensorMode():
            chunk = build_chunk(model, config, topology, vp_stage=None)
            state = chunk.sharded_state_dict(metadata=groups)
            pieces = {f"0:{name}": _pieces(entry) for name, entry in state.items() if not _is_object(entry)}
        objects = {entry.unique_key for entry in state.values() if _is_object(entry)}
        objects |= {key for name, entry in state.items() if (key := _extra_state(name, entry))}
        dist.destroy_process_group()
    return Skeleton(pieces, tuple(sorted(objects)))


def _is_object(entry: object) -> bool:
    return isinstance(entry, ShardedObject)


def _pieces(entry: ShardedTensor | ShardedTensorFactory) -> tuple[Piece, ...]:
    """A factory cuts the parameter (gate and up): its parts are views, and say by their offsets where they begin."""
    parts = [entry] if isinstance(entry, ShardedTensor) else list(nested_values(entry.build()))
    width = entry.data.shape[-1] if entry.data.dim() > 1 else 1
    pieces = []
    for part in parts:
        start = divmod(part.data.storage_offset(), width)[: part.data.dim()]
        pieces.append(
            Piece(
                key=part.key,
                size=tuple(part.global_shape),
                offset=tuple(part.global_offset),
                start=tuple(start),
                shape=tuple(part.local_shape),
                padded=part.allow_shape_mismatch,
            )
        )
    return tuple(pieces)


def _extra_state(name: str, entry: ShardedTensor | ShardedTensorFactory | ShardedObject) -> str | None:
    """The key under which Transformer Engine's linears and norms keep their FP8 state, empty without FP8.

    A model on a CPU has not all of them, and a load on a GPU asks for all.
    """
    path, _, parameter = name.rpartition(".")
    module = path.rpartition(".")[2]
    has_state = module.startswith(("linear_", "eh_proj")) or module.endswith("norm")
    if _is_object(entry) or not has_state or not parameter.startswith("weight"):
        return None
    part = entry if isinstance(entry, ShardedTensor) else next(iter(nested_values(entry.build())))
    lead = len(part.global_shape) - len(part.local_shape)
    key = part.key.removesuffix("weight") + "_extra_state"
    place = (part.global_shape[:lead], part.global_offset[:lead]) if lead else ((1,), (0,))
    return ShardedObject(key, None, *place).unique_key
