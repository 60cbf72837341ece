"""Builds the model of one rank: megatron's config from the family's, the spec of the device, and its DDP wrapping."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_rl.config import ParallelConfig, TrainerConfig
from megatron_rl.errors import ConfigError
from megatron_rl.layouts.megatron_topology import MegatronTopology
from megatron_rl.megatron_options import set_elsewhere, wrong_options
from megatron_rl.models import Architecture
from megatron_rl.trainer import attention, cpu, local_spec, rope
from megatron_rl.trainer.model import Gpt, layer_specs

FIXED: dict[str, Any] = {
    "activation_func": F.silu,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    # Sums over tokens, divided by the token count of the whole mini-batch at the end.
    "calculate_per_token_loss": True,
    # Every weight is read from the checkpoint.
    "perform_initialization": False,
    "moe_token_dispatcher_type": "alltoall",
    # No family here has them, and the engine would compute without.
    "window_size": None,
    "softmax_type": "vanilla",
    "layernorm_zero_centered_gamma": False,
}
DEFAULTS: dict[str, Any] = {
    # Balancing is for pretraining: here it would move routers and biases without a reward.
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_router_bias_update_rate": 0.0,
}
"""May be changed by trainer.megatron."""
ON_CPU: dict[str, Any] = {
    "use_cpu_initialization": True,
    "moe_grouped_gemm": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "moe_permute_fusion": False,
}
ON_GPU: dict[str, Any] = {"moe_grouped_gemm": True}
"""May be changed by trainer.megatron: recomputation, fusions and the like are the user's choice there."""


def transformer_config(
    model: Architecture, parallel: ParallelConfig, trainer: TrainerConfig, *, has_cuda: bool
) -> TransformerConfig:
    """megatron's config of this model on these ranks. Raises: ConfigError when megatron or we refuse a value."""
    # checks.py refuses it: megatron's experts need it, and MLA's gradients would be wrong without.
    assert parallel.tp == 1 or parallel.sp, parallel
    dtype = getattr(torch, trainer.dtype)
    taken: dict[str, Any] = {
        **model.megatron,
        **FIXED,
        **({} if has_cuda else ON_CPU),
        "tensor_model_parallel_size": parallel.tp,
        "sequence_parallel": parallel.sp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp,
        "num_layers_in_first_pipeline_stage": parallel.first_stage_layers,
        "num_layers_in_last_pipeline_stage": parallel.last_stage_layers,
        "account_for_embedding_in_pipeline_split": parallel.account_for_embedding,
        "account_for_loss_in_pipeline_split": parallel.account_for_loss,
        "pipeline_model_parallel_layout": parallel.pipeline_layout,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
    }
    if parallel.vpp is not None:
        # With batched sends and interleaved chunks, gradients arrive at the wrong chunk, silently.
        taken |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    owners = set_elsewhere(model.megatron, parallel) | (
        {} if has_cuda else dict.fromkeys(ON_CPU, "the CPU's own set-up")
    )
    assert owners.keys() == taken.keys(), owners.keys() ^ taken.keys()
    for problem in wrong_options(trainer.megatron, owners, mla=model.mla):
        raise ConfigError(problem)
    cls = MLATransformerConfig if model.mla else TransformerConfig
    values = {**DEFAULTS, **(ON_GPU if has_cuda else {}), **trainer.megatron, **taken}
    try:
        config = cls(**values)
    except (ValueError, AssertionError, TypeError) as error:
        raise ConfigError(
            f"megatron-core refuses this configuration: {error}. Change trainer.megatron or parallel.*."
        ) from error
    rope.configure(config, model.rope_scaling)
    return config


def start_megatron(model: Architecture, parallel: ParallelConfig, topology: MegatronTopology, *, seed: int) -> bool:
    """Make this process, already in torch's process group, one of megatron's ranks. Returns: whether it has a GPU."""
    has_cuda = not cpu.install()
    if not has_cuda:
        local_spec.install()
        attention.install()
    chunks = {stage: topology.chunks(stage * topology.world_size // topology.pp) for stage in range(topology.pp)}
    # Their gradients are added up. By default megatron takes the first and last stage, and with multi-token prediction
    # would then add up the embedding's and the output layer's.
    with_embedding = [
        stage for stage, held in chunks.items() if any(c.has_embedding or (model.tied and c.has_head) for c in held)
    ]
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        get_embedding_ranks=lambda stages: [stages[i] for i in with_embedding],
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return has_cuda


def build_chunks(
    model: Architecture, config: TransformerConfig, topology: MegatronTopology, *, distributed_optimizer: bool
) -> list[DistributedDataParallel]:
    """This rank's model, one chunk per virtual pipeline stage, in DDP. Weights are not set yet."""
    vpp = config.virtual_pipeline_model_parallel_size
    chunks = []
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer, bucket_size=None
    )
    for i in range(vpp or 1):
        chunk = build_chunk(model, config, topology, vp_stage=None if vpp is None else i)
        chunk.cuda()
        chunks.append(DistributedDataParallel(config, ddp, chunk, disable_bucketing=i > 0))
    config.finalize_model_grads_func = finalize_model_grads
    return chunks


def build_chunk(
    model: Architecture, config: TransformerConfig, topology: MegatronTopology, *, vp_stage: int | None
) -> Gpt:
    """One virtual pipeline chunk of this rank's model, without DDP. Weights are not set."""
    place = {} if vp_stage is None else {"ignore_virtual": False, "vp_stage": vp_stage}
    chunk = Gpt(
        config,
        **layer_specs(config, vp_stage=vp_stage),
        vocab_size=topology.padded_vocab(model.vocab_size),
        max_sequence_length=model.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        parallel_output=True,
        share_embeddings_and_output_weights=model.tied,
        position_embedding_type=rope.embedding_type(model.rope_scaling),
        rotary_base=model.rotary_base,
        rotary_percent=model.rotary_percent,
        vp_stage=vp_stage,
    )
    rope.scale(chunk, model.rope_scaling)
    return chunk
