"""What DeepSeek-V3 and GLM-4.5 share around their attention: dense layers, then experts chosen by sigmoid scores and a
correction bias ("noaux_tc"), shared experts, and layers for multi-token prediction."""

from typing import Any

from megatron_rl.errors import ConfigError
from megatron_rl.layouts.table import Row, Table
from megatron_rl.models.family import COMMON, EXPERTS, FIXED, HfConfig, read, rename, whole
from megatron_rl.models.rows import (
    decoder,
    dense_mlp,
    embedding,
    gated_mlp,
    head,
    prediction,
    prediction_aliases,
    routed_experts,
    router,
    same,
)

SUPPORTED: dict[str, Any] = {
    "hidden_act": "silu",
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
}
NAMES = {"num_moe_experts": "n_routed_experts", "moe_router_topk_scaling_factor": "routed_scaling_factor"}


def table(
    hf: HfConfig,
    attention: tuple[Row, ...],
    *,
    sglang_router_dtype: str | None = None,
    head_on_every_stage: bool = False,
) -> Table:
    """Every tensor of a model with these rows of attention in each layer; those of multi-token prediction last.

    SGLang's class may keep routers in a dtype of their own, and build the output layer on every pipeline stage.
    """
    hidden, layers, vocab = read(hf, "hidden_size"), read(hf, "num_hidden_layers"), read(hf, "vocab_size")
    dense = attention + dense_mlp(hidden, read(hf, "intermediate_size"), axis="dense_tp")
    moe = attention + _moe(hf, sglang_router_dtype)
    rows = [dense if i < read(hf, "first_k_dense_replace") else moe for i in range(layers)]
    extra = _prediction_layers(hf)
    blocks = (embedding(vocab, hidden), *decoder(rows), *head(vocab, hidden, on_every_stage=head_on_every_stage))
    mtp = prediction([moe] * extra, hidden, first=layers)
    return Table(vocab, layers, (*blocks, *mtp), prediction_aliases(extra, first=layers))


def megatron(hf: HfConfig) -> dict[str, Any]:
    """megatron-core's words for all but attention."""
    layers, first = read(hf, "num_hidden_layers"), read(hf, "first_k_dense_replace")
    if (extra := _prediction_layers(hf)) and first >= layers:
        raise ConfigError(
            f"config.json has num_nextn_predict_layers={extra} and first_k_dense_replace={first} of {layers} layers: "
            "Megatron makes prediction layers like the last one, this architecture with experts. Set "
            "num_nextn_predict_layers to 0."
        )
    return {
        **FIXED,
        **rename(hf, COMMON | EXPERTS | NAMES),
        "moe_layer_freq": [int(i >= first) for i in range(layers)],
        "moe_shared_expert_intermediate_size": read(hf, "moe_intermediate_size") * read(hf, "n_shared_experts"),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        # As in transformers, and in SGLang on a GPU: in bfloat16 it would choose other experts.
        "moe_router_dtype": "fp32",
        "mtp_num_layers": extra or None,
        **_groups(hf),
    }


def _prediction_layers(hf: HfConfig) -> int:
    return whole("num_nextn_predict_layers", hf.get("num_nextn_predict_layers") or 0)


def _moe(hf: HfConfig, sglang_router_dtype: str | None) -> tuple[Row, ...]:
    """Router, routed experts and shared experts. The correction bias is float32 on every side."""
    hidden, experts, size = read(hf, "hidden_size"), read(hf, "n_routed_experts"), read(hf, "moe_intermediate_size")
    return (
        *router(experts, hidden, sglang_dtype=sglang_router_dtype),
        same("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", (experts,), dtype="float32"),
        *routed_experts(experts, hidden, size),
        *gated_mlp("mlp.shared_experts.", hidden, size * read(hf, "n_shared_experts")),
    )


def _groups(hf: HfConfig) -> dict[str, int]:
    """Group-limited routing. Megatron scores a group by its best topk/topk_group experts, DeepSeek by its best two."""
    groups, kept, topk = read(hf, "n_group"), read(hf, "topk_group"), read(hf, "num_experts_per_tok")
    experts = read(hf, "n_routed_experts")
    size = experts // groups
    if experts % groups or size < 2 or kept > groups or topk > kept * size:
        raise ConfigError(
            f"config.json has num_experts_per_tok={topk} in topk_group={kept} of n_group={groups} groups of "
            f"n_routed_experts={experts}: groups are equally large, scored by their best two experts, and those kept "
            "hold the chosen ones. Make n_group a divisor of n_routed_experts of which each group has at least 2, "
            "topk_group at most n_group, and num_experts_per_tok small enough."
        )
    if groups == kept:
        return {}
    if topk // kept != 2:
        raise ConfigError(
            f"num_experts_per_tok={topk} with topk_group={kept} of n_group={groups}: Megatron scores a group by its "
            f"best {topk // kept} experts, this architecture by its best 2. Set num_experts_per_tok to {2 * kept}, or "
            "n_group and topk_group to 1."
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": kept}
