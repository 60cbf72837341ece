"""Packs micro-batches for this rank, and runs megatron's schedule over them."""

# N response tokens of a micro-batch on this rank

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_rl.trainer.logprobs import token_logprobs
from megatron_rl.trainer.micro_batch import Alignment, MicroBatch, Row, build, padded_length

Chunks = Sequence[torch.nn.Module]
Loss = Callable[[MicroBatch, Tensor, Tensor], tuple[Tensor, Any]]
"""(micro-batch, logprobs_N with gradient, entropy_N) -> (loss, summed over N; what to keep of it)."""


def alignment() -> Alignment:
    """This rank's place in its context- and sequence-parallel groups. Call it once megatron has started."""
    return Alignment(
        cp=parallel_state.get_context_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        tp=parallel_state.get_tensor_model_parallel_world_size(),
    )


def pack_all(micro_batches: Sequence[Sequence[Row]], *, device: torch.device) -> list[MicroBatch]:
    """Pack each micro-batch for this rank. With pipelining all are padded to one length, which the stages agree on."""
    align = alignment()
    lengths = [padded_length(rows, align) for rows in micro_batches]
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    if stages > 1:
        # megatron's interleaved schedule wants whole groups of as many micro-batches as there are stages.
        groups = -(-len(lengths) // stages) * stages
        micro_batches = [*micro_batches, *([[]] * (groups - len(lengths)))]
        lengths = [max(lengths)] * groups
    return [build(rows, align, length=n, device=device) for rows, n in zip(micro_batches, lengths, strict=True)]


def run(
    chunks: Chunks,
    micro_batches: Sequence[MicroBatch],
    loss: Loss,
    *,
    vocab_size: int,
    temperature: float,
    forward_only: bool,
) -> list[Any]:
    """Forward, and unless `forward_only` backward, through all pipeline stages; gradients are then divided by tokens.

    Returns: on the last stage what `loss` kept, one entry a micro-batch; elsewhere nothing.
    """

    def compute_loss(batch: MicroBatch, logits_1TV: Tensor) -> tuple[Tensor, Tensor, Any]:
        logprobs_N, entropy_N = token_logprobs(
            logits_1TV[0],
            batch.index_N,
            batch.targets_N,
            vocab_size=vocab_size,
            temperature=temperature,
            group=parallel_state.get_tensor_model_parallel_group(),
        )
        value, kept = loss(batch, logprobs_N, entropy_N)
        return value, torch.tensor(len(batch.targets_N), dtype=torch.int, device=value.device), kept

    def forward_step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Callable]:
        batch = next(batches)
        output = model(batch.tokens_1T, batch.positions_1T, None, packed_seq_params=batch.sequences)
        return output, partial(compute_loss, batch)

    tokens = micro_batches[0].tokens_1T.shape[1] * parallel_state.get_context_parallel_world_size()
    iterators = [iter(micro_batches) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(micro_batches),
        seq_length=tokens,
        micro_batch_size=1,
        forward_only=forward_only,
    )


def sum_over_ranks(kept: Sequence[dict[str, Tensor]], *, device: torch.device) -> dict[str, float]:
    """Sums over micro-batches, data- and context-parallel ranks: all of them on the last pipeline stage, and `loss` and
    `tokens` on every rank."""
    if kept:
        names = sorted(kept[0])
        sums = torch.stack([torch.stack([entry[name].double() for name in names]) for entry in kept]).sum(0).to(device)
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        out = dict(zip(names, sums.tolist(), strict=True))
    else:
        out = {"loss": 0.0, "tokens": 0.0}
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        shared = torch.tensor([out["loss"], out["tokens"]], dtype=torch.float64, device=device)
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(shared, src=last, group=parallel_state.get_pipeline_model_parallel_group())
        out["loss"], out["tokens"] = shared.tolist()
    return out
