"""Who sends to whom: lanes between pools of equal senders and sets of readers, and the dealing of their bytes.

Fragments that the same ranks hold and the same ranks want are one flow. There are few flows (thousands for DeepSeek-V3
on 1,024 GPUs) where there are hundreds of thousands of fragments, so all ranks work out all lanes, without asking one
another, and expand into fragments only those that concern them.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

Place = tuple[int, int]
"""(node, device of the node)."""
type Groups[K] = dict[K, tuple[int, ...]]
"""Ranks by where they stand."""
KINDS = ("local", "node", "network")
"""What sender and readers share: a device, a node, or neither. Nearer holders are preferred."""


@dataclass(frozen=True, slots=True)
class Lane:
    """What one set of readers, all on one node, gets from one pool of senders that hold the same bytes."""

    kind: str
    pool: tuple[int, ...]
    """Senders, each of which could send all of it."""
    readers: tuple[int, ...]
    flows: tuple[int, ...]
    nbytes: int
    pool_start: int
    """Where its bytes begin among those of all lanes of its pool."""
    fetch_start: int
    """Where they begin among those of all network lanes of its readers."""


@dataclass(frozen=True, slots=True, eq=False)
class Lanes:
    """All lanes in one order, and how the bytes of each pool and of each set of readers are dealt out."""

    lanes: list[Lane]
    senders: dict[tuple[str, tuple[int, ...]], np.ndarray]
    """(kind, pool) -> [pool] where the share of each member ends."""
    fetchers: dict[tuple[int, ...], np.ndarray]
    """Readers -> [readers] where the share of each ends."""

    def deal(self, lane: Lane, nbytes: np.ndarray) -> Iterator[tuple[int, int, slice]]:
        """(sender, fetcher, run of fragments), in order; `nbytes`: [n] of the lane's fragments in order."""
        middle = np.cumsum(nbytes) * 2 - nbytes  # doubled, to stay whole
        src = np.searchsorted(self.senders[lane.kind, lane.pool] * 2, middle + lane.pool_start * 2, "right")
        fetch = np.zeros_like(src)
        if lane.kind == "network":
            fetch = np.searchsorted(self.fetchers[lane.readers] * 2, middle + lane.fetch_start * 2, "right")
        turns = np.flatnonzero(np.diff(src) | np.diff(fetch)) + 1
        for a, b in zip([0, *turns.tolist()], [*turns.tolist(), len(nbytes)], strict=True):
            yield lane.pool[src[a]], lane.readers[fetch[a]], slice(a, b)


def make_lanes(
    flows: Iterable[tuple[tuple[int, ...], tuple[int, ...]]],
    nbytes: Sequence[int],
    trainers: Mapping[int, Place],
    engines: Mapping[int, Place],
) -> Lanes:
    """`flows`: (ranks that hold it, ranks that want it), with the `nbytes` that each of the latter gets."""
    carried: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[int]] = {}
    near: dict[tuple[int, ...], tuple[Groups[Place], Groups[int]]] = {}
    split: dict[tuple[int, ...], Groups[int]] = {}
    for flow, (holders, readers) in enumerate(flows):
        if holders not in near:
            near[holders] = _grouped(holders, trainers.__getitem__), _grouped(holders, lambda r: trainers[r][0])
        if readers not in split:
            split[readers] = _grouped(readers, lambda r: engines[r][0])
        for lane in _nearest(holders, near[holders], split[readers], engines):
            carried.setdefault(lane, []).append(flow)
    lanes, pools, fetches = [], Counter[tuple[str, tuple[int, ...]]](), Counter[tuple[int, ...]]()
    for (kind, pool, some), mine in carried.items():
        total = sum(nbytes[flow] for flow in mine)
        lanes.append(Lane(kind, pool, some, tuple(mine), total, pools[kind, pool], fetches[some]))
        pools[kind, pool] += total
        if kind == "network":
            fetches[some] += total
    return _dealt(lanes, pools, fetches, trainers, engines)


def _grouped[K](ranks: tuple[int, ...], key: Callable[[int], K]) -> Groups[K]:
    groups: dict[K, list[int]] = defaultdict(list)
    for rank in ranks:
        groups[key(rank)].append(rank)
    return {k: tuple(g) for k, g in groups.items()}


def _nearest(
    holders: tuple[int, ...],
    near: tuple[Groups[Place], Groups[int]],
    split: Groups[int],
    engines: Mapping[int, Place],
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """(kind, pool, readers): the holders on a reader's device, else those on its node, else all."""
    on_device, on_node = near
    for node, readers in split.items():
        if node not in on_node:
            yield "network", holders, readers
            continue
        by_device = _grouped(readers, engines.__getitem__)
        yield from (("local", on_device[device], some) for device, some in by_device.items() if device in on_device)
        rest = tuple(r for r in readers if engines[r] not in on_device)
        if rest:
            yield "node", on_node[node], rest


def _dealt(
    lanes: list[Lane],
    pools: Mapping[tuple[str, tuple[int, ...]], int],
    fetches: Mapping[tuple[int, ...], int],
    trainers: Iterable[int],
    engines: Iterable[int],
) -> Lanes:
    """Deal each pool's bytes out so that its members' loads come as near to each other as they can.

    Pools of few go first: a single holder has no choice, and the others make up for it. What crosses the network is
    levelled apart from what stays in a node. The same for the readers that fetch.
    """
    sent = {kind: dict.fromkeys(trainers, 0) for kind in KINDS}
    fetched = dict.fromkeys(engines, 0)
    by_size = sorted(pools, key=lambda key: (len(key[1]), key))
    senders = {(kind, pool): _level(pools[kind, pool], pool, sent[kind]) for kind, pool in by_size}
    readers = {who: _level(fetches[who], who, fetched) for who in sorted(fetches, key=lambda who: (len(who), who))}
    return Lanes(lanes, senders, readers)


def _level(total: int, members: tuple[int, ...], loads: dict[int, int]) -> np.ndarray:
    """[members] ends of the shares that level out `loads`, which grow by them: the lowest are filled up first."""
    rising = sorted(members, key=lambda m: (loads[m], m))
    sums = [0, *accumulate(loads[m] for m in rising)]
    count = next(n for n in range(len(rising), 0, -1) if loads[rising[n - 1]] * n - sums[n] < total or n == 1)
    level, extra = divmod(total + sums[count], count)
    shares = dict.fromkeys(members, 0)
    for i, m in enumerate(rising[:count]):
        shares[m] = level + (i < extra) - loads[m]
        loads[m] += shares[m]
    assert sum(shares.values()) == total and min(shares.values()) >= 0, (total, shares)
    return np.cumsum([shares[m] for m in members])
