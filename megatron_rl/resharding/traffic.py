"""What a sync moves, added up over every message of every rank; for people and tests, not needed to sync."""

from dataclasses import dataclass

import numpy as np

from megatron_rl.resharding.lanes import Place
from megatron_rl.resharding.schedule import Schedule, bundles, lacking_bytes, needed_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """Bytes without alignment. R trainer ranks, G engine ranks, M and N nodes of theirs in ascending order."""

    sent: np.ndarray
    """[R] bytes over the network."""
    fetched: np.ndarray
    """[G] bytes over the network."""
    in_node: np.ndarray
    """[G] bytes from another device of the node: a trainer rank's, or that of the reader that fetched them."""
    messages_sent: np.ndarray
    """[R]."""
    messages_read: np.ndarray
    """[G]."""
    links: np.ndarray
    """[M, N] bytes over the network between nodes."""
    largest: int
    """Bytes of the largest message, with alignment."""
    least_network: int
    """What the nodes of the engines' ranks lack, each byte once for each node: no plan moves less between nodes."""
    least_received: int
    """What the engines' ranks lack on their own devices."""


def measure(schedule: Schedule) -> Traffic:
    """Add up all messages."""
    placed = schedule.spec.placed()
    senders, readers = (_nodes(places) for places in (placed.trainers, placed.engines))
    sent, sending = [0] * len(placed.trainers), [0] * len(placed.trainers)
    fetched, in_node, reading = ([0] * len(placed.engines) for _ in range(3))
    links, largest = np.zeros((max(senders) + 1, max(readers) + 1), np.int64), 0
    for bundle in bundles(schedule, schedule.flows.lanes.lanes):
        nbytes, src, fetcher = bundle.payload_bytes, bundle.src, bundle.fetcher
        largest = max(largest, bundle.nbytes)
        sending[src] += 1
        for reader in bundle.readers:
            reading[reader] += 1
            in_node[reader] += nbytes * (bundle.kind != "local")
        if bundle.kind == "network":
            sent[src] += nbytes
            fetched[fetcher] += nbytes
            in_node[fetcher] -= nbytes
            links[senders[src], readers[fetcher]] += nbytes
    return Traffic(
        sent=np.array(sent),
        fetched=np.array(fetched),
        in_node=np.array(in_node),
        messages_sent=np.array(sending),
        messages_read=np.array(reading),
        links=links,
        largest=largest,
        least_network=sum(_lacking(schedule, node) for node in {node for node, _ in placed.engines}),
        least_received=sum(needed_bytes(schedule, reader) for reader in range(len(placed.engines))),
    )


def _nodes(places: tuple[Place, ...]) -> list[int]:
    """Of each rank, the number of its node among those of its side."""
    known = {node: i for i, node in enumerate(sorted({node for node, _ in places}))}
    return [known[node] for node, _ in places]


def _lacking(schedule: Schedule, node: int) -> int:
    placed = schedule.spec.placed()
    ours, theirs = ([r for r, at in enumerate(places) if at[0] == node] for places in (placed.trainers, placed.engines))
    return lacking_bytes(schedule, theirs, ours)
