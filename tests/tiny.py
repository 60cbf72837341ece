"""The smallest models the tests use. Every size differs from every other, so that a swap or transpose cannot hide.

They can be cut by tp, ep and etp 2 (and 4 for all but Qwen's 2 key-value heads) and by pp 2 x vpp 2, run on SGLang
without a GPU at tp 1, 2 and 4, and have a vocabulary that both sides have to pad.
"""

from typing import Any

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
        "num_nextn_predict_layers": 0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        # SGLang without a GPU runs DeepSeek-V3 only with yarn.
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
        "rope_scaling": None,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": 0.05,
        "dtype": "bfloat16",
    },
}

GRID = ("deepseek_v3", "qwen3_moe")
"""Families that tests run over every layout and every server; the others, where they differ from these."""

FULL_SIZE: dict[str, dict[str, Any]] = {
    "mixtral_8x22b": TINY["mixtral"]
    | {
        "hidden_size": 6144,
        "intermediate_size": 16384,
        "num_hidden_layers": 56,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 65536,
        "vocab_size": 32000,
    },
    "deepseek_v3": TINY["deepseek_v3"]
    | {
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "first_k_dense_replace": 3,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "vocab_size": 129280,
    },
    "qwen3_moe": TINY["qwen3_moe"]
    | {
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
    },
}
"""Published configs, as far as tables read them: for tests that only count."""
