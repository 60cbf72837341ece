"""The giver's memory: two buffers, so that one is filled while takers read the other."""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_rl.errors import SyncError
from megatron_rl.resharding.transport.ipc import CudaBuffer, attach_cuda
from megatron_rl.resharding.transport.links import Session
from megatron_rl.resharding.transport.shm import SharedBuffer, attach_shared

SLOTS = 2


class Slots:
    """Filled in turn; a slot is free again when all its takers have answered."""

    def __init__(self, nbytes: int, device: torch.device):
        """`nbytes` of the largest message; 0 when this process gives nothing."""
        self.nbytes = SLOTS * nbytes
        self._make = partial(CudaBuffer, device=device) if device.type == "cuda" else SharedBuffer
        self._buffers: list[CudaBuffer | SharedBuffer] = []
        self._waiting_for: list[set[str]] = [set() for _ in range(SLOTS)]
        self._filled, self._content = [0] * SLOTS, [""] * SLOTS
        self._next = 0

    @property
    def is_free(self) -> bool:
        """Whether the next slot can be filled."""
        return not self._waiting_for[self._next]

    @property
    def is_idle(self) -> bool:
        """Whether every taker has answered."""
        return not any(self._waiting_for)

    def next(self, nbytes: int) -> Tensor:
        """Memory, uint8 [nbytes], of the slot to fill, which must be free."""
        if not self._buffers:  # not earlier: without memory for them, this process can tell its peers by now
            self._buffers = [self._make(self.nbytes // SLOTS) for _ in range(SLOTS)]
        return self._buffers[self._next].bytes[:nbytes]

    def offer(
        self, session: Session, takers: Collection[str], nbytes: int, *, content: str, **description: object
    ) -> None:
        """Tell `takers` that the next slot is filled, and go on to the other. `content` is for errors."""
        slot, self._next = self._next, (self._next + 1) % SLOTS
        buffer, self._filled[slot], self._content[slot] = self._buffers[slot], nbytes, content
        place = {"slot": slot, "path": buffer.path, "size": buffer.nbytes, "nbytes": nbytes}
        self._waiting_for[slot] = set(takers)
        for taker in takers:
            session.takers[taker].send(**place, **description)

    def owed(self) -> list[str]:
        """Who has not answered, and for what."""
        return [
            f"{taker} has not taken {self._content[slot]}"
            for slot, takers in enumerate(self._waiting_for)
            for taker in sorted(takers)
        ]

    def filled(self, slot: int) -> Tensor:
        """What was offered in a slot, uint8 [nbytes]."""
        return self._buffers[slot].bytes[: self._filled[slot]]

    def answered(self, slot: int, taker: str) -> None:
        """`taker` no longer needs what is in `slot`. Raises: SyncError when it was not asked."""
        if taker not in self._waiting_for[slot]:
            raise SyncError(f"{taker} answered for a buffer that was not offered to it: two updates are mixed up.")
        self._waiting_for[slot].remove(taker)

    def reset(self) -> None:
        """Forget the takers of a push that failed."""
        self._waiting_for = [set() for _ in range(SLOTS)]

    def close(self) -> None:
        """Free the memory."""
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []


def attach(session: Session, offer: Mapping[str, Any], device: torch.device, attached: dict[str, Tensor]) -> Tensor:
    """The giver's buffer that an offer is about; `attached`, by path, grows.

    Raises: SyncError; it names a giver that has ended since it offered.
    """
    path = offer["path"]
    if path not in attached:
        try:
            attached[path] = attach_cuda(path) if device.type == "cuda" else attach_shared(path, offer["size"])
        except SyncError as error:
            raise session.reason(error) from error
    return attached[path]
