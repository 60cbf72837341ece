"""Rows that families share: embedding, output layer, norms, gated MLPs and routed experts.

H hidden, V vocabulary, I intermediate size of an MLP or of one expert, E experts.
"""

from collections.abc import Iterator, Sequence

from megatron_rl.layouts.table import Block, Row
from megatron_rl.layouts.terms import Cols, Concat, Expert, HfTensor, PadVocab, Rep, Rows


def embedding(vocab_size: int, hidden_size: int) -> Block:
    """What stands before the first layer."""
    name = "embed_tokens.weight"
    vocabulary = PadVocab(HfTensor(name, (vocab_size, hidden_size)), "tp")
    rows = (Row(megatron={"word_embeddings.weight": vocabulary}, sglang={name: vocabulary}),)
    return Block("first", "model.", "embedding.", "model.", rows)


def head(vocab_size: int, hidden_size: int) -> Block:
    """What stands after the last layer."""
    vocabulary = PadVocab(HfTensor("lm_head.weight", (vocab_size, hidden_size)), "tp")
    rows = (
        same("decoder.final_layernorm.weight", "model.norm.weight", (hidden_size,)),
        Row(megatron={"output_layer.weight": vocabulary}, sglang={"lm_head.weight": vocabulary}),
    )
    return Block("last", "", "", "", rows)


def decoder(rows: Sequence[tuple[Row, ...]]) -> Iterator[Block]:
    """The layers, from the rows of each."""
    for i, layer in enumerate(rows):
        yield Block(i, f"model.layers.{i}.", "decoder.layers.{layer}.", f"model.layers.{i}.", layer)


def same(megatron: str, hf: str, shape: tuple[int, ...], *, dtype: str | None = None) -> Row:
    """A tensor that every rank of both sides holds whole; SGLang keeps its HF name."""
    whole = Rep(HfTensor(hf, shape, dtype))
    return Row(megatron={megatron: whole}, sglang={hf: whole})


def gated_mlp(prefix: str, hidden_size: int, intermediate_size: int) -> tuple[Row, ...]:
    """gate_proj, up_proj [I, H] and down_proj [H, I] of a dense layer or of shared experts; `prefix` is both sides'."""
    gate, up, down = _gate_up_down(prefix, hidden_size, intermediate_size)
    gate_up = Concat((Rows(gate, "tp"), Rows(up, "tp")))
    return (
        Row(megatron={f"{prefix}linear_fc1.weight": gate_up}, sglang={f"{prefix}gate_up_proj.weight": gate_up}),
        Row(megatron={f"{prefix}linear_fc2.weight": Cols(down, "tp")}, sglang={down.name: Cols(down, "tp")}),
    )


def routed_experts(experts: int, hidden_size: int, intermediate_size: int) -> tuple[Row, ...]:
    """The experts of a layer: one tensor per expert in Megatron and on disk, all in one tensor in SGLang."""
    gate, up, down = _gate_up_down("mlp.experts.{expert}.", hidden_size, intermediate_size)

    def gate_up(axis: str) -> Expert:
        return Expert(Concat((Rows(gate, axis), Rows(up, axis))), experts)

    return (
        Row(
            megatron={"mlp.experts.linear_fc1.weight{slot}": gate_up("etp")},
            sglang={"mlp.experts.w13_weight": gate_up("moe_tp")},
        ),
        Row(
            megatron={"mlp.experts.linear_fc2.weight{slot}": Expert(Cols(down, "etp"), experts)},
            sglang={"mlp.experts.w2_weight": Expert(Cols(down, "moe_tp"), experts)},
        ),
    )


def _gate_up_down(prefix: str, hidden_size: int, intermediate_size: int) -> tuple[HfTensor, HfTensor, HfTensor]:
    return (
        HfTensor(f"{prefix}gate_proj.weight", (intermediate_size, hidden_size)),
        HfTensor(f"{prefix}up_proj.weight", (intermediate_size, hidden_size)),
        HfTensor(f"{prefix}down_proj.weight", (hidden_size, intermediate_size)),
    )
