import os
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.trainer import logprobs as logprobs_module
from megatron_rl.trainer.logprobs import token_logprobs
from tests.trainer.ranks import run_ranks

VOCAB, COLUMNS, TEMPERATURE = 13, 16, 0.7
ROWS = torch.tensor([6, 0, 1, 4, 5])
"""Asked for, of 7 that the logits have."""


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, COLUMNS, generator=generator) * 3
    logits[:, VOCAB:] = 50.0  # trained noise in the padding, larger than everything real
    return logits, torch.tensor([0, 12, 7, 8, 3]), torch.randn(len(ROWS), generator=generator)


def on_rank(rank: int, world_size: int, meeting: str, chunk_elements: int) -> Any:
    logprobs_module.LOGITS_CHUNK = chunk_elements
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    logits, targets, weight = inputs()
    mine = logits.chunk(world_size, 1)[rank].clone().requires_grad_()
    logprobs, entropy = token_logprobs(
        mine, ROWS, targets, vocab_size=VOCAB, temperature=TEMPERATURE, group=dist.group.WORLD
    )
    (logprobs * weight).sum().backward()
    return logprobs.detach(), entropy, mine.grad, entropy.requires_grad


def test_logprobs_entropy_and_gradient_are_those_of_the_whole_unpadded_vocabulary(tmp_path: Any) -> None:
    logits, targets, weight = inputs()
    real = logits[:, :VOCAB].double().requires_grad_()
    log_softmax = (real[ROWS] / TEMPERATURE).log_softmax(-1)
    expected = log_softmax.gather(1, targets[:, None])[:, 0]
    (expected * weight).sum().backward()
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)

    # With 8 ranks the last holds padding alone: 13 real columns in 16, 2 each.
    for world_size in (1, 2, 8):
        results, chunked = (
            run_ranks(world_size, on_rank, world_size, f"file://{tmp_path}/{world_size}-{n}", n) for n in (1 << 26, 35)
        )
        for whole, parts in zip(results, chunked, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(whole[:3], parts[:3], strict=True))
        for found, found_entropy, _, entropy_has_gradient in results:
            torch.testing.assert_close(found.double(), expected.detach(), atol=2e-6, rtol=0)  # float32
            torch.testing.assert_close(found_entropy.double(), entropy.detach(), atol=4e-6, rtol=0)
            assert not entropy_has_gradient
        gradient = torch.cat([r[2] for r in results], 1)
        torch.testing.assert_close(gradient[:, :VOCAB].double(), real.grad, atol=2e-6, rtol=0)
        assert (gradient[:, VOCAB:] == 0).all()


def test_gradient_has_the_dtype_of_the_logits(tmp_path: Any) -> None:
    def one(rank: int) -> Any:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
        logits = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True)
        logprobs, _ = token_logprobs(
            logits, torch.tensor([0, 1]), torch.tensor([1, 2]), vocab_size=4, temperature=1.0, group=dist.group.WORLD
        )
        logprobs.sum().backward()
        return logprobs.dtype, logits.grad

    ((dtype, gradient),) = run_ranks(1, one)
    assert dtype == torch.float32
    # d/dx log softmax at equal logits: one-hot minus a quarter.
    assert gradient.tolist() == [[-0.25, 0.75, -0.25, -0.25], [-0.25, -0.25, 0.75, -0.25]]
    assert os.path.exists(f"{tmp_path}/one")


class Sizes(TorchDispatchMode):
    """Elements of the tensors that operations make, by dtype; not those that are views."""

    def __init__(self) -> None:
        super().__init__()
        self.most: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in given:
            self.most[out.dtype] = max(self.most.get(out.dtype, 0), out.numel())
        return out


def test_nothing_of_the_size_of_the_logits_is_made_in_float32(tmp_path: Any) -> None:
    def one(rank: int) -> Any:
        logprobs_module.LOGITS_CHUNK = 4 * 64
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
        logits = torch.zeros(50, 64, dtype=torch.bfloat16, requires_grad=True)
        every = torch.arange(50)
        with Sizes() as sizes:
            logprobs, _ = token_logprobs(logits, every, every, vocab_size=60, temperature=1.0, group=dist.group.WORLD)
            forward = dict(sizes.most)
            logprobs.sum().backward()
        return forward, sizes.most

    ((forward, both),) = run_ranks(1, one)
    assert forward[torch.bfloat16] == both[torch.float32] == 4 * 64
    assert both[torch.bfloat16] == 50 * 64  # the gradient
