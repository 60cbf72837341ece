"""Every rank's tensors, cut by hand from whole HF tensors: slow, and written without boxes or terms.

Weights are replaced by ids: element n of the whole model holds the number n, so that a tensor shows where each of its
elements comes from. Padding holds -1.
"""

from typing import Any

import numpy as np

from megatron_rl.layouts.boxes import TensorLayout

Arrays = dict[str, np.ndarray]
EXPERTS = {"mixtral": ("block_sparse_moe.", ("w1", "w3", "w2"))}
"""Prefix of a layer's router and experts, and the experts' names of gate, up and down, where they are not the usual."""
PLAIN_TP = ("llama", "mixtral", "qwen2")
"""model_type of families whose class in SGLang knows no data-parallel attention."""
WHOLE_DENSE = ("deepseek_v3", "glm4_moe")
"""Those whose dense layers moe_dense_tp makes whole."""
USUAL = ("mlp.", ("gate_proj", "up_proj", "down_proj"))


def whole_model(hf: dict[str, Any], *, vocab: int) -> Arrays:
    """The HF checkpoint of a config in tests/tiny.py: name -> ids; no lm_head when it is tied."""
    hidden, shapes = hf["hidden_size"], {}
    shapes["model.embed_tokens.weight"] = (vocab, hidden)
    layers = hf["num_hidden_layers"]
    for i in range(layers + hf.get("num_nextn_predict_layers", 0)):
        layer = f"model.layers.{i}."
        for name, shape in (attention_shapes(hf) | mlp_shapes(hf, i)).items():
            shapes[layer + name] = shape
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}{norm}.weight"] = (hidden,)
        if i >= layers:
            shapes |= {f"{layer}{norm}.weight": (hidden,) for norm in ("enorm", "hnorm", "shared_head.norm")}
            shapes[f"{layer}eh_proj.weight"] = (hidden, 2 * hidden)
    shapes["model.norm.weight"] = (hidden,)
    if not hf["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    model, start = {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        model[name] = np.arange(start, start + size).reshape(shape)
        start += size
    return model


def is_grouped(hf: dict[str, Any]) -> bool:
    """Not latent attention."""
    return "kv_lora_rank" not in hf


def has_bias(hf: dict[str, Any]) -> bool:
    """Of queries, keys and values; Qwen2 has no key for it."""
    return hf.get("qkv_bias", hf.get("attention_bias", hf["model_type"] == "qwen2"))


def head_dim(hf: dict[str, Any]) -> int:
    """Rows of a head."""
    return hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]


