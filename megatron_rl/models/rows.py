"""Rows that families share: embedding, output layer, attention, norms, gated MLPs and routed experts.

H hidden, V vocabulary, I intermediate size of an MLP or of one expert, E experts. `axis` is the one of SglangTopology
that SGLang's class cuts by: classes of one kind differ there.
"""

from collections.abc import Iterator, Sequence

from megatron_rl.layouts.table import Block, Row
from megatron_rl.layouts.terms import Cols, Concat, Expert, HfTensor, PadVocab, PerGroup, Rep, Rows

GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


def embedding(vocab_size: int, hidden_size: int, *, axis: str = "attn_tp") -> Block:
    """What stands before the first layer."""
    words = HfTensor("embed_tokens.weight", (vocab_size, hidden_size))
    rows = (
        Row(megatron={"word_embeddings.weight": PadVocab(words, "tp")}, sglang={words.name: PadVocab(words, axis)}),
    )
    return Block("first", "model.", "embedding.", "model.", rows)


def head(
    vocab_size: int, hidden_size: int, *, tied: bool = False, axis: str = "head_tp", on_every_stage: bool = False
) -> tuple[Block, ...]:
    """What stands after the last layer: final norm and output layer, which a pipeline may part.

    With `tied` the norm alone: that the output layer is the embedding says the table itself.
    """
    norm = (same("final_layernorm.weight", "norm.weight", (hidden_size,)),)
    out = HfTensor("lm_head.weight", (vocab_size, hidden_size))
    output = (Row(megatron={"output_layer.weight": PadVocab(out, "tp")}, sglang={out.name: PadVocab(out, axis)}),)
    blocks = Block("norm", "model.", "decoder.", "model.", norm), Block("last", "", "", "", output, on_every_stage)
    return blocks[:1] if tied else blocks


def decoder(rows: Sequence[tuple[Row, ...]]) -> Iterator[Block]:
    """The layers, from the rows of each."""
    for i, layer in enumerate(rows):
        yield Block(i, f"model.layers.{i}.", "decoder.layers.{layer}.", f"model.layers.{i}.", layer)


def prediction(rows: Sequence[tuple[Row, ...]], hidden_size: int, *, first: int) -> Iterator[Block]:
    """Multi-token prediction layers, from the rows of the decoder layer in each. `first` is the number of the first.

    Each joins the normed embedding of a token with the normed state before it. SGLang's model has none of them.
    """
    project = Rows(HfTensor("eh_proj.weight", (hidden_size, 2 * hidden_size)), "tp")
    ours = {"enorm": "enorm", "hnorm": "hnorm", "final_layernorm": "shared_head.norm"}
    norms = {f"{name}.weight": Rep(HfTensor(f"{hf}.weight", (hidden_size,))) for name, hf in ours.items()}
    for k, layer in enumerate(rows):
        inner = {f"mtp_model_layer.{name}": term for row in layer for name, term in row.megatron.items()}
        row = Row(megatron={**norms, "eh_proj.weight": project, **inner}, sglang={})
        yield Block("mtp", f"model.layers.{first + k}.", f"mtp.layers.{k}.", "", (row,))


def prediction_aliases(layers: int, *, first: int) -> dict[str, str]:
    """What multi-token prediction layers share with the model, and published checkpoints hold once more."""
    shared = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    return {f"model.layers.{first + k}.{name}": own for k in range(layers) for name, own in shared.items()}


def same(
    megatron: str, hf: str, shape: tuple[int, ...], *, dtype: str | None = None, sglang_dtype: str | None = None
) -> Row:
    """A tensor that every rank of both sides holds whole; SGLang keeps its HF name, and may have a dtype of its own."""
    ours, theirs = HfTensor(hf, shape, dtype), HfTensor(hf, shape, sglang_dtype or dtype)
    return Row(megatron={megatron: Rep(ours)}, sglang={hf: Rep(theirs)})


