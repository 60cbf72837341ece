"""Carries out a plan: packs a trainer rank's rectangles into buckets, unpacks them into an engine rank's parameters.

Both sides compute the plan from one `SyncSpec` with the same pure code; only bucket addresses travel. A bucket holds
what one trainer rank sends to one engine rank: the plan's rectangles in order, each contiguous, in the engine's dtype.
"""

from collections.abc import Mapping, Sequence
from math import prod

import torch
from megatron_rl_kernels.reference import copy_boxes
from torch import Tensor

from megatron_rl.errors import LayoutError, SyncError
from megatron_rl.layouts.boxes import TensorLayout
from megatron_rl.resharding.messages import ALIGN_BYTES
from megatron_rl.resharding.plan import Copy
from megatron_rl.resharding.spec import Bucket, SyncSpec, compile_sync
from megatron_rl.resharding.transport.shm import AttachedBuffer, SharedBuffer

DIFFERENCES_SHOWN = 8


def copy_view(tensor: Tensor, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
    """View of the rectangle at `offset`; with one more offset than `shape` has dims, the first is a slot to drop."""
    if len(offset) == len(shape) + 1:
        tensor, offset = tensor[offset[0]], offset[1:]
    assert tensor.dim() == len(shape), (tuple(tensor.shape), tuple(offset), tuple(shape))
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def check_tensors(tensors: Mapping[str, Tensor], layouts: Sequence[TensorLayout], *, whose: str) -> None:
    """Raises: LayoutError listing how names, shapes or dtypes of `tensors` differ from those of `layouts`."""
    declared = {t.name: t for t in layouts}
    wrong = [f"{name} is not in the layout table" for name in tensors if name not in declared]
    for name, layout in declared.items():
        if name not in tensors:
            wrong.append(f"{name} is missing")
            continue
        found = (tuple(tensors[name].shape), str(tensors[name].dtype).removeprefix("torch."))
        if found != (tuple(layout.shape), layout.dtype):
            wrong.append(f"{name} is {found[0]} {found[1]}, declared {tuple(layout.shape)} {layout.dtype}")
    if wrong:
        more = f" and {len(wrong) - DIFFERENCES_SHOWN} more" if len(wrong) > DIFFERENCES_SHOWN else ""
        raise LayoutError(
            f"{whose}: {len(wrong)} of {len(declared)} tensors differ from the layout table: "
            f"{'; '.join(wrong[:DIFFERENCES_SHOWN])}{more}. Writing them would corrupt the model; mend the model "
            "family's table or the topology."
        )


def _bucket_views(
    memory: Tensor, copies: Sequence[Copy], dtypes: Mapping[str, torch.dtype]
) -> tuple[list[Tensor], int, int]:
    """Views of the rectangles of one bucket, the bucket's size, and the bytes that are not alignment."""
    views, at, payload = [], 0, 0
    for copy in copies:
        dtype = dtypes[copy.dst]
        nbytes = prod(copy.shape) * dtype.itemsize
        if memory.numel():
            views.append(memory[at : at + nbytes].view(dtype).view(copy.shape))
        at += -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
        payload += nbytes
    return views, at, payload


def _torch_dtypes(layouts: Sequence[TensorLayout]) -> dict[str, torch.dtype]:
    return {t.name: getattr(torch, t.dtype) for t in layouts}


class Sender:
    """One trainer rank's half: keeps its buckets between versions."""

    def __init__(self, spec: SyncSpec, rank: int):
        self.rank = rank
        self.plan = compile_sync(spec)
        self._addresses: tuple[int, ...] = ()
        self._sources: list[Tensor] = []
        self._views: list[Tensor] = []
        self._buffers: dict[int, SharedBuffer] = {}
        self._copies = {
            dst: [c for c in self.plan.copies if c.src_rank == rank and c.dst_rank == dst]
            for dst in self.plan.destinations
        }
        for dst, copies in self._copies.items():
            dtypes = _torch_dtypes(self.plan.destinations[dst])
            _, nbytes, _ = _bucket_views(torch.empty(0), copies, dtypes)
            if nbytes:
                self._buffers[dst] = SharedBuffer(nbytes)
                self._views += _bucket_views(self._buffers[dst].bytes, copies, dtypes)[0]

    @torch.no_grad()
    def pack(self, tensors: Mapping[str, Tensor]) -> tuple[Bucket, ...]:
        """Copy this rank's rectangles of `tensors` (layout name -> local tensor) into its buckets.

        Raises: LayoutError when `tensors` are not what the table declares.
        """
        addresses = tuple(t.data_ptr() for t in tensors.values())
        if addresses != self._addresses:
            check_tensors(tensors, self.plan.sources[self.rank], whose=f"trainer rank {self.rank}")
            self._sources = [
                copy_view(tensors[c.src], c.src_offset, c.shape) for dst in self._buffers for c in self._copies[dst]
            ]
            self._addresses = addresses
        copy_boxes(self._views, self._sources)
        return tuple(
            Bucket(self.rank, dst, buffer.path, buffer.nbytes, self.plan.hash, buffer.digest())
            for dst, buffer in self._buffers.items()
        )

    def close(self) -> None:
        """Free the buckets."""
        for buffer in self._buffers.values():
            buffer.close()


class Receiver:
    """One engine rank's half: destinations resolved once, mappings kept between versions."""

    def __init__(self, spec: SyncSpec, rank: int, parameters: Mapping[str, Tensor]):
        """`parameters`: the engine rank's own, by name.

        Raises: LayoutError when they are not what the table declares.
        """
        self.rank = rank
        self.plan = compile_sync(spec)
        layouts = self.plan.destinations[rank]
        check_tensors(parameters, layouts, whose=f"engine rank {rank}")
        self._dtypes = _torch_dtypes(layouts)
        self._copies: dict[int, list[Copy]] = {}
        for copy in self.plan.copies:
            if copy.dst_rank == rank:
                self._copies.setdefault(copy.src_rank, []).append(copy)
        self._destinations = {
            src: [copy_view(parameters[c.dst], c.dst_offset, c.shape) for c in copies]
            for src, copies in self._copies.items()
        }
        self._attached: dict[str, AttachedBuffer] = {}
        self._views: dict[str, tuple[list[Tensor], int]] = {}
        padding = sum(
            (prod(t.shape) - sum(prod(b.shape) for b in t.boxes)) * self._dtypes[t.name].itemsize for t in layouts
        )
        self.needed_bytes = sum(p.nbytes for p in parameters.values()) - padding
        """Of this rank's parameters, padding left out."""

    @torch.no_grad()
    def load(self, buckets: Sequence[Bucket]) -> int:
        """Check every bucket, then write all of them into the parameters. Returns the bytes written.

        Raises: SyncError when the plan, a sender or a digest is not the expected one; nothing is written then.
        """
        senders = sorted(b.src_rank for b in buckets)
        if senders != sorted(self._copies):
            raise SyncError(
                f"engine rank {self.rank} got buckets from trainer ranks {senders}, and needs them from "
                f"{sorted(self._copies)}: a sender is missing. Pass on the buckets of every trainer rank."
            )
        for bucket in buckets:
            if bucket.plan_hash != self.plan.hash:
                raise SyncError(
                    f"engine rank {self.rank} computed plan {self.plan.hash}, trainer rank {bucket.src_rank} packed by "
                    f"plan {bucket.plan_hash}: give both the same spec and the same version of megatron_rl."
                )
        self._attach(buckets)
        for bucket in buckets:
            self._check(bucket)
        for bucket in buckets:
            copy_boxes(self._destinations[bucket.src_rank], self._views[bucket.path][0])
        return sum(self._views[bucket.path][1] for bucket in buckets)

    def verify(self, buckets: Sequence[Bucket]) -> None:
        """Compare every element of the parameters with the buckets that `load` wrote them from.

        Sees what was overwritten since: by a second name of the same storage, by a hook of the engine, by bad memory.
        Raises: SyncError naming tensor, ranks and the first element that differs.
        """
        for bucket in buckets:
            src = bucket.src_rank
            sent = self._views[bucket.path][0]
            for copy, held, want in zip(self._copies[src], self._destinations[src], sent, strict=True):
                # As bytes: NaN equals itself there, and 0.0 is not -0.0.
                differs = held.contiguous().view(torch.uint8) != want.view(torch.uint8)
                if differs.any():
                    first = int(differs.flatten().nonzero()[0]) // want.element_size()
                    at = [int(i) for i in torch.unravel_index(torch.tensor(first), want.shape)]
                    lead = len(copy.dst_offset) - len(at)
                    where = [*copy.dst_offset[:lead], *(a + i for a, i in zip(copy.dst_offset[lead:], at, strict=True))]
                    raise SyncError(
                        f"engine rank {self.rank}: {copy.dst}{where} is {held[tuple(at)].item()} after the load, and "
                        f"trainer rank {src} sent {want[tuple(at)].item()} from {copy.src}: something wrote over it. "
                        "Switch off what changes weights in the engine (rollout.sglang), or test the machine's memory."
                    )

    def _attach(self, buckets: Sequence[Bucket]) -> None:
        """Map what is new; drop what no longer takes part, such as buckets of a trainer that was restarted."""
        paths = {b.path for b in buckets}
        for path in [p for p, attached in self._attached.items() if p not in paths or attached.is_stale()]:
            del self._attached[path], self._views[path]
        for bucket in buckets:
            if bucket.path not in self._attached:
                attached = AttachedBuffer(bucket.path, bucket.nbytes)
                views, nbytes, payload = _bucket_views(attached.bytes, self._copies[bucket.src_rank], self._dtypes)
                assert nbytes == bucket.nbytes, (nbytes, bucket)
                self._attached[bucket.path], self._views[bucket.path] = attached, (views, payload)

    def _check(self, bucket: Bucket) -> None:
        digest = self._attached[bucket.path].digest()
        if digest != bucket.digest:
            copies = self._copies[bucket.src_rank]
            raise SyncError(
                f"engine rank {self.rank}: the {bucket.nbytes} bytes from trainer rank {bucket.src_rank} "
                f"({copies[0].dst} ... {copies[-1].dst}) arrived with digest {digest}, sent with {bucket.digest}. "
                "Nothing of this rank was written; push again."
            )
