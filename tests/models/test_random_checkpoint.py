"""The random checkpoint: transformers loads it whole, and its tokenizer gives text back."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.errors import ConfigError
from megatron_rl.models.random_checkpoint import write_random_checkpoint
from tests.tiny import CHARACTERS, TINY


@pytest.mark.parametrize("family", sorted(TINY))
def test_transformers_loads_every_weight_and_computes(family: str, tmp_path: Path) -> None:
    import transformers

    write_random_checkpoint(tmp_path, TINY[family], characters=CHARACTERS, seed=0)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    # transformers has no layers for multi-token prediction.
    unexpected = report.pop("unexpected_keys")
    assert all(name.startswith("model.layers.4.") for name in unexpected)
    assert bool(unexpected) == bool(TINY[family].get("num_nextn_predict_layers"))
    assert not any(report.values()), report
    assert model.config.vocab_size == 61
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6, 7]])).logits
    assert logits.shape == (1, 3, 61)
    assert logits.isfinite().all()


def test_text_comes_back_from_the_tokenizer_one_token_a_character(tmp_path: Path) -> None:
    import transformers

    write_random_checkpoint(tmp_path, TINY["qwen3_moe"], characters=CHARACTERS, seed=0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "  spell  it: 'a b'\n(3+4)*2 = 14?\n"
    tokens = tokenizer(text).input_ids
    assert len(tokens) == len(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode([*tokens, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert tokenizer("É").input_ids == [tokenizer.unk_token_id]
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"]) == (tokenizer.eos_token_id, tokenizer.pad_token_id)


def test_weights_follow_the_seed_and_keep_their_dtypes(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_random_checkpoint(tmp_path / name, TINY["deepseek_v3"], characters="ab", seed=seed, jitter=0.1)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not any(torch.equal(a[name], c[name]) for name in a)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert {name: t.dtype for name, t in a.items() if "gate.e_score" not in name} == dict.fromkeys(
        (name for name in a if "gate.e_score" not in name), torch.bfloat16
    )
    assert a[bias].dtype == torch.float32


def test_a_config_without_initializer_range_gets_that_of_transformers(tmp_path: Path) -> None:
    config = {key: value for key, value in TINY["qwen3_moe"].items() if key != "initializer_range"}
    write_random_checkpoint(tmp_path, config, characters="ab", seed=0)
    std = load_file(tmp_path / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"].float().std().item()
    assert std == pytest.approx(0.02, abs=0.0007)  # 192 x 56 draws: 5 standard errors of 0.02 / sqrt(2 * 10752)


def test_without_jitter_norms_are_one_and_router_biases_zero(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, TINY["deepseek_v3"], characters="ab", seed=0)
    weights = load_file(tmp_path / "model.safetensors")
    assert (weights["model.norm.weight"] == 1).all()
    assert (weights["model.layers.3.mlp.gate.e_score_correction_bias"] == 0).all()
    # Standard deviation of 48 x 88 draws with std 0.05: within 5 standard errors, 0.05 / sqrt(2 * 4224) each.
    assert weights["model.layers.0.mlp.up_proj.weight"].float().std().item() == pytest.approx(0.05, abs=0.0028)


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocab_size=10 is smaller than the tokenizer's 61 tokens"):
        write_random_checkpoint(tmp_path, {**TINY["qwen3_moe"], "vocab_size": 10}, characters=CHARACTERS, seed=0)
