"""The other arm of tools/bench_sync.py: every tensor, whole and under its Hugging Face name, for SGLang's own loader.

What slime and verl do where trainer and engine share a node: every trainer rank gathers everything, puts the HF tensors
together in buckets, and hands its copy to one rank of the engine ("flattened_bucket"), which loads it. Here with one
all-gather a bucket, where they make one or more a tensor. Buffers are reused.
"""

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.layouts.boxes import DTYPE_BYTES, TensorLayout
from megatron_rl.layouts.compile import hf_layouts, megatron_ranks
from megatron_rl.resharding.plan import Copy, make_plan
from megatron_rl.resharding.views import copy_view
from megatron_rl.trainer.trainer import MegatronTrainer
from megatron_rl.trainer.worker import Worker

from megatron_rl_kernels.reference import copy_boxes  # isort: skip # found once megatron_rl is imported

GATHER_BYTES = 512 << 20
"""Of a bucket."""


class GatheringWorker(Worker):
    """A rank that also takes part in the gathering arm."""

    def change(self) -> None:
        """Other weights, of the same size."""
        with torch.no_grad():
            for tensor in self.tensors.values():
                tensor.neg_()

    def plan_gather(self) -> int:
        """Work out the buckets, and keep buffers for them. Returns: how many buckets there are."""
        dtype = self.config.trainer.dtype
        sources = megatron_ranks(self.table, self.topology, dtype=dtype)
        self.buckets = list(buckets(hf_layouts(self.table, dtype=dtype)))
        self.copies = [make_plan(sources, {0: bucket}) for bucket in self.buckets]
        self.sizes = [max(packed_bytes(copies, rank, dtype) for rank in sources) for copies in self.copies]
        self.packed = [torch.zeros(max(self.sizes), dtype=torch.uint8) for _ in sources]
        torch.multiprocessing.set_sharing_strategy("file_system")  # SGLang's processes open it by name
        largest = max(sum(layout.nbytes for layout in bucket) for bucket in self.buckets)
        self.shared = torch.zeros(largest, dtype=torch.uint8).share_memory_()
        return len(self.buckets)

    @torch.no_grad()
    def gather_bucket(self, index: int, readers: int) -> str | None:
        """All ranks: put one bucket together. Returns: on the first `readers` ranks, what one of SGLang's takes."""
        dtype, copies = self.config.trainer.dtype, self.copies[index]
        parts = [packed[: self.sizes[index]] for packed in self.packed]
        mine = [c for c in copies if c.src_rank == self.rank]
        into = packed_views(parts[self.rank], mine, dtype)
        copy_boxes(into, [copy_view(self.tensors[c.src], c.src_offset, c.shape) for c in mine])
        dist.all_gather(parts, parts[self.rank])
        whole = dict(flattened(self.shared, self.buckets[index]))
        for rank, packed in enumerate(parts):
            theirs = [c for c in copies if c.src_rank == rank]
            into = [copy_view(whole[c.dst], c.dst_offset, c.shape) for c in theirs]
            copy_boxes(into, packed_views(packed, theirs, dtype))
        return serialized(self.shared, self.buckets[index]) if self.rank < readers else None


class GatheringTrainer(MegatronTrainer):
    """The driver's handle on such ranks."""

    worker = GatheringWorker

    def change(self) -> None:
        self._call("change", what="Changing the weights")

    def plan_gather(self) -> int:
        return int(self._call("plan_gather", what="Planning")[0])

    def sweep(self) -> None:
        """End the ranks, and remove what torch leaves in /dev/shm of processes that end so."""
        pids = self._call("pid", what="Asking for pids")
        self.stop()
        for path in (path for pid in pids for path in Path("/dev/shm").glob(f"torch_{pid}_*")):
            path.unlink(missing_ok=True)

    def gather_bucket(self, index: int, readers: int) -> list[str]:
        return list(self._call("gather_bucket", index, readers, what="Gathering")[:readers])


def buckets(layouts: Sequence[TensorLayout]) -> Iterator[list[TensorLayout]]:
    """Whole tensors, at most GATHER_BYTES together."""
    bucket: list[TensorLayout] = []
    for layout in layouts:
        if bucket and sum(each.nbytes for each in (*bucket, layout)) > GATHER_BYTES:
            yield bucket
            bucket = []
        bucket.append(layout)
    yield bucket


def packed_bytes(copies: Sequence[Copy], rank: int, dtype: str) -> int:
    return sum(prod(c.shape) for c in copies if c.src_rank == rank) * DTYPE_BYTES[dtype]


def packed_views(memory: Tensor, copies: Sequence[Copy], dtype: str) -> list[Tensor]:
    """One after the other."""
    views, at = [], 0
    for copy in copies:
        size = prod(copy.shape) * DTYPE_BYTES[dtype]
        views.append(memory[at : at + size].view(getattr(torch, dtype)).view(copy.shape))
        at += size
    return views


def flattened(memory: Tensor, bucket: Sequence[TensorLayout]) -> Iterator[tuple[str, Tensor]]:
    at = 0
    for layout in bucket:
        size = layout.nbytes
        yield layout.name, memory[at : at + size].view(getattr(torch, layout.dtype)).view(layout.shape)
        at += size


def serialized(memory: Tensor, bucket: Sequence[TensorLayout]) -> str:
    """A bucket as SGLang's clients write it."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    metadata, at = [], 0
    for layout in bucket:
        size, dtype = layout.nbytes, getattr(torch, layout.dtype)
        shape = torch.Size(layout.shape)
        metadata.append(FlattenedTensorMetadata(layout.name, shape, dtype, at, at + size, prod(shape)))
        at += size
    content = {"flattened_tensor": memory[:at], "metadata": metadata}
    text: str = MultiprocessingSerializer.serialize(content, output_str=True)
    return text
