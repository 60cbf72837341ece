"""The config that reaches megatron, and what is refused on the way."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_rl.config_loading import load_config
from megatron_rl.errors import ConfigError
from megatron_rl.megatron_options import field_names
from megatron_rl.models import load_architecture
from megatron_rl.trainer.build import transformer_config
from tests.test_experiments import MODELS
from tests.tiny import PUBLISHED, TINY
from tests.trainer.ranks import run_ranks
from tests.trainer.setup import make_config, start, write_checkpoint


def build(options: dict[str, Any], *, has_cuda: bool = False, parallel: dict | None = None) -> Any:
    config = make_config(parallel, megatron=options)
    architecture = load_architecture({**TINY["deepseek_v3"], "vocab_size": 61})
    return transformer_config(architecture, config.parallel, config.trainer, has_cuda=has_cuda)


@pytest.mark.parametrize(("cls", "mla"), [(TransformerConfig, False), (MLATransformerConfig, True)])
def test_fields_read_from_the_source_are_those_that_megatron_takes(cls: Any, mla: bool) -> None:
    assert set(field_names(mla=mla)) == {f.name for f in dataclasses.fields(cls) if f.init}


def test_unknown_megatron_option_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.megatron\.moe_aux_los_coeff.*Did you mean 'moe_aux_loss_coeff'"):
        build({"moe_aux_los_coeff": 0.1})


@pytest.mark.parametrize("name", ["hidden_size", "tensor_model_parallel_size", "bf16", "window_size"])
def test_megatron_option_that_is_set_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"trainer\.megatron\.{name} is already set"):
        build({name: 1})


def test_megatron_option_is_passed_on() -> None:
    assert build({"moe_router_bias_update_rate": 0.01}).moe_router_bias_update_rate == 0.01
    assert build({}).moe_router_bias_update_rate == 0.0  # megatron's own default would move biases without a reward


def test_what_megatron_refuses_is_a_config_error_in_its_words() -> None:
    with pytest.raises(ConfigError, match="megatron-core refuses this configuration: .*recompute"):
        build({"recompute_granularity": "some"})


@pytest.mark.parametrize("experiment", sorted(MODELS))
def test_the_options_of_shipped_experiments_are_taken_by_megatron(experiment: str) -> None:
    config = load_config([f"experiment={experiment}", "model.path=unused", "data.path=unused"])
    options = dict(config.trainer.megatron)
    assert options.pop("moe_permute_fusion")  # asks for Transformer Engine, which is not here
    trainer = dataclasses.replace(config.trainer, megatron=options)

    built = transformer_config(
        load_architecture(PUBLISHED[MODELS[experiment]]), config.parallel, trainer, has_cuda=True
    )

    assert (built.recompute_granularity, built.recompute_num_layers, built.moe_router_dtype) == ("full", 1, "fp32")


def test_devices_differ_in_grouped_experts_and_fusions_only() -> None:
    on_cpu, on_gpu = vars(build({})), vars(build({}, has_cuda=True))
    differ = {name for name in on_cpu if on_cpu[name] != on_gpu[name] and not callable(on_cpu[name])}
    assert differ <= {
        "use_cpu_initialization",
        "moe_grouped_gemm",
        "gradient_accumulation_fusion",
        "persist_layer_norm",
        "masked_softmax_fusion",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "apply_rope_fusion",
        "moe_permute_fusion",
    }


def names_and_shapes(rank: int, directory: str, config: Any, meeting: str) -> Any:
    worker = start(rank, config, directory, meeting)
    return worker.megatron, {name: tuple(t.shape) for name, t in worker.tensors.items()}


def test_down_projections_of_mla_are_whole_on_every_tensor_parallel_rank(tmp_path: Path) -> None:
    """Cut, as megatron's local spec has them, their gradients would lack the other ranks' share; see test_parity."""
    directory = write_checkpoint(tmp_path / "hf", "deepseek_v3")
    config = make_config({"tp": 2, "sp": True}, world_size=2)
    hf = TINY["deepseek_v3"]
    for _, shapes in run_ranks(2, names_and_shapes, directory, config, f"file://{tmp_path}/meeting"):
        attention = "0:decoder.layers.0.self_attention."
        assert shapes[f"{attention}linear_q_down_proj.weight"] == (hf["q_lora_rank"], hf["hidden_size"])
        rows = hf["kv_lora_rank"] + hf["qk_rope_head_dim"]
        assert shapes[f"{attention}linear_kv_down_proj.weight"] == (rows, hf["hidden_size"])


def test_interleaved_pipeline_sends_unbatched_and_cannot_be_told_otherwise() -> None:
    """Batched, gradients reach the wrong chunk without an error; see test_parity's pp2_vpp2."""
    config = make_config({"pp": 2, "vpp": 2}, world_size=2)
    architecture = load_architecture({**TINY["qwen3_moe"], "vocab_size": 61})
    built = transformer_config(architecture, config.parallel, config.trainer, has_cuda=False)
    assert built.overlap_p2p_comm and not built.batch_p2p_comm
    with pytest.raises(ConfigError, match=r"batch_p2p_comm is already set"):
        build({"batch_p2p_comm": True}, parallel={"pp": 2, "vpp": 2})
