"""Families: what they refuse, how many parameters they count, and that both libraries agree on the rest."""

import copy
import json
from collections.abc import Iterable
from math import prod
from typing import Any

import pytest
from safetensors import safe_open

from megatron_rl.errors import ConfigError
from megatron_rl.layouts.boxes import TensorLayout
from megatron_rl.layouts.compile import hf_layouts
from megatron_rl.models import load_architecture, load_table
from tests.tiny import PUBLISHED, TINY

DEEPSEEK = {**TINY["deepseek_v3"], "vocab_size": 61}
QWEN = {**TINY["qwen3_moe"], "vocab_size": 61}
MIXTRAL = {**TINY["mixtral"], "vocab_size": 61}
GLM = {**TINY["glm4_moe"], "vocab_size": 61}
LLAMA, QWEN2, QWEN3 = ({**TINY[family], "vocab_size": 61} for family in ("llama", "qwen2", "qwen3"))
YARN = DEEPSEEK["rope_scaling"]


def count(layouts: Iterable[TensorLayout]) -> int:
    return sum(prod(layout.shape) for layout in layouts)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        # GLM-4.5: 355 B in its report; with the copies that its prediction layer has on disk 358 B.
        ("glm4_5", 352_797_829_024 + 3_988_069_792),
        ("glm4_5_air", 106_852_251_264 + 2_375_059_584),
        # Moonlight: 16 B; Kimi-K2: 1 T, which its report rounds to 1.04.
        ("kimi_k2", 1_026_408_232_448),
        ("mixtral_8x22b", 140_620_634_112),
        ("mixtral_8x7b", 46_702_792_704),
        ("moonlight", 15_960_110_208),
        ("qwen1_5_moe_a2_7b", 14_315_784_192),
        ("qwen2_57b_a14b", 57_408_658_944),
        ("qwen3_235b_a22b", 235_093_634_560),
        ("qwen3_30b_a3b", 30_532_122_624),
        ("llama3_1_8b", 8_030_261_248),
        ("llama3_2_1b", 1_235_814_400),
        ("qwen2_5_0_5b", 494_032_768),
        ("qwen2_5_7b", 7_615_616_512),
        ("qwen3_8b", 8_190_735_360),
        ("qwen3_0_6b", 596_049_920),
    ],
)
def test_a_published_model_has_the_parameters_of_its_report(model: str, parameters: int) -> None:
    assert count(hf_layouts(load_table(PUBLISHED[model]), dtype="bfloat16")) == parameters
    assert load_architecture(PUBLISHED[model]).vocab_size == PUBLISHED[model]["vocab_size"]


@pytest.mark.parametrize("model", sorted(PUBLISHED))
def test_a_published_config_reads_the_same_once_transformers_has_written_it(model: str) -> None:
    import transformers

    hf = copy.deepcopy(PUBLISHED[model])
    if hf["model_type"] == "kimi_k2":  # its own code's name for DeepSeek-V3
        hf["model_type"] = "deepseek_v3"
    written = transformers.AutoConfig.for_model(**hf).to_dict()
    assert "rope_parameters" in written and "rope_theta" not in written
    assert load_architecture(written) == load_architecture(PUBLISHED[model])
    assert load_table(written) == load_table(PUBLISHED[model])


def test_deepseek_v3_has_671_billion_parameters_and_13_for_multi_token_prediction() -> None:
    table = load_table(PUBLISHED["deepseek_v3"])
    both = hf_layouts(table, dtype="bfloat16")
    with_copies = hf_layouts(table, dtype="bfloat16", aliases=table.aliases)
    main = [layout for layout in both if not layout.name.startswith("model.layers.61.")]
    # Weights, and a correction bias for each of 256 experts of 58 layers.
    assert count(main) == 671_026_404_352 + 256 * 58
    # "11.5B unique parameters, excluding the shared 0.9B Embedding and 0.9B output Head" (README_WEIGHTS.md).
    assert count(both) - count(main) == 11_610_068_224
    assert count(with_copies) - count(both) == 2 * 129_280 * 7168
    assert {layout.name for layout in with_copies[len(both) :]} == {
        "model.layers.61.embed_tokens.weight",
        "model.layers.61.shared_head.head.weight",
    }


@pytest.mark.parametrize("family", sorted(TINY))
def test_a_checkpoint_that_transformers_writes_has_exactly_our_tensors(family: str, tmp_path: Any) -> None:
    import transformers

    # A copy: transformers writes into the rope scaling that it is given.
    config = transformers.AutoConfig.for_model(**copy.deepcopy(TINY[family]), vocab_size=61)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        theirs = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (not a dict)
    # Read from the config.json that transformers wrote, whose keys differ from ours.
    hf = json.loads((tmp_path / "config.json").read_text())
    ours = {layout.name: layout.shape for layout in hf_layouts(load_table(hf), dtype="bfloat16")}
    # transformers has no layers for multi-token prediction.
    assert {name: shape for name, shape in ours.items() if not name.startswith("model.layers.4.")} == theirs
    assert load_architecture(hf).megatron == load_architecture({**TINY[family], "vocab_size": 61}).megatron


