"""Connections between a giver of bytes and those who take them: short JSON messages, and the news that a peer is gone.

Every push runs inside a session, whose name is secret: who does not know it is not let in. Givers listen, takers
connect; both find each other's addresses in a TCPStore that the first trainer rank keeps. The operating system closes
the connections of a process that dies, so a peer's death is known at once, whoever waits for it.
"""

import contextlib
import hmac
import json
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

from megatron_rl.errors import SyncError

STALL_S = 20.0
"""Without a message from any peer, of which at least one owes something."""
PATIENCE_S = 4.0
"""Beyond STALL_S, for peers that may themselves wait for others: who is closer to the fault is to name it first."""
REASON_S = 1.0
"""After a broken transfer, for the message in which the other end says why."""
BACKLOG = 64
"""Connections of strangers that keep no taker out."""
_GREETING_BYTES = 32


class Link:
    """One connection. Errors name the peer."""

    def __init__(self, connected: socket.socket, peer: str):
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        limit = struct.pack("ll", int(STALL_S), int(STALL_S % 1 * 1e6))
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # of a peer that no longer reads, or sends half
            connected.setsockopt(socket.SOL_SOCKET, option, limit)
        self.peer = peer
        self._connection = Connection(connected.detach())

    def fileno(self) -> int:
        """For `wait`."""
        return self._connection.fileno()

    def send(self, **message: Any) -> None:
        """Raises: SyncError when the peer gave up and said why, is gone, or does not read."""
        try:
            self._connection.send_bytes(json.dumps(message).encode())
        except BlockingIOError as error:
            raise SyncError(f"{self.peer} has read nothing for {STALL_S:.0f} s: it hangs.") from error
        except OSError:
            while True:  # until its last word, or its end
                self.receive()

    def receive(self) -> dict[str, Any]:
        """The next message. Raises: SyncError when the peer is gone, or says that it gave up and why."""
        try:
            message: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise SyncError(
                f"{self.peer} ended in the middle of a weight update; its log says why. Resume with the same command."
            ) from error
        if "failed" in message:
            raise SyncError(message["failed"])
        return message

    def close(self) -> None:
        """The peer sees the end of the connection."""
        self._connection.close()


