"""Connections between a giver of bytes and those who take them: short JSON messages, and the news that a peer is gone.

Every push runs inside a session, whose name is secret: who does not know it is not let in. Givers listen, takers
connect; both find each other's addresses in a TCPStore that the first trainer rank keeps. The operating system closes
the connections of a process that dies, so a peer's death is known at once, whoever waits for it.
"""

import contextlib
import hmac
import json
import socket
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

from megatron_rl.errors import SyncError

STALL_S = 20.0
"""Without a message from any peer, of which at least one owes something."""


class Link:
    """One connection. Errors name the peer."""

    def __init__(self, connected: socket.socket, peer: str):
        connected.settimeout(None)
        self.peer = peer
        self._connection = Connection(connected.detach())

    def fileno(self) -> int:
        """For `wait`."""
        return self._connection.fileno()

    def send(self, **message: Any) -> None:
        """Raises: SyncError when the peer is gone."""
        try:
            self._connection.send_bytes(json.dumps(message).encode())
        except OSError as error:
            raise SyncError(f"{self.peer} is gone: {error}.") from error

    def receive(self) -> dict[str, Any]:
        """The next message. Raises: SyncError when the peer is gone, or says that it gave up and why."""
        try:
            message: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise SyncError(f"{self.peer} ended in the middle of a weight update.") from error
        if "failed" in message:
            raise SyncError(message["failed"])
        return message

    def close(self) -> None:
        """The peer sees the end of the connection."""
        self._connection.close()


class Session:
    """This process's links of one session."""

    def __init__(self, me: str, *, meeting: str, name: str):
        """`meeting`: host:port of the TCPStore. Raises: SyncError when nobody keeps one there."""
        self.me, self.name = me, name
        self.givers: dict[str, Link] = {}
        self.takers: dict[str, Link] = {}
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
        listener = socket.create_server((self.host, 0), backlog=max(len(takers), 1))
        with listener:
            if takers:
                self.store.set(f"{self.name}/{self.me}", f"{self.host}:{listener.getsockname()[1]}")
            for giver in givers:
                self.givers[giver] = self._connect(giver, deadline)
            while missing := set(takers) - self.takers.keys():
                try:
                    listener.settimeout(max(deadline - time.monotonic(), 0.01))
                    link = self._accept(listener.accept()[0], deadline)
                except TimeoutError as error:
                    raise SyncError(f"{self.me} waited {STALL_S:.0f} s for {_names(missing)}, in vain.") from error
                if link:
                    self.takers[link.peer] = link

    def _connect(self, giver: str, deadline: float) -> Link:
        try:
            host, _, port = self.store.get(f"{self.name}/{giver}").decode().rpartition(":")
            link = Link(socket.create_connection((host, int(port)), timeout=deadline - time.monotonic()), giver)
        except (OSError, RuntimeError, ValueError) as error:
            raise SyncError(f"{self.me} found no {giver} within {STALL_S:.0f} s: {error}") from error
        link.send(session=self.name, taker=self.me)
        return link

    def _accept(self, connected: socket.socket, deadline: float) -> Link | None:
        """A taker's link; None for a stranger."""
        link = Link(connected, "a stranger")
        hello = link.receive() if wait([link], deadline - time.monotonic()) else {}  # type: ignore[list-item]
        if not hmac.compare_digest(str(hello.get("session")), self.name):
            link.close()
            return None
        link.peer = hello["taker"]
        return link

    def ready(self) -> list[Link]:
        """Links with news. Raises: SyncError when nothing comes for STALL_S."""
        links = [*self.givers.values(), *self.takers.values()]
        found = wait(links, STALL_S)  # type: ignore[arg-type]
        if not found:
            raise SyncError(f"{self.me} heard nothing for {STALL_S:.0f} s from {_names(link.peer for link in links)}.")
        return found  # type: ignore[return-value]

    def fail(self, reason: str) -> None:
        """Tell every peer why this process gives up, and close."""
        for link in (*self.givers.values(), *self.takers.values()):
            with contextlib.suppress(SyncError):  # it may be the one that failed
                link.send(failed=reason)
        self.close()

    def close(self) -> None:
        """Close every link."""
        for link in (*self.givers.values(), *self.takers.values()):
            link.close()
        self.givers, self.takers = {}, {}


def _names(peers: Iterable[str]) -> str:
    return ", ".join(sorted(peers))


def _own_address(towards: str) -> str:
    """Of this machine, as `towards` sees it. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((towards, 1))
        return str(s.getsockname()[0])