@pytest.mark.parametrize("family", sorted(TINY))
def test_megatron_core_takes_the_config_as_it_is(family: str) -> None:
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    model = load_architecture({**TINY[family], "vocab_size": 61})
    config = (MLATransformerConfig if model.mla else TransformerConfig)(**model.megatron)
    assert {name: getattr(config, name) for name in model.megatron} == model.megatron


def test_deepseek_v3_in_megatrons_words() -> None:
    model = load_architecture(DEEPSEEK)
    assert (model.mla, model.vocab_size, model.rotary_base, model.tied) == (True, 61, 10000.0, False)
    wanted = {
        "hidden_size": 48,
        "ffn_hidden_size": 88,
        "moe_ffn_hidden_size": 56,
        "moe_shared_expert_intermediate_size": 112,
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
        "rope_type": "yarn",
        "rotary_scaling_factor": 4.0,
        "original_max_position_embeddings": 256,
        "mscale": 1.0,
        "mscale_all_dim": 0.75,
        "moe_router_dtype": "fp32",
    }
    assert {name: model.megatron[name] for name in wanted} == wanted


def test_qwen2_in_megatrons_words() -> None:
    model = load_architecture(QWEN2)
    assert (model.mla, model.rotary_base, model.rope_scaling, model.tied) == (False, 1000000.0, None, True)
    wanted = {
        "hidden_size": 80,
        "ffn_hidden_size": 136,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 20,  # 80 / 4
        "add_qkv_bias": True,
        "add_bias_linear": False,
        "qk_layernorm": False,
    }
    assert {name: model.megatron[name] for name in wanted} == wanted


def test_a_tied_model_may_hold_the_output_layer_and_has_one_tensor() -> None:
    for hf in (LLAMA, QWEN2, QWEN3):
        tied, untied = (load_table({**hf, "tie_word_embeddings": value}) for value in (True, False))
        assert (tied.aliases, untied.aliases) == ({"lm_head.weight": "model.embed_tokens.weight"}, {})
        names = [{layout.name for layout in hf_layouts(table, dtype="bfloat16")} for table in (tied, untied)]
        assert names[1] - names[0] == {"lm_head.weight"} and not names[0] - names[1]


def test_scaling_of_plain_attention_is_passed_on_in_full() -> None:
    assert load_architecture(LLAMA).rope_scaling == LLAMA["rope_scaling"]
    short = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    for rope in ({"rope_scaling": short}, {"rope_scaling": None, "rope_parameters": {**short, "rope_theta": 7e5}}):
        scaling = load_architecture({**QWEN2, **rope}).rope_scaling
        assert scaling is not None
        assert scaling == {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        }