def attention_shapes(hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names below a layer's prefix."""
    hidden, heads, biases = hf["hidden_size"], hf["num_attention_heads"], {}
    if is_grouped(hf):
        dim, groups = head_dim(hf), hf["num_key_value_heads"]
        sizes = {"q_proj": (heads * dim, hidden), "k_proj": (groups * dim, hidden), "v_proj": (groups * dim, hidden)}
        sizes |= {"o_proj": (hidden, heads * dim)}
        if hf.get("use_qk_norm", hf["model_type"] in ("qwen3", "qwen3_moe")):
            sizes |= {"q_norm": (dim,), "k_norm": (dim,)}
        biases = {f"self_attn.{n}_proj.bias": sizes[f"{n}_proj"][:1] for n in "qkv" if has_bias(hf)}
    else:
        nope, rope, value = hf["qk_nope_head_dim"], hf["qk_rope_head_dim"], hf["v_head_dim"]
        q_rank, kv_rank = hf["q_lora_rank"], hf["kv_lora_rank"]
        sizes = {"kv_a_proj_with_mqa": (kv_rank + rope, hidden), "kv_b_proj": (heads * (nope + value), kv_rank)}
        sizes |= {"o_proj": (hidden, heads * value), "kv_a_layernorm": (kv_rank,)}
        if q_rank is None:
            sizes["q_proj"] = (heads * (nope + rope), hidden)
        else:
            sizes |= {"q_a_proj": (q_rank, hidden), "q_b_proj": (heads * (nope + rope), q_rank)}
            sizes["q_a_layernorm"] = (q_rank,)
    return biases | {f"self_attn.{name}.weight": shape for name, shape in sizes.items()}


def mlp_shapes(hf: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    """Names below a layer's prefix."""
    hidden = hf["hidden_size"]
    counts = [hf[key] for key in ("n_routed_experts", "num_experts", "num_local_experts") if key in hf]
    if not counts or layer < hf.get("first_k_dense_replace", 0):
        return _gated("mlp.", hidden, hf["intermediate_size"])
    size, (experts,) = hf.get("moe_intermediate_size", hf["intermediate_size"]), counts
    prefix, names = EXPERTS.get(hf["model_type"], USUAL)
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}gate.weight": (experts, hidden)}
    if "n_routed_experts" in hf:
        shapes["mlp.gate.e_score_correction_bias"] = (experts,)
        shapes |= _gated("mlp.shared_experts.", hidden, size * hf["n_shared_experts"])
    if hf["model_type"] == "qwen2_moe":
        shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
        shapes |= _gated("mlp.shared_expert.", hidden, hf["shared_expert_intermediate_size"])
    for e in range(experts):
        shapes |= _gated(f"{prefix}experts.{e}.", hidden, size, names)
    return shapes


def _gated(prefix: str, hidden: int, size: int, names: tuple[str, str, str] = USUAL[1]) -> dict[str, tuple[int, ...]]:
    shapes = ((size, hidden), (size, hidden), (hidden, size))
    return {f"{prefix}{name}.weight": shape for name, shape in zip(names, shapes, strict=True)}


def cut(array: np.ndarray, ranks: int, rank: int, axis: int = 0) -> np.ndarray:
    """The equal share of `rank`."""
    return np.split(array, ranks, axis)[rank]


def cut_heads(array: np.ndarray, heads: int, ranks: int, rank: int, axis: int = 0) -> np.ndarray:
    """The share of `rank` in whole heads."""
    width = array.shape[axis] // heads
    mine = cut(np.arange(heads), ranks, rank)
    return array.take([head * width + i for head in mine for i in range(width)], axis)


def pad_rows(array: np.ndarray, rows: int) -> np.ndarray:
    """-1 below."""
    return np.concatenate([array, np.full((rows - len(array), *array.shape[1:]), -1)])


def gate_up(model: Arrays, prefix: str, ranks: int, rank: int, names: tuple[str, str, str] = USUAL[1]) -> np.ndarray:
    """[gate share; up share]."""
    return np.concatenate([cut(model[f"{prefix}{n}.weight"], ranks, rank) for n in names[:2]])


def megatron_layer(
    hf: dict[str, Any], model: Arrays, layer: int, *, tp: tuple[int, int], ep: tuple[int, int], etp: tuple[int, int]
) -> Arrays:
    """Tensors of one layer of a Megatron rank, named below "decoder.layers.{j}."; each size comes as (ranks, rank)."""
    at = f"model.layers.{layer}."
    x = {name.removeprefix(at): value for name, value in model.items() if name.startswith(at)}
    heads = hf["num_attention_heads"]
    out = {"self_attention.linear_proj.weight": cut_heads(x["self_attn.o_proj.weight"], heads, *tp, axis=1)}
    if is_grouped(hf):
        groups, dim = hf["num_key_value_heads"], head_dim(hf)
        for kind in ("weight", "bias") if has_bias(hf) else ("weight",):
            parts = [x[f"self_attn.{n}_proj.{kind}"] for n in "qkv"]
            qkv = np.concatenate([part.reshape(groups, -1, *part.shape[1:]) for part in parts], axis=1)
            assert qkv.shape[1] == (heads // groups + 2) * dim
            if tp[0] % groups and groups % tp[0]:
                raise ValueError(f"{groups} key-value heads on {tp[0]} ranks")
            out[f"self_attention.linear_qkv.{kind}"] = cut(qkv.reshape(-1, *qkv.shape[2:]), *tp)
        out["self_attention.linear_qkv.layer_norm_weight"] = x["input_layernorm.weight"]
        for n in "qk":
            if f"self_attn.{n}_norm.weight" in x:
                out[f"self_attention.{n}_layernorm.weight"] = x[f"self_attn.{n}_norm.weight"]
    else:
        out["input_layernorm.weight"] = x["input_layernorm.weight"]
        ways = {"kv": "kv_a_proj_with_mqa"}
        if hf["q_lora_rank"] is None:
            out["self_attention.linear_q_proj.weight"] = cut_heads(x["self_attn.q_proj.weight"], heads, *tp)
        else:
            ways["q"] = "q_a_proj"
        for short, name in ways.items():
            out[f"self_attention.linear_{short}_down_proj.weight"] = x[f"self_attn.{name}.weight"]
            out[f"self_attention.linear_{short}_up_proj.weight"] = cut_heads(
                x[f"self_attn.{short}_b_proj.weight"], heads, *tp
            )
            norm = x[f"self_attn.{short}_a_layernorm.weight"]
            out[f"self_attention.linear_{short}_up_proj.layer_norm_weight"] = norm
    prefix, names = EXPERTS.get(hf["model_type"], USUAL)
    if f"{prefix}gate.weight" not in x:
        out["mlp.linear_fc1.layer_norm_weight"] = x["post_attention_layernorm.weight"]
        out["mlp.linear_fc1.weight"] = gate_up(x, "mlp.", *tp)
        out["mlp.linear_fc2.weight"] = cut(x["mlp.down_proj.weight"], *tp, axis=1)
        return out
    out["pre_mlp_layernorm.weight"] = x["post_attention_layernorm.weight"]
    out["mlp.router.weight"] = x[f"{prefix}gate.weight"]
    if "n_routed_experts" in hf:
        out["mlp.router.expert_bias"] = x["mlp.gate.e_score_correction_bias"]
    for shared in ("mlp.shared_experts.", "mlp.shared_expert."):
        if f"{shared}up_proj.weight" in x:
            out["mlp.shared_experts.linear_fc1.weight"] = gate_up(x, shared, *tp)
            out["mlp.shared_experts.linear_fc2.weight"] = cut(x[f"{shared}down_proj.weight"], *tp, axis=1)
    if "mlp.shared_expert_gate.weight" in x:
        out["mlp.shared_experts.gate_weight"] = x["mlp.shared_expert_gate.weight"]
    for slot, e in enumerate(cut(np.arange(len(x[f"{prefix}gate.weight"])), *ep)):
        expert = f"{prefix}experts.{e}."
        out[f"mlp.experts.linear_fc1.weight{slot}"] = gate_up(x, expert, *etp, names)
        out[f"mlp.experts.linear_fc2.weight{slot}"] = cut(x[f"{expert}{names[2]}.weight"], *etp, axis=1)
    return out


def megatron_mtp(hf: dict[str, Any], model: Arrays, number: int, **sizes: tuple[int, int]) -> Arrays:
    """Tensors of one multi-token prediction layer of a Megatron rank, named below "mtp.layers.{k}."."""
    layer = hf["num_hidden_layers"] + number
    at = f"model.layers.{layer}."
    out = {f"mtp_model_layer.{n}": value for n, value in megatron_layer(hf, model, layer, **sizes).items()}
    out |= {f"{norm}.weight": model[f"{at}{norm}.weight"] for norm in ("enorm", "hnorm")}
    out["final_layernorm.weight"] = model[f"{at}shared_head.norm.weight"]
    out["eh_proj.weight"] = cut(model[f"{at}eh_proj.weight"], *sizes["tp"])
    return out


def sglang_layer(hf: dict[str, Any], model: Arrays, layer: int, at: dict[str, tuple[int, int]]) -> Arrays:
    """Tensors of one layer of an engine's rank, whole names; `at` gives (ranks, rank) along each axis."""
    prefix = f"model.layers.{layer}."
    x = {name.removeprefix(prefix): value for name, value in model.items() if name.startswith(prefix)}
    moe, names = EXPERTS.get(hf["model_type"], USUAL)
    attention, heads = at["attn" if hf["model_type"] not in PLAIN_TP else "tp"], hf["num_attention_heads"]
    whole = (f"{moe}gate.weight", "mlp.shared_expert_gate.weight")
    y = {n: value for n, value in x.items() if n in whole or (value.ndim == 1 and not n.endswith("_proj.bias"))}
    y["self_attn.o_proj.weight"] = cut_heads(x["self_attn.o_proj.weight"], heads, *attention, axis=1)
    if is_grouped(hf):
        for kind in ("weight", "bias") if has_bias(hf) else ("weight",):
            y[f"self_attn.qkv_proj.{kind}"] = _qkv(hf, x, kind, *attention)
    else:
        way_down = x["self_attn.kv_a_proj_with_mqa.weight"]
        if hf["q_lora_rank"] is None:
            y["self_attn.kv_a_proj_with_mqa.weight"] = way_down
        else:
            fused = np.concatenate([x["self_attn.q_a_proj.weight"], way_down])
            y["self_attn.fused_qkv_a_proj_with_mqa.weight"] = fused
        for name in ("self_attn.q_proj.weight", "self_attn.q_b_proj.weight", "self_attn.kv_b_proj.weight"):
            if name in x:
                y[name] = cut_heads(x[name], heads, *attention)
    dense = at["dense" if hf["model_type"] in WHOLE_DENSE else "tp"]
    for below, axis in (("mlp.", dense), ("mlp.shared_experts.", at["tp"]), ("mlp.shared_expert.", at["tp"])):
        if f"{below}gate_proj.weight" in x:
            y[f"{below}gate_up_proj.weight"] = gate_up(x, below, *axis)
            y[f"{below}down_proj.weight"] = cut(x[f"{below}down_proj.weight"], *axis, axis=1)
    if f"{moe}gate.weight" in x:
        mine = [f"{moe}experts.{e}." for e in cut(np.arange(len(x[f"{moe}gate.weight"])), *at["ep"])]
        y[f"{moe}experts.w13_weight"] = np.stack([gate_up(x, expert, *at["moe_tp"], names) for expert in mine])
        down = [cut(x[f"{expert}{names[2]}.weight"], *at["moe_tp"], axis=1) for expert in mine]
        y[f"{moe}experts.w2_weight"] = np.stack(down)
    return {prefix + name: value for name, value in y.items()}


def _qkv(hf: dict[str, Any], x: Arrays, kind: str, ranks: int, rank: int) -> np.ndarray:
    """[q; k; v]; when there are more ranks than key-value heads, each head is on several neighbouring ranks."""
    groups, dim = hf["num_key_value_heads"], head_dim(hf)
    head_of = np.repeat(np.arange(groups), ranks // groups) if ranks > groups else None
    if head_of is not None and len(head_of) != ranks:
        raise ValueError(f"{groups} heads on {ranks} ranks")
    parts = [cut_heads(x[f"self_attn.q_proj.{kind}"], hf["num_attention_heads"], ranks, rank)]
    for n in "kv":
        tensor = x[f"self_attn.{n}_proj.{kind}"]
        heads = tensor.reshape(groups, dim, *tensor.shape[1:])
        mine = cut(heads, ranks, rank) if head_of is None else heads[head_of[rank]][None]
        parts.append(mine.reshape(-1, *tensor.shape[1:]))
    return np.concatenate(parts)


def fill(layout: TensorLayout, model: Arrays) -> np.ndarray:
    """The tensor that a layout describes; asserts that no two boxes write the same element."""
    local = np.full(layout.shape, -1)
    for box in layout.boxes:
        lead = len(box.offset) - len(box.shape)
        target = local[box.offset[:lead]][
            tuple(slice(o, o + n) for o, n in zip(box.offset[lead:], box.shape, strict=True))
        ]
        source = model[box.hf][tuple(slice(o, o + n) for o, n in zip(box.hf_offset, box.shape, strict=True))]
        assert target.shape == source.shape == box.shape, (layout.name, box, target.shape, source.shape)
        assert (target == -1).all(), (layout.name, box)
        target[...] = source
    return local
