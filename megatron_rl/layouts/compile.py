"""From a table and a topology to the tensors of one rank."""

from collections.abc import Iterator

from megatron_rl.errors import LayoutError
from megatron_rl.layouts.boxes import Box, TensorLayout
from megatron_rl.layouts.megatron_topology import MegatronTopology
from megatron_rl.layouts.pipeline import Chunk
from megatron_rl.layouts.sglang_topology import SglangTopology
from megatron_rl.layouts.table import Block, Table
from megatron_rl.layouts.terms import Expert, Local, Place, Term, local, share, tensors_of


def megatron_layouts(table: Table, topology: MegatronTopology, rank: int, *, dtype: str) -> tuple[TensorLayout, ...]:
    """Every parameter, and the router's correction bias, of Megatron rank `rank`.

    Names follow the Transformer Engine spec, with the chunk in front: "1:decoder.layers.0.mlp.linear_fc1.weight" is in
    layer 0 of the rank's second virtual pipeline chunk; without virtual stages the chunk is 0.
    Raises: LayoutError when the topology cannot hold the model.
    """
    depths = (topology.num_layers, topology.mtp_layers), (table.num_layers, table.mtp_layers)
    if depths[0] != depths[1]:
        raise LayoutError(
            "The topology places {} layers and {} multi-token prediction layers, ".format(*depths[0])
            + "the model has {} and {}: some would be on no rank or on a missing one. ".format(*depths[1])
            + "Give the topology the model's numbers."
        )
    place = Place(topology.axes(rank), topology.padded_vocab(table.vocab_size))
    layouts: list[TensorLayout] = []
    for number, chunk in enumerate(topology.chunks(rank)):
        for layer, block in _held(chunk, table):
            prefix = f"{number}:{block.megatron.format(layer=layer)}"
            for row in block.rows:
                for name, term in row.megatron.items():
                    layouts += _compile(prefix + name, term, place, block.hf, dtype)
    return tuple(layouts)


def sglang_layouts(table: Table, topology: SglangTopology, rank: int, *, dtype: str) -> tuple[TensorLayout, ...]:
    """Every parameter of rank `rank` of an SGLang engine, named as in its named_parameters()."""
    place = Place(topology.axes(rank), topology.padded_vocab(table.vocab_size))
    return tuple(
        layout
        for block in table.blocks
        for row in block.rows
        for name, term in row.sglang.items()
        for layout in _compile(block.sglang + name, term, place, block.hf, dtype)
    )


def hf_layouts(table: Table, *, dtype: str) -> tuple[TensorLayout, ...]:
    """Every tensor of the HF checkpoint, as one box each."""
    layouts = []
    for block in table.blocks:
        for row in block.rows:
            for t, experts in row.tensors():
                zero = (0,) * len(t.shape)
                for name in [t.name] if experts is None else [t.name.format(expert=e) for e in range(experts)]:
                    box = Box(block.hf + name, zero, zero, t.shape)
                    layouts.append(TensorLayout(box.hf, t.shape, t.dtype or dtype, (box,)))
    return tuple(layouts)


def check_megatron(table: Table, topology: MegatronTopology) -> None:
    """Refuse, with a LayoutError, a topology that cannot hold the model; looks at one rank of each pipeline stage."""
    for rank in range(0, topology.world_size, topology.world_size // topology.pp):
        megatron_layouts(table, topology, rank, dtype="float32")


def check_sglang(table: Table, topology: SglangTopology) -> None:
    """Refuse, with a LayoutError, an engine topology that cannot hold the model."""
    sglang_layouts(table, topology, 0, dtype="float32")


def _held(chunk: Chunk, table: Table) -> Iterator[tuple[int | None, Block]]:
    """The blocks of a chunk, a layer with its index within the chunk."""
    held = {
        "first": chunk.has_embedding,
        "norm": chunk.has_norm,
        "mtp": chunk.has_mtp,
        "last": chunk.has_head,
    }
    for block in table.blocks:
        if isinstance(block.place, int):
            if block.place in chunk.layers:
                yield block.place - chunk.layers.start, block
        elif held[block.place]:
            yield None, block


def _compile(name: str, term: Term, place: Place, hf: str, dtype: str) -> Iterator[TensorLayout]:
    (dtype,) = {t.dtype or dtype for t in tensors_of(term)}
    if not isinstance(term, Expert):
        piece = local(term, place)
        yield TensorLayout(name, piece.shape, dtype, tuple(_boxes(piece, hf, (), None)))
        return
    piece = local(term.inner, place)
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
