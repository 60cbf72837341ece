"""The shortest honest training step on megatron-core: what `Worker.update` is measured against.

Same model, same packed micro-batches, megatron's own schedule, cross entropy and optimizer; no rollouts, no log-probs,
no metrics.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_rl.trainer.micro_batch import MicroBatch
from megatron_rl.trainer.worker import Worker


def with_labels(batch: MicroBatch) -> tuple[MicroBatch, Tensor, Tensor]:
    """(micro-batch, labels [1, T], mask [T]): what a pretraining data loader would have made."""
    labels, mask = torch.zeros_like(batch.tokens_1T), torch.zeros(batch.tokens_1T.shape[1])
    labels[0, batch.index_N], mask[batch.index_N] = batch.targets_N, 1.0
    return batch, labels, mask


def bare_update(worker: Worker, batches: Sequence[tuple[MicroBatch, Tensor, Tensor]]) -> float:
    """One optimizer step on one pipeline stage. Returns the gradient norm."""

    def loss(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total = (losses[0].float() * mask).sum()
        return total, mask.sum().int(), {"loss": total.detach()}

    def forward_step(iterator: Iterator[Any], model: torch.nn.Module) -> Any:
        batch, labels, mask = next(iterator)
        args = (batch.tokens_1T, batch.positions_1T, None)
        return model(*args, labels=labels, packed_seq_params=batch.sequences), partial(loss, mask)

    (model,) = worker.chunks
    model.zero_grad_buffer()
    worker.optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=model,
        num_microbatches=len(batches),
        seq_length=batches[0][1].shape[1],
        micro_batch_size=1,
        forward_only=False,
    )
    _, norm, _ = worker.optimizer.step()
    worker.scheduler.step(1)
    return float(norm)
