"""One engine rank's half of a push: takes its messages as they come, checks each, and writes it into the parameters.

Where the engine's layout is not known (`SyncSpec.direct` is False) the messages have an order, and HF tensors put
together from them go to the engine's own loader.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_rl.errors import SyncError
from megatron_rl.layouts.compile import sglang_layouts
from megatron_rl.layouts.fp8 import with_scales
from megatron_rl.models import load_table
from megatron_rl.resharding.arrival import proved
from megatron_rl.resharding.delta import Rebuild
from megatron_rl.resharding.destination import Assembly, NamedTensors, Parameters
from megatron_rl.resharding.messages import Message, handling
from megatron_rl.resharding.progress import Progress
from megatron_rl.resharding.schedule import make_schedule, needed_bytes, receives, streamed_layouts, unordered
from megatron_rl.resharding.spec import LoadReport, Push, SyncSpec, engine_name, trainer_name
from megatron_rl.resharding.transport.links import PATIENCE_S, Link, Session
from megatron_rl.resharding.transport.network import Network, join_network
from megatron_rl.resharding.transport.slots import Slots, attach
from megatron_rl.resharding.views import check_tensors

CPU = torch.device("cpu")
_DIFFERENT_PLANS = "The two computed different plans: run the same version of megatron_rl on both sides."


class Receiver:
    """Keeps plan, mappings, views and links between pushes."""

    def __init__(self, spec: SyncSpec, reader: int, device: torch.device = CPU):
        """`reader` counts the ranks of all engines. `device`: where the parameters lie."""
        self._spec, self._reader, self._device = spec, reader, device
        self._me = engine_name(spec, reader)
        schedule = make_schedule(spec)
        self._messages = receives(schedule, reader)
        self._needed_bytes = needed_bytes(schedule, reader)
        self._unordered = unordered(schedule, self._messages)
        fetched = [m for m in self._messages if self._is_fetched(m)]
        self._slots = Slots(max((m.nbytes for m in fetched), default=0), device)
        self._takers = sorted({engine_name(spec, r) for m in fetched for r in m.readers if r != reader})
        self._session: Session | None = None
        self._last: Session | None = None
        """Also when it is over."""
        self._network: Network | None = None
        self._attached: dict[str, Tensor] = {}
        """Buffers of givers, by path."""
        self._in_full = self._messages[self._unordered :] if spec.direct else ()
        self._addresses: dict[str, int] = {}
        """Of the parameters that the next two have views of."""
        self._into, self._rebuild = Parameters({}, self._me), Rebuild(self._me, {}, 0)

    @torch.no_grad()
    def receive(
        self, parameters: Mapping[str, Tensor], push: Push, load: Callable[[NamedTensors], object] = list
    ) -> LoadReport:
        """Take everything this rank needs; with `push.compare` compare the parameters with it, and write nothing.

        parameters: the rank's own, by name, as they lie now.
        load: asked to take HF tensors, which come while it goes through them; where the spec is direct there are none.
        Raises: LayoutError when the parameters are not what the table declares; SyncError when a peer fails, or sends
        something else than expected. What was written until then stays written.
        """
        try:
            session = self._join(push)
            self._bind(parameters)
            report = self._receive(session, push, load)
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
        self._attached, self._addresses, self._rebuild.version = {}, {}, None

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
        """The links of the push's session, made when it is a new one."""
        if self._session is None or self._session.name != push.session:
            self.leave(f"{self._me}: a new session began.")
            session = Session(self._me, meeting=push.meeting, name=push.session, before=self._last)
            self._session = self._last = session
            session.connect(givers=sorted({self._giver(m) for m in self._messages}), takers=self._takers)
            self._network = join_network(
                session, self._spec, self._spec.trainer.world_size + self._reader, self._device
            )
        return self._session

    def _bind(self, parameters: Mapping[str, Tensor]) -> None:
        """Check and view the parameters, when the session is new or SGLang has put any into other memory."""
        addresses = {name: tensor.data_ptr() for name, tensor in parameters.items()}
        if addresses == self._addresses:
            return
        spec, rank, version = self._spec, self._reader % self._spec.engine.world_size, self._rebuild.version
        if spec.direct:
            table, dtype = load_table(spec.hf_config), spec.engine_dtype
            layouts = sglang_layouts(table, spec.engine, rank, dtype=dtype, quantized=spec.fp8)
            check_tensors(parameters, with_scales(layouts), whose=self._me)
        self._addresses, self._into = addresses, Parameters(parameters, self._me, self._in_full)
        self._rebuild = Rebuild(self._me, parameters, max((m.nbytes for m in self._messages), default=0))
        self._rebuild.version = version  # whether they still hold it is proved message by message

    def _receive(self, session: Session, push: Push, load: Callable[[NamedTensors], object]) -> LoadReport:
        into: Parameters | Assembly = self._into
        if not self._spec.direct:
            into = Assembly(with_scales(streamed_layouts(self._spec)), self._device)
        progress = Progress({giver: {} for giver in session.givers}, into)
        for message in self._messages:
            progress.expected[self._giver(message)][message.number] = message
        progress.open = {trainer_name(m.src) for m in self._messages} & session.givers.keys()
        arriving = self._arriving(session, push, progress)
        load(arriving)
        for name, _ in arriving:
            raise SyncError(f"{self._me}: the engine's loader ended before {name}. Is this model its own?")
        staging_bytes = self._slots.nbytes + self._rebuild.nbytes + into.peak_bytes
        return progress.report(self._needed_bytes, staging_bytes, by_loader=not self._spec.direct)

    def _arriving(self, session: Session, push: Push, progress: Progress) -> Iterator[tuple[str, Tensor]]:
        """Until everything has come; HF tensors as they get whole.

        Whatever comes first is dealt with first: nobody waits for a certain peer, so no two wait for each other.
        HF tensors wait for a certain message, the lowest; `schedule` says why that is safe too.
        """
        while not progress.is_over or not self._slots.is_idle:
            with progress.timer("wait"):
                patience_s = PATIENCE_S if self._slots.is_idle else 0.0
                ready = session.ready(lambda: [*self._slots.owed(), *progress.owed()], patience_s=patience_s)
            for link in ready:
                self._hear(session, link, push, progress)
            while (number := self._due(progress)) is not None:
                message, link, news = progress.offered.pop(number)
                progress.taken += 1
                with handling(message, f"{self._me}, from {link.peer}"):
                    if self._is_fetched(message):
                        self._fetch(session, message, news, push, progress)
                    else:
                        memory = attach(session, news, self._device, self._attached)
                        self._take(link.peer, message, news, memory, push, progress)
                        link.send(slot=news["slot"])
                yield from progress.into.finished()
                progress.reassure(session.givers.values())

    def _due(self, progress: Progress) -> int | None:
        """The number of the offer to deal with now, if there is one; what is fetched needs a slot."""
        if not progress.offered:
            return None
        last = self._messages[max(self._unordered, progress.taken + 1) - 1].number
        turns = (n for n in progress.offered if n <= last)
        return next((n for n in turns if self._slots.is_free or not self._is_fetched(progress.offered[n][0])), None)

    def _hear(self, session: Session, link: Link, push: Push, progress: Progress) -> None:
        """Deal with one message of a peer."""
        news = link.receive()
        if session.takers.get(link.peer) is link:
            if "slot" in news:
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
            progress.offered[message.number] = message, link, news

    def _check(self, giver: str, news: dict[str, Any], push: Push, progress: Progress) -> Message:
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

    def _fetch(self, session: Session, message: Message, news: dict[str, Any], push: Push, progress: Progress) -> None:
        """Get a message from another node, and hand it on inside this one."""
        assert self._network is not None, "messages come from other nodes only where there are several"
        giver = session.givers[trainer_name(message.src)]
        memory = self._slots.next(news["nbytes"])
        if len(memory):  # nothing changed, else
            # Asked for first: NCCL's first transfer between two ranks begins when both are there.
            giver.send(slot=news["slot"], fetch_as=self._spec.trainer.world_size + self._reader)
            work = self._network.receive(memory, message.src)
            with progress.timer("wait"):
                self._network.wait(work)
        self._take(giver.peer, message, news, memory, push, progress)
        giver.send(slot=news["slot"])
        others = {engine_name(self._spec, reader) for reader in message.readers if reader != self._reader}
        offer = {key: news[key] for key in ("number", "plan", "version", "checksums", "delta")}
        self._slots.offer(session, others, len(memory), content=message.content, **offer)

    def _take(
        self, giver: str, message: Message, news: dict[str, Any], memory: Tensor, push: Push, progress: Progress
    ) -> None:
        """Check a message and write it into the parameters, or compare them with it, part by part."""
        sent_bytes, timer = news["nbytes"], progress.timer
        for part, proven in proved(message, news, memory, me=self._me, giver=giver, rebuild=self._rebuild, timer=timer):
            with timer("unpack"):
                progress.into.write(message, part, proven, compare=push.compare)
        if self._device.type == "cuda":
            with timer("unpack"):
                torch.cuda.current_stream(self._device).synchronize()  # the giver may fill the buffer again
        if message.kind != "local":
            progress.covered_bytes += message.payload_bytes
            # Nobody reads what lies between rectangles.
            progress.received_bytes += sent_bytes - (0 if news["delta"] else message.nbytes - message.payload_bytes)
