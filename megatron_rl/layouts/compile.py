"""From a table and a topology to the tensors of one rank."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from megatron_rl.errors import LayoutError
from megatron_rl.layouts import fp8
from megatron_rl.layouts.boxes import Box, TensorLayout
from megatron_rl.layouts.megatron_topology import MegatronTopology
from megatron_rl.layouts.pipeline import Chunk
from megatron_rl.layouts.sglang_topology import SglangTopology
from megatron_rl.layouts.table import Block, Table
from megatron_rl.layouts.terms import Expert, Local, Place, Term, axes_of, local, share, tensors_of

Made = dict[tuple[str, str, tuple[int, ...]], tuple[TensorLayout, ...]]
"""What a term became: by the tensor's name, its block's HF prefix, and the rank along the axes that cut it."""


def megatron_layouts(
    table: Table, topology: MegatronTopology, rank: int, *, dtype: str, made: Made | None = None
) -> tuple[TensorLayout, ...]:
    """Every parameter, and the router's correction bias, of Megatron rank `rank`.

    Names follow the Transformer Engine spec, with the chunk in front: "1:decoder.layers.0.mlp.linear_fc1.weight" is in
    layer 0 of the rank's second virtual pipeline chunk; without virtual stages the chunk is 0. `made`: from other ranks
    of the topology, whose equal tensors are taken as they are; grows.
    Raises: LayoutError when the topology cannot hold the model.
    """
    depths = (topology.num_layers, topology.mtp_layers), (table.num_layers, table.mtp_layers)
    if depths[0] != depths[1]:
        raise LayoutError(
            "The topology places {} layers and {} multi-token prediction layers, ".format(*depths[0])
            + "the model has {} and {}: some would be on no rank or on a missing one. ".format(*depths[1])
            + "Give the topology the model's numbers."
        )
    _check_used(
        topology.asked(), (term for block in table.blocks for row in block.rows for term in row.megatron.values())
    )
    place = Place(topology.axes(rank), lambda vocab, _: topology.padded_vocab(vocab))
    made = {} if made is None else made
    layouts: list[TensorLayout] = []
    for number, chunk in enumerate(topology.chunks(rank)):
        for block in table.blocks:
            if not _holds(chunk, block):
                continue
            layer = block.place - chunk.layers.start if isinstance(block.place, int) else None
            prefix = f"{number}:{block.megatron.format(layer=layer)}"
            for row in block.rows:
                for name, term in row.megatron.items():
                    layouts += _compile(prefix + name, term, place, block.hf, dtype, made)
        if table.tied and chunk.has_head and not chunk.has_embedding:
            (first,) = (block for block in table.blocks if block.place == "first")
            (embedding,) = (term for row in first.rows for term in row.megatron.values())
            layouts += _compile(f"{number}:output_layer.weight", embedding, place, first.hf, dtype, made)
    return tuple(layouts)


def sglang_layouts(
    table: Table,
    topology: SglangTopology,
    rank: int,
    *,
    dtype: str,
    quantized: bool = False,
    made: Made | None = None,
) -> tuple[TensorLayout, ...]:
    """Every parameter of rank `rank` of an SGLang engine, named as in its named_parameters().

    quantized: linears are in FP8; of their scales, which follow, `fp8.with_scales` makes layouts. `made`: from other
    ranks of the topology, whose equal tensors are taken as they are; grows.

    Raises: LayoutError when the topology cannot hold the model, or would cut blocks that share a scale.
    """
    _check_used(
        topology.asked(), (term for block in table.blocks for row in block.rows for term in row.sglang.values())
    )
    if table.tied and topology.pp > 1:
        raise LayoutError(
            f"rollout.pp={topology.pp} with an output layer that is the embedding: not every class of SGLang's has a "
            "copy of it on the last stage. Set it to 1."
        )
    place = Place(topology.axes(rank), topology.padded_vocab)
    made = {} if made is None else made
    chunk = topology.chunk(rank, table.num_layers)
    return tuple(
        layout
        for block in table.blocks
        if block.on_every_stage or _holds(chunk, block)
        for row in block.rows
        for name, term in row.sglang.items()
        for layout in _compile(block.sglang + name, term, place, block.hf, dtype, made, quantized=quantized)
    )


def megatron_ranks(table: Table, topology: MegatronTopology, *, dtype: str) -> dict[int, tuple[TensorLayout, ...]]:
    """The layouts of every rank; replicas have the same objects, by which the planner knows them."""
    made: Made = {}
    return {r: megatron_layouts(table, topology, r, dtype=dtype, made=made) for r in range(topology.world_size)}


def sglang_ranks(
    table: Table, topology: SglangTopology, *, dtype: str, quantized: bool = False
) -> dict[int, tuple[TensorLayout, ...]]:
    """The layouts of every rank of an engine; replicas have the same objects."""
    made: Made = {}
    of_rank = partial(sglang_layouts, table, topology, dtype=dtype, quantized=quantized, made=made)
    return {r: of_rank(r) for r in range(topology.world_size)}


def hf_layouts(
    table: Table, *, dtype: str, aliases: Collection[str] = (), mtp: bool = True, quantized: bool = False
) -> tuple[TensorLayout, ...]:
    """Every tensor of the HF checkpoint, as one box each; then those of the table's aliases that are asked for.

    mtp: with those of multi-token prediction layers, which engines do not load. quantized: as in `sglang_layouts`.
    """
    layouts = []
    for block in table.blocks:
        if block.place == "mtp" and not mtp:
            continue
        for row in block.rows:
            for t, experts in row.tensors():
                zero = (0,) * len(t.shape)
                for name in [t.name] if experts is None else [t.name.format(expert=e) for e in range(experts)]:
                    box = Box(block.hf + name, zero, zero, t.shape)
                    kept = fp8.DTYPE if quantized and fp8.is_quantized(box.hf, t.shape) else t.dtype or dtype
                    layouts.append(TensorLayout(box.hf, t.shape, kept, (box,)))
    named = {layout.name: layout for layout in layouts}
    return (*layouts, *(replace(named[table.aliases[name]], name=name) for name in aliases))


def check_megatron(table: Table, topology: MegatronTopology) -> None:
    """Refuse, with a LayoutError, a topology that cannot hold the model; looks at one rank of each pipeline stage."""
    for rank in range(0, topology.world_size, topology.world_size // topology.pp):
        megatron_layouts(table, topology, rank, dtype="float32")


def check_sglang(table: Table, topology: SglangTopology, *, quantized: bool = False) -> None:
    """Refuse, with a LayoutError, an engine topology that cannot hold the model; looks at one rank of each stage."""
    for rank in range(0, topology.world_size, topology.tp):
        sglang_layouts(table, topology, rank, dtype="float32", quantized=quantized)


def _check_used(asked: Mapping[str, str], terms: Iterable[Term]) -> None:
    """Refuse an axis that was asked for and cuts no term."""
    unused = dict(asked)
    for term in terms:
        if not unused:
            return
        for axis in axes_of(term):
            unused.pop(axis, None)
    for message in unused.values():
        raise LayoutError(message)


def _holds(chunk: Chunk, block: Block) -> bool:
    held = {"first": chunk.has_embedding, "norm": chunk.has_norm, "mtp": chunk.has_mtp, "last": chunk.has_head}
    return block.place in chunk.layers if isinstance(block.place, int) else held[block.place]


def _compile(
    name: str, term: Term, place: Place, hf: str, dtype: str, made: Made, *, quantized: bool = False
) -> tuple[TensorLayout, ...]:
    key = name, hf, tuple([place.axes[axis].rank for axis in axes_of(term)])
    if key not in made:
        made[key] = tuple(_compile_anew(name, term, place, hf, dtype, quantized=quantized))
    return made[key]


def _compile_anew(
    name: str, term: Term, place: Place, hf: str, dtype: str, *, quantized: bool
) -> Iterator[TensorLayout]:
    piece = local(term.inner if isinstance(term, Expert) else term, place)
    (dtype,) = {t.dtype or dtype for t in tensors_of(term)}
    (in_fp8,) = {quantized and fp8.is_quantized(hf + t.name, t.shape) for t in tensors_of(term)}
    if in_fp8:
        dtype = fp8.DTYPE
        axes = [place.axes[axis] for axis in axes_of(term)]
        fp8.check_blocks(piece, name, [axis.key for axis in axes if axis.size > 1])
    if not isinstance(term, Expert):
        yield TensorLayout(name, piece.shape, dtype, tuple(_boxes(piece, hf, (), None)))
        return
    first, end = share(term.experts, place.axes[term.axis], "the experts")
    if "{slot}" in name:
        for expert in range(first, end):
            boxes = tuple(_boxes(piece, hf, (), expert))
            yield TensorLayout(name.format(slot=expert - first), piece.shape, dtype, boxes)
        return
    boxes = tuple(box for e in range(first, end) for box in _boxes(piece, hf, (e - first,), e))
    yield TensorLayout(name, (end - first, *piece.shape), dtype, boxes)


def _boxes(piece: Local, hf: str, slot: tuple[int, ...], expert: int | None) -> Iterator[Box]:
    row = 0
    for r in piece.rectangles:
        name = r.tensor.name if expert is None else r.tensor.name.format(expert=expert)
        yield Box(hf + name, r.offset, (*slot, row, *(0 for _ in r.shape[1:])), r.shape)
        row += r.shape[0]
