"""One engine rank's half of a push: takes its messages as they come, checks each, and writes it into the parameters."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron_rl_kernels import checksum_boxes, copy_boxes, prepare
from torch import Tensor

from megatron_rl.errors import SyncError
from megatron_rl.layouts.compile import sglang_layouts
from megatron_rl.models import load_table
from megatron_rl.resharding.delta import Rebuild
from megatron_rl.resharding.messages import Message
from megatron_rl.resharding.schedule import make_schedule, needed_bytes, receives
from megatron_rl.resharding.spec import LoadReport, Push, SyncSpec, engine_name, trainer_name
from megatron_rl.resharding.timer import Timer
from megatron_rl.resharding.transport.ipc import attach_cuda
from megatron_rl.resharding.transport.links import PATIENCE_S, Link, Session
from megatron_rl.resharding.transport.network import Network, join_network
from megatron_rl.resharding.transport.shm import attach_shared
from megatron_rl.resharding.transport.slots import Slots
from megatron_rl.resharding.views import check_tensors, message_views, tensor_views

_DIFFERENT_PLANS = "The two computed different plans: run the same version of megatron_rl on both sides."


@dataclass(slots=True)
class _Progress:
    """Of one push."""

    expected: dict[str, dict[int, Message]]
    """By giver, what it has not offered yet, by number."""
    open: set[str] = field(default_factory=set)
    """Trainer ranks that have not said that they are done."""
    to_fetch: deque[tuple[Message, dict[str, Any]]] = field(default_factory=deque)
    received_bytes: int = 0
    covered_bytes: int = 0
    timer: Timer = field(default_factory=Timer)


class Receiver:
    """Keeps plan, mappings, views and links between pushes."""

    def __init__(self, spec: SyncSpec, reader: int, parameters: Mapping[str, Tensor]):
        """`parameters`: the engine rank's own, by name. `reader` counts the ranks of all engines."""
        self._spec, self._reader, self._parameters = spec, reader, parameters
        self._me = engine_name(spec, reader)
        schedule = make_schedule(spec)
        self._messages = receives(schedule, reader)
        self._needed_bytes = needed_bytes(schedule, reader)
        fetched = [m for m in self._messages if self._is_fetched(m)]
        self._slots = Slots(max((m.nbytes for m in fetched), default=0), next(iter(parameters.values())).device)
        self._takers = sorted({engine_name(spec, r) for m in fetched for r in m.readers if r != reader})
        self._session: Session | None = None
        self._last: Session | None = None
        """Also when it is over."""
        self._network: Network | None = None
        self._device = next(iter(parameters.values())).device
        self._attached: dict[str, Tensor] = {}
        """Buffers of givers, by path."""
        self._unpacking: dict[tuple[int, int], tuple[list[Tensor], list[Tensor], Callable[[], None]]] = {}
        """By memory and message: where its rectangles go to, where they lie in it, and the copy."""
        self._rebuild = Rebuild(self._me, parameters, max((m.nbytes for m in self._messages), default=0))

    @torch.no_grad()
    def receive(self, push: Push) -> LoadReport:
        """Take everything this rank needs; with `push.compare` compare the parameters with it, and write nothing.

        Raises: LayoutError when the parameters are not what the table declares; SyncError when a peer fails, or sends
        something else than expected. What was written until then stays written.
        """
        try:
            report = self._receive(self._join(push), push)
            self._rebuild.version = push.version
            return report
        except BaseException as error:
            self.leave(str(error) if isinstance(error, SyncError) else f"{self._me}: {error!r}")
            raise

    def leave(self, reason: str) -> None:
        """Close the links, if there are any, and tell the peers why."""
        if self._session is not None:
            self._session.fail(reason)
        if self._network is not None:
            self._network.abort()
        self._session = self._network = None
        self._slots.reset()
        self._attached, self._unpacking, self._rebuild.version = {}, {}, None

    def close(self) -> None:
        """Free the buffers and the links."""
        self.leave(f"{self._me} was closed.")
        self._slots.close()

    def _is_fetched(self, message: Message) -> bool:
        return message.kind == "network" and message.fetcher == self._reader

    def _giver(self, message: Message) -> str:
        direct = message.kind != "network" or self._is_fetched(message)
        return trainer_name(message.src) if direct else engine_name(self._spec, message.fetcher)

    def _join(self, push: Push) -> Session:
        """The links of the push's session, made when it is a new one; a new one checks the parameters too."""
        if self._session is None or self._session.name != push.session:
            self.leave(f"{self._me}: a new session began.")
            session = Session(self._me, meeting=push.meeting, name=push.session, before=self._last)
            self._session = self._last = session
            session.connect(givers=sorted({self._giver(m) for m in self._messages}), takers=self._takers)
            self._network = join_network(
                session, self._spec, self._spec.trainer.world_size + self._reader, self._device
            )
            spec, rank = self._spec, self._reader % self._spec.engine.world_size
            layouts = sglang_layouts(load_table(spec.hf_config), spec.engine, rank, dtype=spec.engine_dtype)
            check_tensors(self._parameters, layouts, whose=self._me)
        return self._session

    def _receive(self, session: Session, push: Push) -> LoadReport:
        """Whatever comes first is dealt with first: nobody waits for a certain peer, so no two wait for each other."""
        progress = _Progress(expected={giver: {} for giver in session.givers})
        for message in self._messages:
            progress.expected[self._giver(message)][message.number] = message
        progress.open = {trainer_name(m.src) for m in self._messages} & session.givers.keys()
        while progress.open or any(progress.expected.values()) or progress.to_fetch or not self._slots.is_idle:
            with progress.timer("wait"):
                patience_s = PATIENCE_S if self._slots.is_idle else 0.0
                ready = session.ready(lambda: [*self._slots.owed(), *_owed(progress)], patience_s=patience_s)
            for link in ready:
                self._hear(session, link, push, progress)
            while progress.to_fetch and self._slots.is_free:
                self._fetch(session, *progress.to_fetch.popleft(), push=push, progress=progress)
        unpack_s, check_s, wait_s = (progress.timer[stage] for stage in ("unpack", "check", "wait"))
        received, covered = progress.received_bytes, progress.covered_bytes
        staging_bytes = self._slots.nbytes + self._rebuild.nbytes
        return LoadReport(received, covered, self._needed_bytes, unpack_s, check_s, wait_s, staging_bytes)

    def _hear(self, session: Session, link: Link, push: Push, progress: _Progress) -> None:
        """Deal with one message of a peer."""
        news = link.receive()
        if session.takers.get(link.peer) is link:
            self._slots.answered(news["slot"], link.peer)
        elif "end" in news:
            if left := progress.expected[link.peer]:
                raise SyncError(
                    f"{self._me}: {link.peer} is done and {len(left)} of its messages never came, the first with "
                    f"{next(iter(left.values())).content}. Push again."
                )
            progress.open.remove(link.peer)
        else:
            message = self._check(link.peer, news, push, progress)
            if self._is_fetched(message):
                progress.to_fetch.append((message, news))
                return
            self._take(link.peer, message, news, self._attach(news), push, progress)
            link.send(slot=news["slot"])

    def _check(self, giver: str, news: dict[str, Any], push: Push, progress: _Progress) -> Message:
        """The message that an offer is about, which must be due."""
        if news["version"] != push.version:
            raise SyncError(
                f"{self._me} was told to load version {push.version}, and {giver} sends version {news['version']}. "
                "Push again, to trainer and engines alike."
            )
        due = progress.expected[giver].pop(news["number"], None)
        if due is None:
            known = [m.content for m in self._messages if (self._giver(m), m.number) == (giver, news["number"])]
            raise SyncError(
                f"{self._me}: {giver} sent message {news['number']} "
                + (f"({known[0]}) twice. Push again." if known else f"which is not expected. {_DIFFERENT_PLANS}")
            )
        if news["plan"] != due.digest:
            raise SyncError(
                f"{self._me} expects {due.content} in message {due.number} of {giver}, which describes it otherwise. "
                + _DIFFERENT_PLANS
            )
        return due

    def _attach(self, news: dict[str, Any]) -> Tensor:
        """The giver's buffer, mapped here."""
        path = news["path"]
        if path not in self._attached:
            on_gpu = self._device.type == "cuda"
            self._attached[path] = attach_cuda(path) if on_gpu else attach_shared(path, news["size"])
        return self._attached[path]

    def _fetch(
        self, session: Session, message: Message, news: dict[str, Any], *, push: Push, progress: _Progress
    ) -> None:
        """Get a message from another node, and hand it on inside this one."""
        assert self._network is not None, "messages come from other nodes only where there are several"
        giver = session.givers[trainer_name(message.src)]
        memory = self._slots.next(news["nbytes"])
        if len(memory):  # nothing changed, else
            work = self._network.receive(memory, message.src)
            giver.send(slot=news["slot"], fetch_as=self._spec.trainer.world_size + self._reader)
            with progress.timer("wait"):
                self._network.wait(work)
        self._take(giver.peer, message, news, memory, push, progress)
        giver.send(slot=news["slot"])
        others = {engine_name(self._spec, reader) for reader in message.readers if reader != self._reader}
        offer = {key: news[key] for key in ("number", "plan", "version", "checksum", "delta")}
        self._slots.offer(session, others, len(memory), content=message.content, **offer)

    def _take(
        self, giver: str, message: Message, news: dict[str, Any], memory: Tensor, push: Push, progress: _Progress
    ) -> None:
        """Check a message and write it into the parameters, or compare them with it."""
        sent_bytes = news["nbytes"]
        with progress.timer("check"):
            (found,) = checksum_boxes([memory[:sent_bytes]])
        if found != news["checksum"]:
            raise SyncError(
                f"{self._me}: the {sent_bytes} bytes of message {message.number} from {giver} "
                f"({message.content}) arrived with checksum {found}, sent with {news['checksum']}. Push again."
            )
        if news["delta"]:
            memory = self._rebuild(giver, message, memory, progress.timer, **news["delta"])
        key = memory.data_ptr(), message.number
        if key not in self._unpacking:
            held, sent = tensor_views(self._parameters, message.pieces), message_views(memory, message.pieces)
            self._unpacking[key] = held, sent, prepare(copy_boxes, held, sent)
        held, sent, unpack = self._unpacking[key]
        with progress.timer("unpack"):
            if push.compare:
                self._compare(message, held, sent)
            else:
                unpack()
                if self._device.type == "cuda":
                    torch.cuda.current_stream(self._device).synchronize()  # the giver may fill the buffer again
        if message.kind != "local":
            covered = sum(view.nbytes for view in sent)
            progress.covered_bytes += covered
            progress.received_bytes += sent_bytes if news["delta"] else covered

    def _compare(self, message: Message, held: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        """Raises: SyncError naming tensor, ranks and the first element that differs."""
        for piece, ours, want in zip(message.pieces, held, sent, strict=True):
            # As bytes: NaN equals itself there, and 0.0 is not -0.0.
            differs = ours.contiguous().view(torch.uint8) != want.view(torch.uint8)
            if differs.any():
                first = int(differs.flatten().nonzero()[0]) // want.element_size()
                at = [int(i) for i in torch.unravel_index(torch.tensor(first), want.shape)]
                lead = len(piece.offset) - len(at)
                where = [*piece.offset[:lead], *(a + i for a, i in zip(piece.offset[lead:], at, strict=True))]
                raise SyncError(
                    f"{self._me}: {piece.tensor}{where} is {ours[tuple(at)].item()} after the load, and "
                    f"{trainer_name(message.src)} sent {want[tuple(at)].item()}: something wrote over it. Switch off "
                    "what changes weights in the engine (rollout.sglang), or test the machine's memory."
                )


def _owed(progress: _Progress) -> list[str]:
    """Which givers have not sent what."""
    first = {giver: next(iter(left.values())).content for giver, left in progress.expected.items() if left}
    return [f"{giver} has not sent {content}" for giver, content in first.items()] + [
        f"{giver} has not said that it is done" for giver in sorted(progress.open - first.keys())
    ]
