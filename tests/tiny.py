"""The smallest models the tests use. Every size differs from every other, so that a swap or transpose cannot hide.

They can be cut by tp, ep and etp 2 (and 4 for all but Qwen's 2 key-value heads) and by pp 2 x vpp 2, run on SGLang
without a GPU at tp 1, 2 and 4, and have a vocabulary that both sides have to pad.
"""

import json
from pathlib import Path
from typing import Any

from megatron_rl.convert.fp8 import without_quantization

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,:;=+-*/()<>[]_'\"?!\n"

TINY: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 48,
        "intermediate_size": 88,
        "moe_intermediate_size": 56,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 52,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "n_routed_experts": 12,
        "n_shared_experts": 2,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.75,
        },
        "attention_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": 0.05,
        "dtype": "bfloat16",
    },
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "hidden_size": 88,
        "intermediate_size": 104,
        "moe_intermediate_size": 40,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 20,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1024,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "initializer_range": 0.05,
        "dtype": "bfloat16",
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 72,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1024,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "initializer_range": 0.05,
        "dtype": "bfloat16",
    },
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "hidden_size": 96,
        "intermediate_size": 104,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
        "num_hidden_layers": 4,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "num_experts": 20,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "qkv_bias": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024,
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "initializer_range": 0.05,
        "dtype": "bfloat16",
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 56,
        "intermediate_size": 104,
        "moe_intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024,
        "rope_theta": 1000000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64},
        "attention_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": 0.05,
        "dtype": "bfloat16",
    },
    # A head is hidden_size / num_attention_heads; positions beyond 32 are scaled.
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 96,
        "intermediate_size": 120,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1024,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": 0.05,
        "dtype": "bfloat16",
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 80,
        "intermediate_size": 136,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024,
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        "dtype": "bfloat16",
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 88,
        "intermediate_size": 152,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024,
        "rope_theta": 1000000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 32},
        "attention_bias": False,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "initializer_range": 0.05,
        "dtype": "bfloat16",
    },
}
TINY["qwen3_tied"] = TINY["qwen3"] | {"rope_scaling": None, "tie_word_embeddings": True}

TINY["moonlight"] = TINY["deepseek_v3"] | {
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "num_experts_per_tok": 5,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.446,
    "rope_scaling": None,
    "rope_theta": 50000.0,
}
TINY["kimi_k2"] = TINY["moonlight"] | {
    "q_lora_rank": 52,
    "routed_scaling_factor": 2.827,
    "rope_scaling": TINY["deepseek_v3"]["rope_scaling"] | {"factor": 32.0, "beta_fast": 1.0, "mscale_all_dim": 1.0},
}
GRID = ("deepseek_v3", "qwen3_moe")
"""Families that tests run over every layout and every server; the others, where they differ from these."""

PUBLISHED: dict[str, dict[str, Any]] = {
    path.stem: without_quantization(json.loads(path.read_text()))
    for path in sorted((Path(__file__).parent / "published").glob("*.json"))
}
"""config.json of published models, every key of the architecture."""

FP8: dict[str, dict[str, Any]] = {
    "deepseek_v3": TINY["deepseek_v3"]
    | {
        "hidden_size": 152,
        "first_k_dense_replace": 2,
        "intermediate_size": 512,
        "moe_intermediate_size": 256,
        "n_routed_experts": 4,
    }
    | {"num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 384, "kv_lora_rank": 96}
    | {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "num_experts_per_tok": 2}
    | {"n_group": 2, "topk_group": 1},
    "qwen3_moe": TINY["qwen3_moe"]
    | {"hidden_size": 136, "moe_intermediate_size": 256, "num_experts": 6}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128},
    "qwen3": TINY["qwen3"]
    | {"hidden_size": 264, "intermediate_size": 512}
    | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64},
}
"""For engines in FP8: at tp 2, and mostly at tp 4, SGLang cuts between blocks of 128, within which other sizes end.

The keys of a group of Qwen3 are half a block."""
