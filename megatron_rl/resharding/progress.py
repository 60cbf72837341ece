"""How far one push has come, on one engine rank."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.resharding.destination import Assembly, Parameters
from megatron_rl.resharding.messages import Message
from megatron_rl.resharding.spec import LoadReport
from megatron_rl.resharding.timer import Timer
from megatron_rl.resharding.transport.links import STALL_S, Link


@dataclass(slots=True)
class Progress:
    """Of one push."""

    expected: dict[str, dict[int, Message]]
    """By giver, what it has not offered yet, by number."""
    into: Parameters | Assembly
    open: set[str] = field(default_factory=set)
    """Trainer ranks that have not said that they are done."""
    offered: dict[int, tuple[Message, Link, dict[str, Any]]] = field(default_factory=dict)
    """By number, what was not taken yet, and who offered it in which words."""
    taken: int = 0
    """Messages."""
    received_bytes: int = 0
    covered_bytes: int = 0
    reassured: float = field(default_factory=time.monotonic)
    """When the givers were last told that they have to wait."""
    timer: Timer = field(default_factory=Timer)
    begun: float = field(default_factory=time.perf_counter)

    @property
    def is_over(self) -> bool:
        """Whether everything has come and was taken."""
        return not (self.open or any(self.expected.values()) or self.offered)

    def reassure(self, givers: Iterable[Link]) -> None:
        """Those whose turn is far off would take us for stalled."""
        if time.monotonic() - self.reassured > STALL_S / 4:
            self.reassured = time.monotonic()
            for link in givers:
                link.send(waiting=True)

    def report(self, needed_bytes: int, staging_bytes: int, *, by_loader: bool) -> LoadReport:
        """Of a push that is over. What the engine's loader takes is all the time that nothing else took."""
        check_s, wait_s, unpack_s = (self.timer[stage] for stage in ("check", "wait", "unpack"))
        if by_loader:
            unpack_s = time.perf_counter() - self.begun - check_s - wait_s
        moved = self.received_bytes, self.covered_bytes, needed_bytes
        return LoadReport(*moved, unpack_s, check_s, wait_s, staging_bytes)

    def owed(self) -> list[str]:
        """Which givers have not sent what."""
        first = {giver: next(iter(left.values())).content for giver, left in self.expected.items() if left}
        return [f"{giver} has not sent {content}" for giver, content in first.items()] + [
            f"{giver} has not said that it is done" for giver in sorted(self.open - first.keys())
        ]
