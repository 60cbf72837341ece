"""One trainer rank's half of a push: packs its messages, one after the other, and waits for those who take them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.errors import SyncError
from megatron_rl.layouts.compile import megatron_layouts
from megatron_rl.models import load_table
from megatron_rl.resharding.delta import Held, clear_gaps
from megatron_rl.resharding.messages import Message, handling
from megatron_rl.resharding.schedule import make_schedule, sends, unordered
from megatron_rl.resharding.spec import Push, SendReport, SyncSpec, engine_name, trainer_name
from megatron_rl.resharding.timer import Timer
from megatron_rl.resharding.transport.links import Session
from megatron_rl.resharding.transport.network import Network, join_network
from megatron_rl.resharding.transport.slots import Slots
from megatron_rl.resharding.views import check_tensors, checksum_of, pack, packing

CPU = torch.device("cpu")


class Sender:
    """Keeps plan, buffers, views and links between pushes."""

    def __init__(self, spec: SyncSpec, rank: int, device: torch.device = CPU):
        """`device`: where the tensors lie."""
        self._device = device
        self._spec, self._rank, self._me = spec, rank, trainer_name(rank)
        schedule = make_schedule(spec)
        self._messages = sends(schedule, rank)
        self._in_full = {m.number for m in self._messages[unordered(schedule, self._messages) :]}
        """Messages that readers keep in another form, so that they hold nothing which changes could go into."""
        self._layouts = megatron_layouts(load_table(spec.hf_config), spec.trainer, rank, dtype=spec.trainer_dtype)
        self._slots = Slots(max((m.nbytes for m in self._messages), default=0), device)
        self._takers = sorted({engine_name(spec, reader) for m in self._messages for reader in m.takers})
        self._session: Session | None = None
        self._last: Session | None = None
        """Also when it is over."""
        self._network: Network | None = None
        self._sending: dict[int, dist.Work] = {}
        """By slot: what the network still moves out of it."""
        self._addresses: tuple[int, ...] = ()
        self._packing: dict[tuple[int, int], list[tuple[Callable[[], None], Tensor]]] = {}
        """By slot and message."""
        self._held = Held()
        """Stays empty without `spec.delta`."""

    @torch.no_grad()
    def send(self, tensors: Mapping[str, Tensor], push: Push) -> SendReport:
        """Give every engine rank what it needs of `tensors` (layout name -> local tensor); returns when all have it.

        Raises: LayoutError when `tensors` are not what the table declares; SyncError when a peer fails or is gone.
        """
        timer = Timer()
        try:
            session = self._join(push)
            self._bind(tensors)
            self._held.begin()
            for message in self._messages:
                with timer("wait"):
                    self._serve(session, until=lambda: self._slots.is_free)
                with handling(message, self._me):
                    memory, whole = self._pack(tensors, message, timer)
                    memory, form = self._shorten(message, memory, whole, push, timer)
                takers = {engine_name(self._spec, reader) for reader in message.takers}
                description = {"number": message.number, "plan": message.digest, "version": push.version}
                self._slots.offer(session, takers, len(memory), content=message.content, **description, **form)
            with timer("wait"):
                self._serve(session, until=lambda: self._slots.is_idle)
            for link in session.takers.values():
                link.send(end=push.version)
            held = self._held
            held.version = push.version
            staging_bytes = self._slots.nbytes + held.nbytes
            return SendReport(timer["pack"], timer["check"], timer["wait"], staging_bytes, held.compared, held.changed)
        except BaseException as error:
            self.leave(str(error) if isinstance(error, SyncError) else f"{self._me}: {error!r}")
            raise

    def _join(self, push: Push) -> Session:
        """The links of the push's session, made when it is a new one."""
        if self._session is None or self._session.name != push.session:
            self.leave(f"{self._me}: a new session began.")
            session = Session(self._me, meeting=push.meeting, name=push.session, before=self._last)
            self._session = self._last = session
            session.connect(givers=[], takers=self._takers)
            self._network = join_network(session, self._spec, self._rank, self._device)
        return self._session

    def leave(self, reason: str) -> None:
        """Close the links, if there are any, and tell the peers why."""
        if self._session is not None:
            self._session.fail(reason)
        if self._network is not None:
            self._network.abort()
        self._session = self._network = None
        self._sending.clear()
        self._slots.reset()
        self._held.forget()

    def _bind(self, tensors: Mapping[str, Tensor]) -> None:
        addresses = tuple(t.data_ptr() for t in tensors.values())
        if addresses != self._addresses:
            check_tensors(tensors, self._layouts, whose=self._me)
            self._addresses, self._packing = addresses, {}

    def _pack(self, tensors: Mapping[str, Tensor], message: Message, timer: Timer) -> tuple[Tensor, list[str]]:
        """The filled slot, and the checksums of its parts."""
        memory = self._slots.next(message.nbytes)
        key = memory.data_ptr(), message.number
        if key not in self._packing:
            self._packing[key] = packing(memory, message, tensors)
        if self._spec.delta:
            clear_gaps(memory, message)
        return memory, pack(self._packing[key], timer)

    def _shorten(
        self, message: Message, memory: Tensor, whole: list[str], push: Push, timer: Timer
    ) -> tuple[Tensor, dict[str, Any]]:
        """What of a filled slot is sent, the message or what changed in it, and how it is announced.

        `whole`: its checksums.
        """
        changes = None
        if self._spec.delta and not push.compare and message.number not in self._in_full:
            with timer("pack"):
                changes = self._held.shorten(message, memory)
        if changes is None:
            return memory, {"checksums": whole, "delta": None}
        memory, count = changes
        with timer("check"):
            found = [checksum_of(memory)]
        return memory, {"checksums": found, "delta": {"since": self._held.version, "count": count, "whole": whole}}

    def _serve(self, session: Session, *, until: Callable[[], bool]) -> None:
        """Hear the takers."""
        while not until():
            for link in session.ready(self._slots.owed):
                news = link.receive()
                if "slot" not in news:
                    continue  # a sign of life
                slot = news["slot"]
                if "fetch_as" in news:
                    assert self._network is not None, "only messages between nodes are fetched"
                    self._sending[slot] = self._network.send(self._slots.filled(slot), news["fetch_as"])
                    continue
                if slot in self._sending:
                    assert self._network is not None
                    self._network.wait(self._sending.pop(slot))
                self._slots.answered(slot, link.peer)

    def close(self) -> None:
        """Free the buffers and the links."""
        self.leave(f"{self._me} was closed.")
        self._slots.close()
