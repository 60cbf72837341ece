import os
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.trainer.logprobs import token_logprobs
from tests.trainer.ranks import run_ranks

VOCAB, COLUMNS, TOKENS, TEMPERATURE = 13, 16, 5, 0.7


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, COLUMNS, generator=generator) * 3
    logits[:, VOCAB:] = 50.0  # trained noise in the padding, larger than everything real
    return logits, torch.tensor([0, 12, 7, 8, 3]), torch.randn(TOKENS, generator=generator)


def on_rank(rank: int, world_size: int, meeting: str) -> Any:
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    logits, targets, weight = inputs()
    mine = logits.chunk(world_size, 1)[rank].clone().requires_grad_()
    logprobs, entropy = token_logprobs(mine, targets, vocab_size=VOCAB, temperature=TEMPERATURE, group=dist.group.WORLD)
    (logprobs * weight).sum().backward()
    return logprobs.detach(), entropy, mine.grad, entropy.requires_grad


def test_logprobs_entropy_and_gradient_are_those_of_the_whole_unpadded_vocabulary(tmp_path: Any) -> None:
    logits, targets, weight = inputs()
    real = logits[:, :VOCAB].double().requires_grad_()
    log_softmax = (real / TEMPERATURE).log_softmax(-1)
    expected = log_softmax.gather(1, targets[:, None])[:, 0]
    (expected * weight).sum().backward()
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)

    # With 8 ranks the last holds padding alone: 13 real columns in 16, 2 each.
    for world_size in (1, 2, 8):
        results = run_ranks(world_size, on_rank, world_size, f"file://{tmp_path}/meeting{world_size}")
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
            logits, torch.tensor([1, 2]), vocab_size=4, temperature=1.0, group=dist.group.WORLD
        )
        logprobs.sum().backward()
        return logprobs.dtype, logits.grad

    ((dtype, gradient),) = run_ranks(1, one)
    assert dtype == torch.float32
    # d/dx log softmax at equal logits: one-hot minus a quarter.
    assert gradient.tolist() == [[-0.25, 0.75, -0.25, -0.25], [-0.25, -0.25, 0.75, -0.25]]
    assert os.path.exists(f"{tmp_path}/one")
