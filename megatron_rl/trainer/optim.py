"""AdamW and its schedule through megatron, and a step that refuses what is not a number."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.config import OptimizerConfig
from megatron_rl.errors import BackendError, ConfigError


def build(
    chunks: Sequence[torch.nn.Module],
    settings: OptimizerConfig,
    model: TransformerConfig,
    *,
    steps: int,
    distributed: bool,
) -> tuple[Any, OptimizerParamScheduler]:
    """Fresh optimizer and learning-rate schedule over `steps` optimizer steps.

    Raises: ConfigError when the warm-up is as long as the phase.
    """
    if 0 < steps <= settings.warmup_steps:
        raise ConfigError(
            f"warmup_steps={settings.warmup_steps} of a phase of {steps} optimizer steps leaves none at the full "
            f"learning rate. Set it below {steps}."
        )
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            bf16=model.bf16,
            params_dtype=model.params_dtype,
            use_distributed_optimizer=distributed,
        ),
        list(chunks),
        use_gloo_process_groups=False,
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps if steps else 0,  # steps=0 evaluates and exports
        lr_decay_steps=max(steps, 1),
        lr_decay_style=settings.decay,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=max(steps, 1),
        wd_incr_style="constant",
        # Of a resumed run: a lower rate is the mend of a diverged one, more steps make a longer decay.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    return optimizer, scheduler


def learning_rate(optimizer: Any) -> float:
    """Of the last optimizer step."""
    return float(get_canonical_lr_for_logging(optimizer.param_groups))


def optimizer_step(optimizer: Any, scheduler: OptimizerParamScheduler, *, loss: float, update: int) -> float:
    """Clip, and step; every rank decides alike. Returns the gradient norm before clipping.

    Raises: BackendError when the loss or the norm is not finite; no weight has changed then.
    """
    if not math.isfinite(loss):
        raise BackendError(_not_finite("loss", loss, update))
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        raise BackendError(_not_finite("gradient norm", norm, update))
    scheduler.step(1)  # first: the rate of step k is the schedule's k-th, and a warm-up does not begin with 0
    ok, norm, _ = optimizer.step()
    assert ok, "megatron skipped an update that has a finite gradient"
    return float(norm)


def _not_finite(what: str, value: float, update: int) -> str:
    return (
        f"The {what} of optimizer step {update} is {value}: the step was refused and no weight was changed. Lower the "
        "learning rate or clip_grad, or use trainer.dtype=float32; resume from the last checkpoint."
    )
