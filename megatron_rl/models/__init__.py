"""Model families: HF config -> Megatron config and layout table. One file and one line here per family."""

from megatron_rl.errors import ConfigError
from megatron_rl.layouts.table import Table
from megatron_rl.models import deepseek_v3, glm4_moe, llama, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe
from megatron_rl.models.family import Architecture, Family, HfConfig, refuse, refuse_quantized, refuse_sizes

__all__ = ["FAMILIES", "Architecture", "Family", "find_family", "load_architecture", "load_table"]

FAMILIES: dict[str, Family] = {
    "DeepseekV3ForCausalLM": deepseek_v3.FAMILY,
    "Glm4MoeForCausalLM": glm4_moe.FAMILY,
    "LlamaForCausalLM": llama.FAMILY,
    "MixtralForCausalLM": mixtral.FAMILY,
    "Qwen2ForCausalLM": qwen2.FAMILY,
    "Qwen2MoeForCausalLM": qwen2_moe.FAMILY,
    "Qwen3ForCausalLM": qwen3.FAMILY,
    "Qwen3MoeForCausalLM": qwen3_moe.FAMILY,
}


def find_family(hf_config: HfConfig) -> Family:
    """The family of config.json's first architecture.

    Raises: ConfigError when it is unknown, quantized, or has a value that the family does not support.
    """
    names = hf_config.get("architectures") or ["(none)"]
    name = names[0] if isinstance(names, list) else names
    if not isinstance(names, list) or name not in FAMILIES:
        raise ConfigError(
            f"Architecture {name!r} in config.json is not known. Known: {', '.join(sorted(FAMILIES))}. "
            'CONTRIBUTING.md says how to add one: "Adding a model family".'
        )
    if quantization := hf_config.get("quantization_config"):
        refuse_quantized(quantization)
    if others := set(hf_config.get("layer_types") or ()) - {"full_attention"}:
        raise ConfigError(
            f"config.json has layer_types of {', '.join(map(repr, sorted(others)))}: neither the trainer nor SGLang's "
            f"{name} has other layers than 'full_attention'. Use a checkpoint that has no others."
        )
    family = FAMILIES[name]
    refuse(hf_config, family.supported)
    return family


def load_table(hf_config: HfConfig) -> Table:
    """Every tensor of the model, on every side."""
    return find_family(hf_config).table(hf_config)


def load_architecture(hf_config: HfConfig) -> Architecture:
    """The model in megatron-core's words.

    Raises: ConfigError when megatron-core would compute something else, or nobody could compute anything.
    """
    model = find_family(hf_config).architecture(hf_config)
    refuse_sizes(model)
    return model
