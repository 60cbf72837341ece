"""What a model family has to say, and how it reads a Hugging Face config."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron_rl.errors import ConfigError
from megatron_rl.layouts.fp8 import BLOCK
from megatron_rl.layouts.table import Table

HfConfig = dict[str, Any]

COMMON = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size",
    "layernorm_epsilon": "rms_norm_eps",
}
EXPERTS = {"moe_ffn_hidden_size": "moe_intermediate_size", "moe_router_topk": "num_experts_per_tok"}
"""megatron-core's names of HF keys, for `rename`."""
FIXED = {"normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False}
"""What the families here have in common without saying it in config.json."""
MAY_BE_0 = ("first_k_dense_replace", "num_nextn_predict_layers")
"""Sizes; every other one is at least 1."""
SCALING = {
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
}
"""Kinds of rope scaling of attention that is not latent, each with its keys."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model in megatron-core's words."""

    mla: bool
    """Latent attention: `megatron` is for MLATransformerConfig rather than TransformerConfig."""
    megatron: dict[str, Any]
    """Keyword values that follow from the model; parallelism, precision and training options are not among them."""
    vocab_size: int
    """Without padding."""
    rotary_base: float
    max_position_embeddings: int
    rotary_percent: float = 1.0
    """Of each head's rows, the first that are rotated."""
    rope_scaling: Mapping[str, Any] | None = None
    """Of attention that is not latent: `rope_type`, "llama3" or "yarn", and every key of `SCALING` for it."""
    tied: bool = False
    """Whether the output layer is the embedding."""


@dataclass(frozen=True, slots=True)
class Family:
    """One row of `FAMILIES`."""

    supported: Mapping[str, Any]
    """Keys of config.json and the only value that each may have."""
    architecture: Callable[[HfConfig], Architecture]
    table: Callable[[HfConfig], Table]


def read(hf: HfConfig, key: str, *or_else: str) -> Any:
    """A value that the model cannot be built without, under the first of its names that is there.

    Raises: ConfigError when config.json lacks it, says null, or has what it cannot be.
    """
    for name in (key, *or_else):
        value = hf.get(name)
        if value is not None:
            return OTHERS[name](name, value) if name in OTHERS else whole(name, value)
    raise ConfigError(f"config.json of {hf['architectures'][0]} has no {key!r}: the model's shape is unknown. Add it.")


def whole(name: str, value: Any) -> int:
    """The value of a size or a count. Raises: ConfigError when it is none."""
    least = int(name not in MAY_BE_0)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"config.json has {name}={value!r}: a size is a whole number of at least {least}. Mend it.")
    return value


def switch(name: str, value: Any) -> bool:
    """The value of what is on or off. Raises: ConfigError when it is neither."""
    if not isinstance(value, bool):
        raise ConfigError(f"config.json has {name}={value!r}, where true or false has to be. Mend it.")
    return value


