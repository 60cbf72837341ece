"""Plain PyTorch layers that stand in for Transformer Engine's on a machine without CUDA.

They have Transformer Engine's parameter names and sharding, so one spec, one layout table and one checkpoint format
serve both devices.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import mla_qk_norm_config, multi_latent_attention
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor

from megatron_rl.trainer.attention import SdpaAttention


def _norm_weight(size: int, config: TransformerConfig) -> torch.nn.Parameter:
    assert config.normalization == "RMSNorm" and not config.layernorm_zero_centered_gamma, config.normalization
    weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))
    # Under sequence parallelism each rank sees its own tokens: megatron sums marked gradients over the group.
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return weight


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dim."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__()
        self.eps = eps
        self.weight = _norm_weight(hidden_size, config)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """A norm, then a linear cut by its output rows: TELayerNormColumnParallelLinear."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any):
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = _norm_weight(input_size, config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        x = F.rms_norm(x, self.layer_norm_weight.shape, self.layer_norm_weight, self.config.layernorm_epsilon)
        return super().forward(x)


class DuplicatedLinear(torch.nn.Module):
    """A linear held whole by every tensor-parallel rank: TELinear with parallel_mode="duplicated" (MLA's way down).

    megatron's own local spec cuts these and gathers; its backward then loses the other ranks' share of the gradient.
    """

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, init_method: Callable, **kwargs: Any
    ):
        super().__init__()
        assert not kwargs["bias"] and kwargs["parallel_mode"] == "duplicated", kwargs
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        if config.perform_initialization:
            init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        assert metadata is not None
        state = self.state_dict(prefix="", keep_vars=True)
        group = parallel_state.get_tensor_model_parallel_group()  # its ranks hold replicas
        return make_sharded_tensors_for_checkpoint(
            state, prefix, {}, sharded_offsets, tp_group=group, dp_cp_group=metadata["dp_cp_group"]
        )


class _GroupedMatmul(torch.autograd.Function):
    """Rows of x, in runs of `sizes`, each run times its own weight [out, in]; one node of the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int], *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.sizes = sizes
        out = x.new_empty(x.shape[0], weights[0].shape[0])
        for rows, result, weight in zip(x.split(sizes), out.split(sizes), weights, strict=True):
            torch.mm(rows, weight.t(), out=result)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        grad_weights = []
        for rows, grad_rows, result, weight in zip(
            x.split(ctx.sizes), grad.split(ctx.sizes), grad_x.split(ctx.sizes), weights, strict=True
        ):
            torch.mm(grad_rows, weight, out=result)
            grad_weights.append(grad_rows.t() @ rows)
        return grad_x, None, *grad_weights


class GroupedLinear(torch.nn.Module):
    """The same linear of every local expert, weight0, weight1, ...: TEGroupedLinear. Exchange is the dispatcher's."""

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable,
        bias: bool,
        pg_collection: ProcessGroupCollection,
        cut_dim: int,
        **_: Any,
    ):
        super().__init__()
        assert not bias, "experts with biases"
        self.num_gemms, self.cut_dim, self.groups = num_gemms, cut_dim, pg_collection
        shape = [output_size, input_size]
        parts = get_pg_size(pg_collection.expt_tp)
        assert shape[cut_dim] % parts == 0, (shape, cut_dim, parts)
        shape[cut_dim] //= parts
        own_groups = (
            config.expert_model_parallel_size > 1
            or config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        )
        for i in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            if config.perform_initialization:
                init_method(weight)
            weight.allreduce = not own_groups  # type: ignore[attr-defined]
            weight.tensor_model_parallel = True  # type: ignore[attr-defined]
            weight.partition_dim, weight.partition_stride = cut_dim, 1  # type: ignore[attr-defined]
            self.register_parameter(f"weight{i}", weight)

    def forward(self, x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, None]:
        return _GroupedMatmul.apply(x, sizes, *(getattr(self, f"weight{i}") for i in range(self.num_gemms))), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        assert metadata is not None
        first, total = get_pg_rank(self.groups.ep) * self.num_gemms, get_pg_size(self.groups.ep) * self.num_gemms
        out = {}
        for i in range(self.num_gemms):
            part = make_sharded_tensors_for_checkpoint(
                {f"{i}.weight": getattr(self, f"weight{i}")},
                "",
                {f"{i}.weight": self.cut_dim},
                (*sharded_offsets, (len(sharded_offsets), first + i, total)),
                tp_group=self.groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(part, f"{i}.", prefix)
            tensor = part[f"{i}.weight"]
            tensor.replica_id = (*tensor.replica_id[:2], get_pg_rank(self.groups.expt_dp))
            out[f"{prefix}weight{i}"] = tensor
        return out


class Backend(LocalSpecProvider):
    """The layers above, for megatron's Transformer Engine spec."""

    def linear(self) -> type:
        return DuplicatedLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return LayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        return RMSNorm

    def core_attention(self) -> type:
        return SdpaAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> partial:
        modules = GroupedMLPSubmodules(
            linear_fc1=partial(GroupedLinear, cut_dim=0), linear_fc2=partial(GroupedLinear, cut_dim=1)
        )
        return partial(TEGroupedMLP, submodules=modules)


def install() -> None:
    """Put the layers above where megatron's Transformer Engine spec looks for its own."""
    gpt_layer_specs.TESpecProvider = Backend
    gpt_layer_specs.TENorm = RMSNorm
    mla_qk_norm_config.get_backend = lambda _: Backend()
    multi_latent_attention.TELinear = DuplicatedLinear
