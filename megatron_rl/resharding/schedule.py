"""The messages of a weight sync. Each rank works out its own from the spec alone, and both sides agree on each."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.layouts.boxes import TensorLayout
from megatron_rl.layouts.compile import hf_layouts, megatron_ranks, sglang_ranks
from megatron_rl.layouts.fp8 import DTYPE
from megatron_rl.models import load_table
from megatron_rl.resharding.lanes import Lane
from megatron_rl.resharding.messages import ALIGN_BYTES, Message, Piece, scales_of
from megatron_rl.resharding.plan import Flows, cut, make_flows
from megatron_rl.resharding.quantized import cut_within_blocks, in_full
from megatron_rl.resharding.spec import SyncSpec
from megatron_rl.resharding.tables import Joined, Layouts, Side, join, shift


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """All lanes and the fragments they carry. A rank that has its messages can drop it: 100 MB at 1,024 ranks."""

    spec: SyncSpec
    flows: Flows
    reader_sets: dict[tuple[int, ...], int]
    """Number of each set of readers."""
    window: np.ndarray
    """[F] of each fragment; no message reaches from one into the next, and those of one come before those of the next.
    The first is what readers can write as it comes; of the others they hold tensors until they are whole."""
    most_messages: tuple[int, int]
    """That one sender has for one set of readers in the first window, and in each of the others."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """A message before its pieces are spelled out: what the same three parties share, up to the size of a message."""

    number: int
    src: int
    readers: tuple[int, ...]
    kind: str
    fetcher: int
    nbytes: int
    payload_bytes: int
    fragments: np.ndarray
    """[n], in order."""


def streamed_layouts(spec: SyncSpec) -> tuple[TensorLayout, ...]:
    """What each engine rank gets, in that order, when SGLang's own loader takes the weights: the HF checkpoint.

    Engines load no multi-token prediction layers.
    """
    return hf_layouts(load_table(spec.hf_config), dtype=spec.engine_dtype, mtp=False, quantized=spec.fp8)


def make_schedule(spec: SyncSpec) -> Schedule:
    """Every rank that makes one from the same spec gets the same.

    Raises: LayoutError when a topology cannot hold the model, or an element has no source or two.
    """
    table, placed = load_table(spec.hf_config), spec.placed()
    sources: Layouts = megatron_ranks(table, spec.trainer, dtype=spec.trainer_dtype)
    if spec.direct:
        targets: Layouts = sglang_ranks(table, spec.engine, dtype=spec.engine_dtype, quantized=spec.fp8)
    else:
        targets = dict.fromkeys(range(spec.engine.world_size), streamed_layouts(spec))
    whole: set[str] = set()  # HF tensors that are put together before they are of use
    if spec.fp8:
        targets, whole = in_full(targets, cut_within_blocks(sources), spec.trainer_dtype)
    joined = cut(join(sources, targets), _aligned_down(spec.bucket_bytes))
    trainers, engines = dict(enumerate(placed.trainers)), dict(enumerate(placed.engines))
    flows = make_flows(joined, trainers, engines, replicas=spec.engines)
    sets = dict.fromkeys(lane.readers for lane in flows.lanes.lanes)
    return Schedule(
        spec, flows, {who: i for i, who in enumerate(sets)}, *_windows(joined, _units(spec, joined, whole), spec)
    )


def _units(spec: SyncSpec, joined: Joined, whole: set[str]) -> np.ndarray:
    """[F] number, in order, of the tensor whose rest a fragment waits for; -1 where it waits for nothing."""
    wanted = joined.target.areas
    waits = np.array([joined.target.boxes[box].hf in whole for box in wanted.box], bool)
    unit = np.where(waits, wanted.hf, -1) if spec.direct else joined.target.tensor[wanted.box]
    return np.asarray(unit[joined.want])


def _windows(joined: Joined, unit: np.ndarray, spec: SyncSpec) -> tuple[np.ndarray, tuple[int, int]]:
    """Of each fragment, and the most messages of the first window and of the others.

    The first has what waits for nothing, the others the units in their order, as many as a message could hold, or one
    that is larger. A reader that takes messages in order then holds unfinished tensors of one window only.
    """
    nbytes = np.bincount(unit + 1, _aligned(joined.nbytes)).astype(np.int64)
    window, used, largest = [0], 0, 0
    for size in nbytes[1:].tolist():
        is_new = used + size > spec.bucket_bytes or len(window) == 1
        window.append(window[-1] + is_new)
        used = size if is_new else used + size
        largest = max(largest, used)
    # Two messages in a row hold more than one full one, else they would be one.
    first, others = (2 * -(-int(n) // spec.bucket_bytes) + 1 for n in (nbytes[0], largest))
    return np.array(window)[unit + 1], (first, others)


def sends(schedule: Schedule, rank: int) -> tuple[Message, ...]:
    """What trainer rank `rank` packs, in ascending order; the pieces lie in its own tensors."""
    source = schedule.flows.joined.source
    boxes = source.boxes_of(rank)
    area = schedule.flows.joined.piece
    lanes = [lane for lane in schedule.flows.lanes.lanes if rank in lane.pool]
    return _messages(schedule, bundles(schedule, lanes, src=rank), source, lambda f: boxes[int(area[f])][:1])


def receives(schedule: Schedule, reader: int) -> tuple[Message, ...]:
    """What engine rank `reader` (engine * its world size + rank) unpacks, in ascending order, into its own tensors."""
    target = schedule.flows.joined.target
    boxes = target.boxes_of(reader % schedule.spec.engine.world_size)
    area = schedule.flows.joined.want
    lanes = [lane for lane in schedule.flows.lanes.lanes if reader in lane.readers]
    return _messages(schedule, bundles(schedule, lanes), target, lambda f: boxes[int(area[f])])


def needed_bytes(schedule: Schedule, reader: int) -> int:
    """Of the parameters of engine rank `reader`, padding left out, that no trainer rank on its own device holds."""
    placed = schedule.spec.placed()
    near = [rank for rank, place in enumerate(placed.trainers) if place == placed.engines[reader]]
    return lacking_bytes(schedule, [reader], near)


def lacking_bytes(schedule: Schedule, readers: Iterable[int], trainers: Iterable[int]) -> int:
    """What any of `readers` wants, each byte once, and none of `trainers` holds. Of layouts alone, not of messages."""
    joined = schedule.flows.joined
    held, wanted = joined.source.areas, joined.target.areas
    who, near = {r % schedule.spec.engine.world_size for r in readers}, set(trainers)
    is_near = np.array([not near.isdisjoint(ranks) for ranks in held.sets], bool)
    is_wanted = np.array([not who.isdisjoint(ranks) for ranks in wanted.sets], bool)
    counted = is_wanted[wanted.ranks[joined.want]] & ~is_near[held.ranks[joined.piece]]
    return int(joined.nbytes[counted].sum())


def bundles(schedule: Schedule, lanes: Iterable[Lane], *, src: int | None = None) -> Iterator[Bundle]:
    """All messages of some lanes, or those that `src` sends.

    `lanes` must be in the schedule's order and, for every sender and set of readers that is asked about, all of theirs:
    then each party packs alike.
    """
    flows = schedule.flows
    runs: dict[tuple[int, tuple[int, ...], str, int], list[np.ndarray]] = {}
    for lane in lanes:
        fragments = flows.fragments(lane.flows)
        for sender, fetcher, run in flows.lanes.deal(lane, flows.joined.nbytes[fragments]):
            if src in (None, sender):
                runs.setdefault((sender, lane.readers, lane.kind, fetcher), []).append(fragments[run])
    for (sender, readers, kind, fetcher), parts in runs.items():
        for window, fragments in _by_window(schedule, np.concatenate(parts)):
            packed = _packed(flows.joined.nbytes[fragments], schedule.spec.bucket_bytes)
            for k, (part, nbytes, payload) in enumerate(packed, start=_messages_before(schedule, window)):
                number = _number(schedule, k, sender, readers, fetcher)
                yield Bundle(number, sender, readers, kind, fetcher, nbytes, payload, fragments[part])


def unordered(schedule: Schedule, messages: Sequence[Message]) -> int:
    """How many of them, the first, a reader may take as they come; the others it takes one after the other."""
    parties = schedule.spec.readers * schedule.spec.trainer.world_size * len(schedule.reader_sets)
    return sum(m.number < schedule.most_messages[0] * parties for m in messages)


def _messages_before(schedule: Schedule, window: int) -> int:
    first, others = schedule.most_messages
    return first + (window - 1) * others if window else 0


def _by_window(schedule: Schedule, fragments: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Each window's, in order."""
    fragments = fragments[np.argsort(schedule.window[fragments], kind="stable")]
    for part in np.split(fragments, np.flatnonzero(np.diff(schedule.window[fragments])) + 1):
        yield int(schedule.window[part[0]]), part


