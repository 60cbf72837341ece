"""A table: every tensor of a model, on both sides, once. Import, export and weight sync all read the same one."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from megatron_rl.layouts.terms import Expert, HfTensor, Term, tensors_of


@dataclass(frozen=True, slots=True)
class Row:
    """A few HF tensors that belong together, as each side keeps them. Names lack the block's prefix."""

    megatron: Mapping[str, Term]
    """Names as the Transformer Engine spec gives them."""
    sglang: Mapping[str, Term]
    """Names as in SGLang's named_parameters()."""

    def tensors(self) -> Iterator[tuple[HfTensor, int | None]]:
        """Each HF tensor of the row, with the number of experts that have one (None: not an expert's)."""
        for term in self.megatron.values():
            for tensor in tensors_of(term):
                yield tensor, term.experts if isinstance(term, Expert) else None


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that live together: a layer, or what stands before the first or after the last one."""

    place: int | str
    """The layer's global index, "first" (stages with the embedding), "norm" (stage with the final norm), "mtp" (stage
    with the multi-token prediction layers; one block each) or "last" (stage with the output layer)."""
    hf: str
    """Prefix of the HF names."""
    megatron: str
    """Prefix of the Megatron names within a chunk; "{layer}" stands for the index within the chunk."""
    sglang: str
    rows: tuple[Row, ...]
    on_every_stage: bool = False
    """SGLang's class builds it on every pipeline stage (the output layer of some)."""


@dataclass(frozen=True, slots=True)
class Table:
    """A model."""

    vocab_size: int
    num_layers: int
    blocks: tuple[Block, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """HF tensors that a checkpoint may hold besides, with the one of the model that each must equal."""
    tied: bool = False
    """The output layer is the embedding: one tensor on disk and in SGLang. A Megatron rank that has the output layer
    and not the embedding holds a copy of its share of it."""

    @property
    def mtp_layers(self) -> int:
        """Multi-token prediction layers."""
        return sum(block.place == "mtp" for block in self.blocks)
