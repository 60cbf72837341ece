"""Bytes between nodes: point to point, in one process group of every trainer rank and every engine rank."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.errors import SyncError
from megatron_rl.resharding.spec import SyncSpec, engine_name, trainer_name
from megatron_rl.resharding.transport.links import STALL_S, Session


class Network:
    """NCCL where tensors are on GPUs, else gloo."""

    def __init__(self, session: Session, *, rank: int, size: int, device: torch.device):
        """Meet all `size` members: trainer ranks, then those of the engines.

        Raises: SyncError when some do not come within STALL_S.
        """
        self._session, self._me = session, session.me
        store = dist.PrefixStore(f"{session.name}/network", session.store)  # type: ignore[attr-defined]
        make = _nccl if device.type == "cuda" else _gloo
        try:
            self._group = make(store, rank, size, session.host)
        except RuntimeError as error:
            raise SyncError(f"{self._me}: not all {size} ranks joined the network group: {error}") from error

    def send(self, data: Tensor, peer: int) -> dist.Work:
        """Begin to send; `wait` on the result when the peer has it. Raises: SyncError when the peer is gone."""
        try:
            return self._group.send([data], peer, 0)
        except RuntimeError as error:
            raise self._session.reason(SyncError(f"{self._me} could not send: {error}")) from error

    def receive(self, into: Tensor, peer: int) -> dist.Work:
        """Begin to receive."""
        try:
            return self._group.recv([into], peer, 0)
        except RuntimeError as error:
            raise self._session.reason(SyncError(f"{self._me} could not receive: {error}")) from error

    def wait(self, work: dist.Work) -> None:
        """Until the bytes have moved. Raises: SyncError when the peer is gone or stalls."""
        try:
            work.wait(timedelta(seconds=STALL_S))
        except RuntimeError as error:
            gone = SyncError(f"{self._me}: the other end of a transfer is gone or stalled: {error}")
            raise self._session.reason(gone) from error

    def abort(self) -> None:
        """Break off what is under way, which the other ends notice at once."""
        self._group.abort()


def _gloo(store: Any, rank: int, size: int, host: str) -> dist.ProcessGroup:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=STALL_S)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(store, rank, size, options)  # type: ignore[return-value]


def _nccl(store: Any, rank: int, size: int, host: str) -> dist.ProcessGroup:
    return dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())  # type: ignore[return-value]


def join_network(session: Session, spec: SyncSpec, rank: int, device: torch.device) -> Network | None:
    """The group of all trainer ranks and then all engine ranks; None where all stand on one node."""
    placed = spec.placed()
    if len({node for node, _ in (*placed.trainers, *placed.engines)}) == 1:
        return None
    everybody = [trainer_name(r) for r in range(spec.trainer.world_size)]
    everybody += [engine_name(spec, r) for r in range(spec.readers)]
    session.meet(everybody)  # which names who is missing; the group's own error does not
    return Network(session, rank=rank, size=len(everybody), device=device)