class Session:
    """This process's links of one session."""

    def __init__(self, me: str, *, meeting: str, name: str, before: "Session | None"):
        """`meeting`: host:port of the TCPStore; its client is that of `before`, the last session, if that had the same.

        torch asks the DNS for both ends of a new client, which takes seconds where an answer is lost.
        Raises: SyncError when nobody keeps a store there.
        """
        self.me, self.name, self.meeting = me, name, meeting
        self.givers: dict[str, Link] = {}
        self.takers: dict[str, Link] = {}
        self._news = selectors.DefaultSelector()
        """Of all links; a push asks it hundreds of times."""
        self.store: Any
        self.host: str
        if before is not None and before.meeting == meeting:
            self.store, self.host = before.store, before.host
            return
        host, _, port = meeting.rpartition(":")
        try:
            timeout = timedelta(seconds=STALL_S)
            self.store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]
            self.host = _own_address(host)
        except (OSError, RuntimeError) as error:
            raise SyncError(f"{me}: nobody keeps the addresses of the trainer at {meeting}: {error}") from error

    def connect(self, *, givers: Iterable[str], takers: Sequence[str]) -> None:
        """Link to every giver and from every taker. Raises: SyncError naming who did not come within STALL_S."""
        deadline = time.monotonic() + STALL_S
        listener = socket.create_server((self.host, 0), backlog=len(takers) + BACKLOG)
        with listener:
            if takers:
                self.store.set(f"{self.name}/{self.me}", f"{self.host}:{listener.getsockname()[1]}")
            for giver in givers:
                self.givers[giver] = self._connect(giver, deadline)
            self._accept(listener, takers, deadline)
        for link in self._links():
            self._news.register(link, selectors.EVENT_READ)

    def _connect(self, giver: str, deadline: float) -> Link:
        key = f"{self.name}/{giver}"
        try:
            self.store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), 0.01)))
            host, _, port = self.store.get(key).decode().rpartition(":")
            connected = socket.create_connection((host, int(port)), timeout=max(deadline - time.monotonic(), 0.01))
            connected.sendall(self._greeting(self.me))
        except (OSError, RuntimeError) as error:
            raise SyncError(f"{self.me} found no {giver} within {STALL_S:.0f} s: {error}") from error
        return Link(connected, giver)

    def _accept(self, listener: socket.socket, takers: Sequence[str], deadline: float) -> None:
        """Wait for the takers. Strangers, and those who say nothing, are passed over and keep nobody waiting."""
        greetings = {self._greeting(taker): taker for taker in takers}
        listener.setblocking(False)
        silent: set[socket.socket] = set()
        try:
            while greetings:
                ready = wait([listener, *silent], max(deadline - time.monotonic(), 0))
                if not ready or time.monotonic() > deadline:  # strangers may keep coming
                    raise SyncError(f"{self.me} waited {STALL_S:.0f} s for {_names(greetings.values())}, in vain.")
                if listener in ready:
                    with contextlib.suppress(OSError):  # it may be gone by now
                        one = listener.accept()[0]
                        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _GREETING_BYTES)  # readable: it is whole
                        silent.add(one)
                for one in silent.intersection(ready):
                    silent.remove(one)
                    if taker := greetings.pop(_greeting_of(one), None):
                        self.takers[taker] = Link(one, taker)
                    else:
                        one.close()
        finally:
            for one in silent:
                one.close()

    def _greeting(self, taker: str) -> bytes:
        """Nobody else can say it: the session's name never leaves those who know it."""
        return hmac.digest(self.name.encode(), taker.encode(), "sha256")

    def meet(self, everybody: Sequence[str]) -> None:
        """Wait until `everybody` of the session came here. Raises: SyncError naming who did not within STALL_S."""
        keys = {f"{self.name}/met/{who}": who for who in everybody}
        missing: list[str] = []
        try:
            self.store.set(f"{self.name}/met/{self.me}", "")
            self.store.wait(list(keys), timedelta(seconds=STALL_S))
        except RuntimeError as error:
            with contextlib.suppress(RuntimeError):  # the store may be what is gone
                missing = [who for key, who in keys.items() if not self.store.check([key])]
            late = SyncError(
                f"{self.me} waited {STALL_S:.0f} s for {_names(missing) or 'the others'}, in vain: {error}"
            )
            raise self.reason(late) from error

    def ready(self, owed: Callable[[], Iterable[str]], *, patience_s: float = 0.0) -> list[Link]:
        """Links with news. Raises: SyncError when none come for STALL_S and `patience_s`; it says who owes what."""
        limit_s = STALL_S + patience_s
        found = self._news.select(limit_s)
        if not found:
            raise SyncError(f"{self.me} heard nothing for {limit_s:.0f} s: {'; '.join(owed())}.")
        return [key.fileobj for key, _ in found]  # type: ignore[misc]

    def reason(self, error: SyncError) -> SyncError:
        """Why a transfer broke: a peer's last word, or that it ended; `error` when none says so within REASON_S."""
        deadline = time.monotonic() + REASON_S
        while ready := wait(self._links(), max(deadline - time.monotonic(), 0)):  # type: ignore[arg-type]
            for link in ready:
                try:
                    link.receive()  # type: ignore[union-attr]
                except SyncError as said:
                    return said
        return error

    def _links(self) -> list[Link]:
        return [*self.givers.values(), *self.takers.values()]

    def fail(self, reason: str) -> None:
        """Tell every peer why this process gives up, and close."""
        for link in self._links():
            with contextlib.suppress(SyncError):  # it may be the one that failed
                link.send(failed=reason)
        self.close()

    def close(self) -> None:
        """Close every link."""
        self._news.close()
        for link in self._links():
            link.close()
        self.givers, self.takers = {}, {}


def _greeting_of(connected: socket.socket) -> bytes:
    """What a readable connection begins with; too little of a stranger."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    try:
        return connected.recv(_GREETING_BYTES, socket.MSG_DONTWAIT)
    except OSError:
        return b""


def _names(peers: Iterable[str]) -> str:
    return ", ".join(sorted(peers))


def _own_address(towards: str) -> str:
    """Of this machine, as `towards` sees it. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((towards, 1))
        return str(s.getsockname()[0])