def test_positions_without_scaling_are_plain() -> None:
    plain = load_architecture({**DEEPSEEK, "rope_scaling": None}).megatron
    assert (plain["rope_type"], plain["rotary_base"]) == ("rope", 10000.0)
    assert "mscale" not in plain
    new_style = {**DEEPSEEK, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert load_architecture(new_style).rotary_base == 5e5


def test_glm_rotates_half_of_each_head_unless_it_says_otherwise() -> None:
    assert load_architecture(GLM).rotary_percent == 0.5
    assert load_architecture({k: v for k, v in GLM.items() if k != "partial_rotary_factor"}).rotary_percent == 0.5
    new_style = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    assert load_architecture({**GLM, "rope_parameters": new_style}).rotary_percent == 0.25


def test_probabilities_that_are_not_renormalized_take_softmax_first() -> None:
    assert load_architecture(QWEN).megatron["moe_router_pre_softmax"] is False
    for chosen in (1, 3):
        plain = load_architecture({**QWEN, "norm_topk_prob": False, "num_experts_per_tok": chosen})
        assert plain.megatron["moe_router_pre_softmax"] is True
    qwen2 = {key: value for key, value in {**TINY["qwen2_moe"], "vocab_size": 61}.items() if key != "norm_topk_prob"}
    assert load_architecture(qwen2).megatron["moe_router_pre_softmax"] is True  # what transformers takes


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        (
            {"architectures": ["OPTForCausalLM"]},
            r"'OPTForCausalLM'.* Known: DeepseekV3ForCausalLM, .*Qwen3MoeFor.*Adding a model family",
        ),
        ({}, r"Architecture '\(none\)'"),
        ({"architectures": "LlamaForCausalLM"}, r"Architecture 'LlamaForCausalLM' in config.json is not known"),
        ({"architectures": 3}, r"Architecture 3 in config.json is not known"),
        (
            {**DEEPSEEK, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            r"quantized \(fp8\).*Convert it first: python tools/convert import",
        ),
        *(
            ({**DEEPSEEK, "quantization_config": other}, r"quantized \(.*blocks of 128 x 128 and nothing else\. Use")
            for other in ({"quant_method": "fp8"}, {"quant_method": "gptq", "bits": 4}, "awq")
        ),
        ({**QWEN3, "layer_types": ["full_attention", "sliding_attention"]}, r"layer_types of 'sliding_attention': "),
        ({**QWEN, "tie_word_embeddings": True}, r"tie_word_embeddings=True; for Qwen3MoeForCausalLM only False"),
        ({**QWEN, "mlp_only_layers": [2]}, r"mlp_only_layers=\[2\]"),
        ({**QWEN, "dual_chunk_attention_config": {"chunk_size": 8}}, r"dual_chunk_attention_config=.* only None"),
        ({key: value for key, value in DEEPSEEK.items() if key != "q_lora_rank"}, r"has no 'q_lora_rank'"),
        ({**LLAMA, "attention_bias": True}, r"attention_bias=True; for LlamaForCausalLM only False"),
        ({**LLAMA, "mlp_bias": True}, r"mlp_bias=True"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, r"partial_rotary_factor=0.5"),
        ({**LLAMA, "hidden_act": "gelu"}, r"hidden_act='gelu'"),
        ({**QWEN2, "use_sliding_window": True}, r"use_sliding_window=True"),
        ({**QWEN3, "attention_bias": True}, r"attention_bias=True"),
        ({**QWEN3, "head_dim": None}, r"has no 'head_dim'"),
    ],
)
def test_a_model_we_cannot_carry_is_refused(hf: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_table(hf)


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        ({**DEEPSEEK, "first_k_dense_replace": 4}, r"num_nextn_predict_layers=1 .* Set num_nextn_predict_layers to 0"),
        ({**DEEPSEEK, "num_experts_per_tok": 6}, r"best 3 experts.* by its best 2\. Set num_experts_per_tok to 4"),
        ({**DEEPSEEK, "n_group": 5}, r"num_experts_per_tok=4 in topk_group=2 of n_group=5 .*experts=12"),
        ({**DEEPSEEK, "n_group": 5, "topk_group": 5}, r"topk_group=5 of n_group=5 .*divisor of n_routed_experts"),
        ({**DEEPSEEK, "topk_group": 8, "num_experts_per_tok": 16}, r"topk_group=8 of n_group=4.* at most n_group"),
        ({**DEEPSEEK, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 13}, r"num_experts_per_tok=13 in .*enough"),
        ({**DEEPSEEK, "n_group": 12, "topk_group": 4}, r"n_group=12 .*best two experts.*each group has at least 2"),
        ({**DEEPSEEK, "qk_rope_head_dim": 7}, r"7 of a head's 7 rows rotated: they are rotated in pairs"),
        ({**DEEPSEEK, "v_head_dim": 25}, r"v_head_dim=25, more than the 24 of .*would cut these"),
        ({**QWEN, "head_dim": 15}, r"15 of a head's 15 rows rotated"),
        ({**GLM, "partial_rotary_factor": 0.3}, r"7 of a head's 24 rows rotated"),
        ({**GLM, "partial_rotary_factor": 5}, r"120 of a head's 24 rows rotated"),
        ({**QWEN, "num_key_value_heads": 5}, r"num_attention_heads=12 and num_key_value_heads=5: .*a divisor of"),
        ({**QWEN, "num_experts_per_tok": 9}, r"num_experts_per_tok=9 of 8 experts: .* at most 8"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, r"num_experts_per_tok=9 of 8 experts"),
        *(
            ({**hf, "num_experts_per_tok": 1}, r"num_experts_per_tok=1, and .* add up to 1: .*megatron-core takes the")
            for hf in (QWEN, MIXTRAL, GLM, {**DEEPSEEK, "n_group": 1, "topk_group": 1})
        ),
        ({**DEEPSEEK, "rope_scaling": {**YARN, "mscale_all_dim": 0}}, r"mscale_all_dim of rope_scaling=0, where"),
        ({**DEEPSEEK, "rope_scaling": {**YARN, "attention_factor": 1.0}}, r"attention_factor.*Write it in full"),
        ({**DEEPSEEK, "rope_scaling": {**YARN, "type": "longrope"}}, r"rope_type='longrope' is not supported"),
        ({**QWEN, "rope_scaling": YARN}, r"mscale.*; supported is \['beta_fast', .* Write it in full"),
        (
            {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}},
            r"rope_type='linear'; Llama.* llama3, yarn or none",
        ),
        ({**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"\['factor', 'rope_type'\]; supported is"),
        (
            {**QWEN3, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            r"'original_max_position_embeddings', 'rope_type'",
        ),
        ({**QWEN2, "rope_parameters": {"rope_theta": 1e6, "mrope_section": [2]}}, r"\['mrope_section'\]; supported is"),
        ({k: v for k, v in QWEN.items() if k != "rope_theta"}, r"no rope_theta"),
        ({**MIXTRAL, "sliding_window": 1023}, r"sliding_window=1023: neither"),
        ({**MIXTRAL, "head_dim": 8}, r"head_dim=8: SGLang's MixtralForCausalLM takes hidden_size"),
        ({**MIXTRAL, "hidden_size": 70}, r"hidden_size=70 is no multiple of num_attention_heads=12.* Add head_dim"),
        (
            {**MIXTRAL, "num_attention_heads": 0},
            r"num_attention_heads=0: a size is a whole number of at least 1",
        ),
    ],
)
def test_a_model_that_megatron_would_compute_otherwise_is_refused(hf: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_architecture(hf)
