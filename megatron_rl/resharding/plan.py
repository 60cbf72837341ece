"""The plan: which rank copies which rectangle where, so that every wanted element has exactly one source.

Pure integers: the same plan runs over shared memory, CUDA IPC or a network, and any rank can make it again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_rl.layouts import fp8
from megatron_rl.resharding.lanes import Lanes, Place, make_lanes
from megatron_rl.resharding.tables import Joined, Layouts, join, nbytes_of, shift


@dataclass(frozen=True, slots=True)
class Copy:
    """One rectangle. An offset with one more number than `shape` begins with the index of an expert's slot."""

    src_rank: int
    dst_rank: int
    src: str
    src_offset: tuple[int, ...]
    dst: str
    dst_offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Flows:
    """The fragments of two sides, flow by flow, and the lanes that carry them."""

    joined: Joined
    order: np.ndarray
    """[F] fragments, those of a flow together."""
    ends: np.ndarray
    """[flows + 1] where each flow begins in `order`."""
    lanes: Lanes

    def fragments(self, flows: Sequence[int]) -> np.ndarray:
        """[n] fragments of a lane's flows."""
        return np.concatenate([self.order[self.ends[f] : self.ends[f + 1]] for f in flows])


def cut(joined: Joined, most_bytes: int) -> Joined:
    """The same with every fragment of at most `most_bytes`: larger ones are cut along the first dim, then the next.

    Between blocks that share a scale, where there are any; a whole one must fit.
    """
    wanted = joined.target.areas
    for dim in range(joined.size.shape[1]):
        block, itemsize = wanted.block[joined.want], wanted.itemsize[joined.want]
        size = -(-joined.size // block[:, None])  # in blocks
        each_bytes = block**2 * itemsize + np.where(block > 1, fp8.SCALE_BYTES, 0)
        most = np.maximum(most_bytes // (size[:, dim + 1 :].prod(1) * each_bytes), 1)
        parts = -(-size[:, dim] // most)
        if (parts == 1).all():
            continue
        of = np.repeat(np.arange(len(parts)), parts)
        part = np.arange(len(of)) - np.repeat(np.cumsum(parts) - parts, parts)
        each = (-(-size[:, dim] // parts) * block)[of]
        start, size = joined.start[of], joined.size[of]
        start[:, dim] += part * each
        size[:, dim] = np.minimum(each, size[:, dim] - part * each)
        kept = size[:, dim] > 0  # shares are rounded up
        of, start, size = of[kept], start[kept], size[kept]
        want = joined.want[of]
        nbytes = nbytes_of(wanted, want, size)
        joined = replace(joined, piece=joined.piece[of], want=want, start=start, size=size, nbytes=nbytes)
    return joined


def make_flows(joined: Joined, trainers: dict[int, Place], engines: dict[int, Place], *, replicas: int = 1) -> Flows:
    """`engines`: places of the target's ranks, of each of its `replicas` one after the other."""
    key = joined.key()
    keys, flow, counts = np.unique(key, return_inverse=True, return_counts=True)
    holders, readers = joined.source.areas.sets, joined.target.areas.sets
    world = len(engines) // replicas
    of_all = [tuple(e * world + r for e in range(replicas) for r in ranks) for ranks in readers]
    pairs = [(holders[k // len(readers)], of_all[k % len(readers)]) for k in keys.tolist()]
    nbytes = np.bincount(flow, joined.nbytes, len(keys)).astype(np.int64).tolist()
    lanes = make_lanes(pairs, nbytes, trainers, engines)
    return Flows(joined, np.argsort(flow, kind="stable"), np.cumsum([0, *counts]), lanes)


def make_plan(sources: Layouts, destinations: Layouts) -> tuple[Copy, ...]:
    """Copies that fill every box of every destination rank, rank after rank.

    Ranks that hold the same rectangle share the sending by bytes: the same arguments give the same plan everywhere.
    Raises: LayoutError when an element has no source, two unlike sources, or two boxes of one destination tensor.
    """
    joined = join(sources, destinations)
    # Every rank on a node of its own: nothing is near, and no two destinations share what they get.
    flows = make_flows(joined, {r: (r, 0) for r in sources}, {r: (-1 - r, 0) for r in destinations})
    held = {rank: joined.source.boxes_of(rank) for rank in sources}
    wanted = {rank: joined.target.boxes_of(rank) for rank in destinations}
    copies: list[tuple[int, int, int, Copy]] = []
    for lane in flows.lanes.lanes:
        fragments = flows.fragments(lane.flows)
        for src, dst, run in flows.lanes.deal(lane, joined.nbytes[fragments]):
            for f in fragments[run].tolist():
                for box in wanted[dst][int(joined.want[f])]:
                    copies.append((dst, box, f, _copy(joined, f, src, held[src][int(joined.piece[f])][0], dst, box)))
    return tuple(copy for *_, copy in sorted(copies, key=lambda c: c[:3]))


def _copy(joined: Joined, fragment: int, src: int, src_box: int, dst: int, dst_box: int) -> Copy:
    source, target, start = joined.source, joined.target, joined.start[fragment].tolist()
    ours, theirs = source.boxes[src_box], target.boxes[dst_box]
    return Copy(
        *(src, dst, source.tensors[source.tensor[src_box]].name, shift(ours, start)),
        *(target.tensors[target.tensor[dst_box]].name, shift(theirs, start)),
        tuple(joined.size[fragment].tolist()[: len(theirs.shape)]),
    )