def grouped_attention(
    hidden_size: int,
    *,
    heads: int,
    groups: int,
    dim: int,
    bias: bool = False,
    qk_norm: bool = False,
    axis: str = "attn_tp",
) -> tuple[Row, ...]:
    """Attention with `groups` key-value heads of `dim` rows each, and the norm before it.

    Megatron interleaves q, k and v by key-value head and fuses the norm before them; SGLang stacks them. `bias` is that
    of q, k and v; `qk_norm` norms queries and keys, head by head.
    """
    sizes = {"q": heads * dim, "k": groups * dim, "v": groups * dim}
    kinds: list[tuple[str, tuple[int, ...]]] = [("weight", (hidden_size,))] + ([("bias", ())] if bias else [])
    rows = [same("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", (hidden_size,))]
    for kind, columns in kinds:
        q, k, v = (HfTensor(f"self_attn.{x}_proj.{kind}", (n, *columns)) for x, n in sizes.items())
        stacked = (Rows(q, axis, dim), Rows(k, axis, dim, repeat=True), Rows(v, axis, dim, repeat=True))
        megatron = {f"self_attention.linear_qkv.{kind}": PerGroup((q, k, v), groups, "tp")}
        rows.append(Row(megatron, sglang={f"self_attn.qkv_proj.{kind}": Concat(stacked)}))
    if qk_norm:
        rows += [same(f"self_attention.{x}_layernorm.weight", f"self_attn.{x}_norm.weight", (dim,)) for x in "qk"]
    return (*rows, attention_output(hidden_size, heads, dim, axis=axis))


def attention_output(hidden_size: int, heads: int, dim: int, *, axis: str = "attn_tp") -> Row:
    """The projection of the heads' `dim` values each, back to H."""
    out = HfTensor("self_attn.o_proj.weight", (hidden_size, heads * dim))
    megatron = {"self_attention.linear_proj.weight": Cols(out, "tp", unit=dim)}
    return Row(megatron, sglang={out.name: Cols(out, axis, unit=dim)})


def dense_mlp(hidden_size: int, intermediate_size: int, *, axis: str = "tp") -> tuple[Row, ...]:
    """The MLP of a layer without experts, and the norm before it, which Megatron fuses into linear_fc1."""
    norm = same("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight", (hidden_size,))
    return (norm, *gated_mlp("mlp.", hidden_size, intermediate_size, axis=axis))


def gated_mlp(
    prefix: str, hidden_size: int, intermediate_size: int, *, hf: str | None = None, axis: str = "tp"
) -> tuple[Row, ...]:
    """gate_proj, up_proj [I, H] and down_proj [H, I] of a dense layer or of shared experts.

    `prefix` is both sides', unless `hf` gives that of the HF names, which SGLang keeps.
    """
    hf = prefix if hf is None else hf
    gate, up, down = _gate_up_down(hf, GATE_UP_DOWN, hidden_size, intermediate_size)

    def gate_up(axis: str) -> Concat:
        return Concat((Rows(gate, axis), Rows(up, axis)))

    return (
        Row(megatron={f"{prefix}linear_fc1.weight": gate_up("tp")}, sglang={f"{hf}gate_up_proj.weight": gate_up(axis)}),
        Row(megatron={f"{prefix}linear_fc2.weight": Cols(down, "tp")}, sglang={down.name: Cols(down, axis)}),
    )


def router(experts: int, hidden_size: int, *, prefix: str = "mlp.", sglang_dtype: str | None = None) -> tuple[Row, ...]:
    """What chooses among the experts of a layer, and the norm before it; `prefix` is that of the HF names."""
    return (
        same("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", (hidden_size,)),
        same("mlp.router.weight", f"{prefix}gate.weight", (experts, hidden_size), sglang_dtype=sglang_dtype),
    )


def routed_experts(
    experts: int,
    hidden_size: int,
    intermediate_size: int,
    *,
    prefix: str = "mlp.",
    names: tuple[str, str, str] = GATE_UP_DOWN,
) -> tuple[Row, ...]:
    """The experts of a layer: one tensor per expert in Megatron and on disk, all in one tensor in SGLang.

    `prefix` and `names` (of gate, up and down) are those of the HF names.
    """
    gate, up, down = _gate_up_down(f"{prefix}experts.{{expert}}.", names, hidden_size, intermediate_size)

    def gate_up(axis: str) -> Expert:
        return Expert(Concat((Rows(gate, axis), Rows(up, axis))), experts)

    return (
        Row(
            megatron={"mlp.experts.linear_fc1.weight{slot}": gate_up("etp")},
            sglang={f"{prefix}experts.w13_weight": gate_up("moe_tp")},
        ),
        Row(
            megatron={"mlp.experts.linear_fc2.weight{slot}": Expert(Cols(down, "etp"), experts)},
            sglang={f"{prefix}experts.w2_weight": Expert(Cols(down, "moe_tp"), experts)},
        ),
    )


def _gate_up_down(
    prefix: str, names: tuple[str, str, str], hidden_size: int, intermediate_size: int
) -> tuple[HfTensor, HfTensor, HfTensor]:
    gate, up, down = (f"{prefix}{name}.weight" for name in names)
    return (
        HfTensor(gate, (intermediate_size, hidden_size)),
        HfTensor(up, (intermediate_size, hidden_size)),
        HfTensor(down, (hidden_size, intermediate_size)),
    )