def number(name: str, value: Any) -> float:
    """The value of a factor or the like. Raises: ConfigError when it is no positive number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ConfigError(f"config.json has {name}={value!r}, where a number above 0 has to be. Mend it.")
    return value


OTHERS: dict[str, Callable[[str, Any], Any]] = {
    "rms_norm_eps": number,
    "routed_scaling_factor": number,
    "norm_topk_prob": switch,
}
"""HF keys whose value is no size."""


def rename(hf: HfConfig, names: Mapping[str, str]) -> dict[str, Any]:
    """{megatron-core's name: the value under the HF key}."""
    return {megatron: read(hf, key) for megatron, key in names.items()}


def softmax_router(*, renormalized: bool) -> dict[str, Any]:
    """megatron-core's words for a softmax over experts; `renormalized` over the chosen ones.

    Softmax after the choice is softmax before it, divided by the sum over the chosen.
    """
    return {"moe_router_score_function": "softmax", "moe_router_pre_softmax": not renormalized}


def refuse(hf: HfConfig, supported: Mapping[str, Any]) -> None:
    """Raise a ConfigError for the first key whose value is not the supported one; a missing key or null passes."""
    for key, value in supported.items():
        if hf.get(key) not in (None, value):
            raise ConfigError(
                f"config.json has {key}={hf[key]!r}; for {hf['architectures'][0]} only {value!r} is supported, and the "
                "model would compute something else. Use a checkpoint that has it."
            )


def refuse_quantized(found: Any) -> NoReturn:
    """Raise a ConfigError for the `quantization_config` of weights that are to be trained."""
    given = found if isinstance(found, dict) else {"quant_method": found}
    method, size = given.get("quant_method"), given.get("weight_block_size")
    mend = f"tools/convert reads FP8 in blocks of {BLOCK} x {BLOCK} and nothing else. Use the bfloat16 checkpoint"
    if method == "fp8" and size == [BLOCK, BLOCK]:
        mend = "Convert it first: python tools/convert import --hf DIR --out DIR"
    raise ConfigError(
        f"The checkpoint is quantized ({method}): training needs its weights in bfloat16 or float32. {mend}."
    )


def refuse_sizes(model: Architecture) -> None:
    """Raise a ConfigError for sizes of which each could be, but not all together."""
    sizes = model.megatron
    heads, groups = sizes["num_attention_heads"], sizes.get("num_query_groups") or 1
    if heads % groups:
        raise ConfigError(
            f"config.json has num_attention_heads={heads} and num_key_value_heads={groups}: each of these serves as "
            "many of those. Set num_key_value_heads to a divisor of num_attention_heads."
        )
    head = sizes["qk_pos_emb_head_dim" if model.mla else "kv_channels"]
    if (rotated := int(head * model.rotary_percent)) % 2 or not 0 < rotated <= head:
        raise ConfigError(
            f"config.json has {rotated} of a head's {head} rows rotated: they are rotated in pairs. Make "
            "qk_rope_head_dim, or head_dim and its partial_rotary_factor, give an even number."
        )
    if model.mla and sizes["v_head_dim"] > (width := sizes["qk_head_dim"] + head):
        raise ConfigError(
            f"config.json has v_head_dim={sizes['v_head_dim']}, more than the {width} of qk_nope_head_dim and "
            "qk_rope_head_dim together: megatron-core makes values as wide as queries, and would cut these. Use a "
            "model whose values are not wider."
        )
    experts, chosen = sizes.get("num_moe_experts"), sizes.get("moe_router_topk", 0)
    if experts is not None and chosen > experts:
        raise ConfigError(
            f"config.json has num_experts_per_tok={chosen} of {experts} experts: a token cannot have more than there "
            f"are. Set num_experts_per_tok to at most {experts}."
        )
    if chosen == 1 and not sizes.get("moe_router_pre_softmax", False):
        raise ConfigError(
            "config.json has num_experts_per_tok=1, and probabilities of the chosen experts add up to 1: that is the "
            "one's, whatever its score, and megatron-core takes the score. Use a model that chooses at least 2, or "
            "does not renormalize."
        )


def rotary(hf: HfConfig) -> tuple[float, dict[str, Any] | None]:
    """(base, scaling or None), from `rope_parameters` or from the older `rope_theta` and `rope_scaling`."""
    new = hf.get("rope_parameters")
    given = new if new is not None else hf.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise ConfigError(f"config.json scales positions by {given!r}, which is no object. Copy it from the original.")
    scaling = dict(given)
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    base = scaling.pop("rope_theta", hf.get("rope_theta"))
    if base is None:
        raise ConfigError("config.json gives no rope_theta: positions cannot be encoded. Add it.")
    for key, value in scaling.items():
        if isinstance(value, str) or key in {key for keys in SCALING.values() for key in keys}:
            number(f"{key} of rope_scaling", value)
    return float(number("rope_theta", base)), None if kind == "default" else {**scaling, "rope_type": kind}


def unscaled_rotary(hf: HfConfig) -> float:
    """The base of plain rotary embedding. Raises: ConfigError when positions are scaled."""
    base, scaling = rotary(hf)
    if scaling is not None:
        raise ConfigError(
            f"config.json scales positions ({scaling}), which is not supported here. Remove rope_scaling."
        )
    return base


def head_dim(hf: HfConfig) -> int:
    """Rows of one attention head: `head_dim`, or an equal share of the hidden size."""
    if hf.get("head_dim") is not None:
        return int(read(hf, "head_dim"))
    hidden, heads = read(hf, "hidden_size"), read(hf, "num_attention_heads")
    if hidden % heads:
        raise ConfigError(
            f"config.json has no head_dim, and hidden_size={hidden} is no multiple of num_attention_heads={heads}: "
            "the size of a head is unknown. Add head_dim."
        )
    return int(hidden // heads)


def equal_heads(hf: HfConfig) -> int:
    """The `head_dim` of a model in which SGLang never reads it. Raises: ConfigError when it is no equal share."""
    dim = head_dim(hf)
    if dim * read(hf, "num_attention_heads") != read(hf, "hidden_size"):
        raise ConfigError(
            f"config.json has head_dim={dim}: SGLang's {hf['architectures'][0]} takes hidden_size / "
            "num_attention_heads, whatever it says. Use a checkpoint without head_dim."
        )
    return dim


def scaled_rotary(hf: HfConfig) -> tuple[float, dict[str, Any] | None]:
    """(base, scaling or None) of attention that is not latent, every key of the scaling filled in.

    Raises: ConfigError for a scaling that transformers, megatron-core and SGLang do not compute alike.
    """
    base, scaling = rotary(hf)
    if scaling is None:
        given = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        only_keys({key: value for key, value in given.items() if key not in ("rope_type", "type", "rope_theta")}, ())
        return base, None
    kind = scaling["rope_type"]
    if kind not in SCALING:
        raise ConfigError(
            f"config.json scales positions with rope_type={kind!r}; {hf['architectures'][0]} is supported with "
            f"{', '.join(SCALING)} or none. Use one of these."
        )
    if kind == "yarn":
        scaling = {"beta_fast": 32.0, "beta_slow": 1.0, **scaling}  # what each library takes when they are left out
    only_keys(scaling, ("rope_type", *SCALING[kind]))
    return base, scaling


def only_keys(scaling: dict[str, Any], keys: Iterable[str]) -> None:
    """Raise a ConfigError unless rope scaling has exactly these keys."""
    if set(scaling) != set(keys):
        raise ConfigError(
            f"config.json scales positions by {sorted(scaling)}; supported is {sorted(keys)}, all of them: another "
            "combination is read differently by each library. Write it in full."
        )
