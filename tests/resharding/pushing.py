"""Both sides of a push in this process: every rank of them a thread, real links and real shared memory between them."""

import itertools
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.layouts.boxes import TensorLayout
from megatron_rl.layouts.compile import megatron_ranks, sglang_ranks
from megatron_rl.layouts.fp8 import with_scales
from megatron_rl.layouts.megatron_topology import MegatronTopology
from megatron_rl.layouts.sglang_topology import SglangTopology
from megatron_rl.models import load_table
from megatron_rl.resharding.destination import NamedTensors
from megatron_rl.resharding.receiver import Receiver
from megatron_rl.resharding.schedule import streamed_layouts
from megatron_rl.resharding.sender import Sender
from megatron_rl.resharding.spec import LoadReport, Push, SendReport, SyncSpec
from megatron_rl.resharding.transport.links import Session
from megatron_rl.resharding.transport.slots import Slots
from tests.tiny import CHARACTERS, TINY

VOCAB = len(set(CHARACTERS)) + 3
PAD = 77.0


TRAINERS: dict[str, dict[str, int]] = {
    "one": {"world_size": 1},
    "tp2_ep2": {"world_size": 4, "tp": 2, "ep": 2},
    "pp2_vpp2_ep2": {"world_size": 4, "pp": 2, "vpp": 2, "ep": 2},
}
ENGINES = {"tp1": SglangTopology(), "tp2": SglangTopology(tp=2), "tp2_ep2": SglangTopology(tp=2, ep=2)}


def make_spec(family: str, trainer: str, engine: str, to: str = "float32", **options: Any) -> SyncSpec:
    hf = {**TINY[family], "vocab_size": VOCAB}
    mtp = hf.get("num_nextn_predict_layers", 0)
    ours, theirs = MegatronTopology(**TRAINERS[trainer], num_layers=4, mtp_layers=mtp), ENGINES[engine]
    if not any(key.endswith("experts") for key in hf):
        ours, theirs = replace(ours, ep=1), replace(theirs, ep=1)
    return SyncSpec(hf, ours, theirs, "float32", to, **options)


def sources(spec: SyncSpec) -> Mapping[int, tuple[TensorLayout, ...]]:
    return megatron_ranks(load_table(spec.hf_config), spec.trainer, dtype=spec.trainer_dtype)


def destinations(spec: SyncSpec) -> Mapping[int, tuple[TensorLayout, ...]]:
    """Of one engine."""
    if not spec.direct:
        return dict.fromkeys(range(spec.engine.world_size), with_scales(streamed_layouts(spec)))
    table = load_table(spec.hf_config)
    ranks = sglang_ranks(table, spec.engine, dtype=spec.engine_dtype, quantized=spec.fp8)
    return {rank: with_scales(layouts) for rank, layouts in ranks.items()}


Values = Callable[[str, tuple[int, ...], tuple[int, ...]], Tensor]
"""What stands in a rectangle of an HF tensor: of (name, offset, shape)."""


def hf_value(name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """Each element its own number, exact in float32, and other ones in every tensor."""
    index = torch.arange(offset[-1], offset[-1] + shape[-1])
    if len(shape) == 2:
        index = torch.arange(offset[0], offset[0] + shape[0])[:, None] * 1009 + index
    return (index + crc32(name.encode()) % 2**23).float()


def values_of(checkpoint: Mapping[str, Tensor]) -> Values:
    """Those of a checkpoint."""
    return lambda name, offset, shape: checkpoint[name][
        tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))
    ]


def fill(layouts: tuple[TensorLayout, ...], values: Values = hf_value) -> dict[str, Tensor]:
    """The tensors of a rank that holds a model; padding is PAD."""
    tensors = {}
    for layout in layouts:
        tensor = torch.full(layout.shape, PAD, dtype=getattr(torch, layout.dtype))
        for box in layout.boxes:
            part = tensor[box.offset[0]] if len(box.offset) > len(box.shape) else tensor
            at = box.offset[-len(box.shape) :]
            part[tuple(slice(a, a + n) for a, n in zip(at, box.shape, strict=True))] = values(
                box.hf, box.hf_offset, box.shape
            ).to(tensor.dtype)
        tensors[layout.name] = tensor
    return tensors


