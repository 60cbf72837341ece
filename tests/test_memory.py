"""Bytes of one rank, worked out by hand from the sizes that published models have."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.checks import check, engine_of, topology_of
from megatron_rl.config import Config
from megatron_rl.config_loading import load_config
from megatron_rl.errors import ConfigError
from megatron_rl.memory import Use, states, uses
from megatron_rl.models import load_architecture, load_table
from tests.tiny import PUBLISHED, TINY

BASE = ["experiment=cpu_digits", "trainer.dtype=bfloat16", "rollout.dtype=bfloat16", "model=hf", "model.path=unused"]
FULL = "trainer.megatron={recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}"


def measure(hf: dict[str, Any], *overrides: str) -> dict[str, Use]:
    config = load_config([*BASE, *overrides])
    table, architecture = load_table(hf), load_architecture(hf)
    trainer, engine = topology_of(config, table), engine_of(config)
    return uses(config, table, architecture.megatron, trainer=trainer, engine=engine)


def test_states_of_a_trainer_rank_of_qwen3_30b_by_hand() -> None:
    hidden, expert, layers, vocab = 2048, 768, 48, 151936
    # tp=2: half of attention and of both vocabularies; ep=4: 32 of 128 experts; norms and routers whole.
    attention = (32 * 128 * hidden + 2 * 4 * 128 * hidden + hidden * 32 * 128) // 2
    dense = layers * (attention + 2 * hidden + 2 * 128 + 128 * hidden) + hidden + 2 * vocab * hidden // 2
    experts = layers * 32 * 3 * expert * hidden

    sizes = ["trainer.world_size=8", "parallel.tp=2", "parallel.sp=true", "parallel.ep=4"]
    use = measure(PUBLISHED["qwen3_30b_a3b"], *sizes)["trainer, stage 0"]

    assert use["weights"] == 2 * (dense + experts)
    assert use["gradients"] == 4 * (dense + experts)
    # Shared out over the 4 ranks that hold the same half, and the 2 that hold the same experts.
    assert use["optimizer"] == 12 * dense // 4 + 12 * experts // 2


def test_an_optimizer_that_is_not_distributed_is_whole_on_every_rank_and_float32_needs_no_second_copy() -> None:
    hf = {**TINY["qwen3"], "vocab_size": 61}
    sizes = ["trainer.world_size=4", "parallel.ep=1"]
    shared, whole, single = (
        measure(hf, *sizes, *more)["trainer, stage 0"]
        for more in ([], ["trainer.distributed_optimizer=false"], ["trainer.dtype=float32"])
    )

    assert whole["optimizer"] == pytest.approx(4 * shared["optimizer"], rel=1e-3)  # rounded up to whole elements
    assert single["optimizer"] == pytest.approx(shared["optimizer"] * 8 / 12, rel=1e-3)
    assert single["weights"] == 2 * shared["weights"] and single["gradients"] == shared["gradients"]


def test_prediction_layers_are_weights_and_nothing_else() -> None:
    hf = {**TINY["deepseek_v3"], "vocab_size": 61}
    carried, without = (
        measure({**hf, "num_nextn_predict_layers": n}, "parallel.ep=1", "trainer.world_size=1")["trainer, stage 0"]
        for n in (1, 0)
    )

    assert carried["weights"] > without["weights"]
    assert (carried["gradients"], carried["optimizer"]) == (without["gradients"], without["optimizer"])


def test_recomputed_layers_keep_their_input_for_each_micro_batch_in_flight() -> None:
    hf, hidden, tokens = PUBLISHED["qwen3_30b_a3b"], 2048, 4096
    sizes = ["parallel.pp=4", "trainer.world_size=8", "parallel.tp=2", "parallel.sp=true", "parallel.ep=2", FULL]
    found = measure(hf, *sizes, f"trainer.tokens_per_micro_batch={tokens}")

    kept = [found[f"trainer, stage {i}"]["activations"] for i in range(4)]
    # Each earlier stage has one more micro-batch in flight: 12 layers' inputs of tokens / 2 in bfloat16.
    assert {a - b for a, b in zip(kept, kept[1:], strict=False)} == {12 * tokens // 2 * hidden * 2}
    # Themselves and their gradient in bfloat16; 3 float32 of a chunk of 2^26.
    assert found["trainer, stage 3"]["logits"] == 4 * tokens * 151936 // 2 + 12 * 2**26
    assert not any(found[f"trainer, stage {i}"]["logits"] for i in range(3))


def test_recomputing_nothing_keeps_more() -> None:
    hf = PUBLISHED["qwen3_30b_a3b"]
    few, all_ = (measure(hf, "parallel.ep=2", *more)["trainer, stage 0"]["activations"] for more in ([FULL], []))

    assert all_ > 5 * few


@pytest.mark.parametrize(
    ("model", "overrides", "per_token"),
    [
        ("qwen3_30b_a3b", ["rollout.tp=2"], 48 * 2 * 2 * 128 * 2),  # 2 of 4 key-value heads, keys and values
        ("qwen3_30b_a3b", ["rollout.tp=8"], 48 * 2 * 1 * 128 * 2),  # neighbours hold the same head
        ("qwen3_30b_a3b", ["rollout.tp=8", "rollout.dp_attention=4"], 48 * 2 * 2 * 128 * 2),
        ("deepseek_v3", ["rollout.tp=16"], 61 * (512 + 64) * 2),  # latent: whole on every rank
        ("deepseek_v3", ["rollout.tp=16", "++rollout.sglang.kv_cache_dtype=fp8_e4m3"], 61 * (512 + 64)),
    ],
)
def test_kv_cache_by_hand(model: str, overrides: list[str], per_token: int) -> None:
    sizes = ["rollout.max_total_tokens=1000", "trainer.world_size=2"]

    assert measure(PUBLISHED[model], *sizes, *overrides)["engine"]["KV cache"] == 1000 * per_token


def test_an_engine_of_deepseek_v3_holds_its_way_up_twice() -> None:
    use = measure(PUBLISHED["deepseek_v3"], "rollout.tp=32", "rollout.ep=32", "trainer.world_size=2")["engine"]

    # 43.9 GB of parameters (by hand in tests/resharding/test_scale.py) and w_kc, w_vc: 4 of 128 heads.
    assert use["weights"] == pytest.approx(43.9e9 + 61 * 4 * (128 + 128) * 512 * 2, rel=2e-3)


def test_an_engine_in_fp8_holds_half_of_its_linears_and_their_scales() -> None:
    hidden, expert, layers, vocab = 2048, 768, 48, 151936
    linears = layers * (2 * (32 + 4) * 128 * hidden + 128 * 3 * expert * hidden)
    rest = layers * (2 * hidden + 2 * 128 + 128 * hidden) + hidden + 2 * vocab * hidden

    use = measure(PUBLISHED["qwen3_30b_a3b"], "rollout.fp8=true", "trainer.world_size=2")["engine"]

    assert use["weights"] == linears + linears // 128**2 * 4 + 2 * rest


@pytest.mark.parametrize("family", sorted(TINY))
def test_every_family_can_be_measured(family: str) -> None:
    found = measure({**TINY[family], "vocab_size": 61}, "parallel.ep=1", "trainer.world_size=1")

    assert set(found) == {"trainer, stage 0", "engine"}
    for use in found.values():
        assert min(use.values()) >= 0 and use["weights"] > 1e5
    trainer = found["trainer, stage 0"]
    assert 6 < states(trainer) / trainer["weights"] <= 9  # less for what is carried and not trained


def config_of(directory: Path, *overrides: str) -> Config:
    (directory / "config.json").write_text(json.dumps(PUBLISHED["qwen3_30b_a3b"]))
    (directory / "model.safetensors").touch()
    return load_config([*BASE, f"model.path={directory}", *overrides])


def test_what_cannot_fit_is_refused_with_its_parts(tmp_path: Path) -> None:
    wide = ["trainer.world_size=4", "parallel.ep=4", "rollout.tp=4"]

    check(config_of(tmp_path, *wide, "cluster=8xh200"))
    with pytest.raises(
        ConfigError, match=r"trainer, stage 0: weights 1\d\.\d, gradients .* which has cluster\.gpu_gb=85: "
    ):
        check(config_of(tmp_path, *wide, "cluster=8xh100"))
    with pytest.raises(ConfigError, match=r"engine: weights 15\.\d, KV cache 2\d\d.*lower rollout\.max_total_tokens"):
        check(config_of(tmp_path, *wide, "cluster=8xh200", "rollout.max_total_tokens=10000000"))