def _number(schedule: Schedule, k: int, src: int, readers: tuple[int, ...], fetcher: int) -> int:
    """Where the k-th message between these parties stands in the one order of all messages.

    One order for all cannot deadlock: of the messages that are not done, the lowest has only parties that are done with
    everything before it, so nobody whom it needs waits for another one. And links work side by side: a sender writes
    one message to each of its readers before it writes a second to any, and in round n of each such turn the senders,
    spread out over the readers, each address the reader n places on: no reader is addressed by two, unless there are
    more senders than readers.
    """
    senders, targets = schedule.spec.trainer.world_size, schedule.spec.readers
    turn = (fetcher - src * targets // senders) % targets
    number = ((k * targets + turn) * senders + src) * len(schedule.reader_sets) + schedule.reader_sets[readers]
    assert number < 2**63, (k, src, readers, fetcher)
    return number


def _packed(nbytes: np.ndarray, bucket_bytes: int) -> Iterator[tuple[slice, int, int]]:
    """As many fragments to a message as fit, in order: (which, bytes with alignment, and without)."""
    ends = np.cumsum(_aligned(nbytes))
    first, used = 0, 0
    while first < len(nbytes):
        end = int(ends.searchsorted(used + bucket_bytes, "right"))
        assert end > first, (nbytes[first], bucket_bytes)
        yield slice(first, end), int(ends[end - 1]) - used, int(nbytes[first:end].sum())
        first, used = end, int(ends[end - 1])


def _messages(
    schedule: Schedule, found: Iterable[Bundle], side: Side, boxes_of: Callable[[int], list[int]]
) -> tuple[Message, ...]:
    """Spell out bundles; `boxes_of`: a fragment -> the boxes of `side` it lies in on the rank that asks."""
    joined = schedule.flows.joined
    target, wanted = joined.target, joined.target.areas
    messages = []
    for bundle in sorted(found, key=lambda bundle: bundle.number):
        at, pieces = 0, []
        digest = hashlib.blake2b(digest_size=16)
        starts, shapes = joined.start[bundle.fragments].tolist(), joined.size[bundle.fragments].tolist()
        parties = bundle.src, bundle.readers, bundle.kind, bundle.fetcher
        digest.update(repr((bundle.number, *parties)).encode())
        for f, start, size in zip(bundle.fragments.tolist(), starts, shapes, strict=True):
            any_box = int(wanted.box[joined.want[f]])
            hf, dtype = target.boxes[any_box].hf, target.tensors[target.tensor[any_box]].dtype
            shape = tuple(size[: len(target.boxes[any_box].shape)])
            digest.update(repr((hf, start, size, dtype, at)).encode())
            for box in boxes_of(f):
                name = side.tensors[side.tensor[box]].name
                pieces.append(Piece(name, shift(side.boxes[box], start), shape, dtype, at))
                if side is target and dtype == DTYPE:
                    pieces.append(scales_of(pieces[-1]))
            at += _aligned(int(joined.nbytes[f]))
        assert at == bundle.nbytes, (at, bundle)
        sizes = bundle.nbytes, bundle.payload_bytes
        messages.append(Message(bundle.number, *parties, *sizes, digest.hexdigest(), tuple(pieces)))
    return tuple(messages)


def _aligned[N: (int, np.ndarray)](nbytes: N) -> N:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _aligned_down(nbytes: int) -> int:
    return nbytes // ALIGN_BYTES * ALIGN_BYTES