def hashed(tensor: Tensor) -> str:
    """Of its bytes."""
    return blake2b(tensor.detach().contiguous().view(torch.uint8).numpy(), digest_size=16).hexdigest()


class Pushing:
    """Trainer ranks that hold a model, and engine ranks that hold nothing yet and want to hold another form of it."""

    def __init__(self, spec: SyncSpec, held: Values = hf_value, wanted: Values = hf_value):
        self.spec = spec
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.session = secrets.token_hex(8)
        self.tensors = {rank: fill(layouts, held) for rank, layouts in sources(spec).items()}
        ranks = [layouts for _, layouts in sorted(destinations(spec).items())]
        self.wanted = [fill(layouts, wanted) for _ in range(spec.engines) for layouts in ranks]
        self.parameters = [{name: torch.full_like(t, PAD) for name, t in want.items()} for want in self.wanted]
        self.senders = {rank: Sender(spec, rank) for rank in self.tensors}
        self.receivers = [Receiver(spec, reader) for reader in range(spec.readers)]
        self.loaded: list[list[str]] = [[] for _ in self.receivers]
        """Of each engine rank, what its loader was given."""

    def load(self, reader: int, tensors: NamedTensors) -> None:
        """The loader of an engine whose parameters are the HF checkpoint's."""
        for name, tensor in tensors:
            self.parameters[reader][name].copy_(tensor)
            self.loaded[reader].append(name)

    def push(self, version: int = 1, **options: Any) -> tuple[list[SendReport], list[LoadReport]]:
        """Raises: what the first of the ranks, trainers first, raised; the session is another one afterwards."""
        push = Push(f"127.0.0.1:{self.store.port}", self.session, version, **options)
        with ThreadPoolExecutor(len(self.senders) + len(self.receivers)) as pool:
            sending: list[Future[SendReport]] = [
                pool.submit(sender.send, self.tensors[rank], push) for rank, sender in self.senders.items()
            ]
            loading: list[Future[LoadReport]] = [
                pool.submit(r.receive, self.parameters[i], push, partial(self.load, i))
                for i, r in enumerate(self.receivers)
            ]
        if any(future.exception() for future in (*sending, *loading)):
            self.session = secrets.token_hex(8)
        self.errors = [str(e) for future in (*sending, *loading) if (e := future.exception())]
        return [future.result() for future in sending], [future.result() for future in loading]

    def is_complete(self) -> bool:
        """Whether every engine rank has exactly its own bytes, and its padding is as it was."""
        return all(
            torch.equal(got[name].view(torch.uint8), want[name].view(torch.uint8))
            for got, want in zip(self.parameters, self.wanted, strict=True)
            for name in want
        )

    def close(self) -> None:
        for part in (*self.senders.values(), *self.receivers):
            part.close()


def flip_a_bit(patch: pytest.MonkeyPatch, *, of: int = 0) -> None:
    """In the `of`-th message from now on, after its digest was taken."""
    offers = itertools.count()
    offer = Slots.offer

    def damaged(slots: Slots, session: Session, takers: Collection[str], nbytes: int, **description: Any) -> None:
        if takers and next(offers) == of:
            slots.next(nbytes)[nbytes // 2] ^= 1
        offer(slots, session, takers, nbytes, **description)

    patch.setattr(Slots, "offer", damaged)


def before_offer(patch: pytest.MonkeyPatch, number: int, act: Callable[[], object]) -> None:
    """Do something in the middle of a push: before the offer with that number of this process."""
    offers, offer = itertools.count(1), Slots.offer

    def acting(*args: Any, **description: Any) -> None:
        if next(offers) == number:
            act()
        offer(*args, **description)

    patch.setattr(Slots, "offer", acting)


@contextmanager
def pushing(spec: SyncSpec, **values: Values) -> Iterator[Pushing]:
    it = Pushing(spec, **values)
    try:
        yield it
    finally:
        it.close()
