"""What each number of AdamW does, against PyTorch's own."""

from pathlib import Path
from typing import Any

import torch

from megatron_rl.trainer import optim
from tests.trainer.ranks import run_ranks
from tests.trainer.setup import make_config, start, write_checkpoint

SETTINGS = {"lr": 0.02, "weight_decay": 0.3, "beta1": 0.7, "beta2": 0.8, "eps": 0.05, "clip_grad": 40.0}
"""Far from the defaults, so that none of them can stand in."""
Tensors = dict[str, torch.Tensor]


def two_steps(rank: int, directory: str, config: Any, meeting: str) -> tuple[Tensors, list[Tensors], Tensors]:
    worker = start(rank, config, directory, meeting)
    parameters = {n: p for chunk in worker.chunks for n, p in chunk.module.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in parameters.items()}
    generator = torch.Generator().manual_seed(0)
    gradients = [{n: torch.randn(p.shape, generator=generator) for n, p in before.items()} for _ in range(2)]
    for update, gradient in enumerate(gradients, start=1):
        for name, p in parameters.items():
            p.main_grad.copy_(gradient[name])
        optim.optimizer_step(worker.optimizer, worker.scheduler, loss=1.0, update=update)
    return before, gradients, {name: p.detach().clone() for name, p in parameters.items()}


def test_two_steps_are_those_of_adamw_with_the_same_numbers(tmp_path: Path) -> None:
    """Matrices decay, vectors do not."""
    directory = write_checkpoint(tmp_path / "hf", "qwen3_moe")
    ((before, gradients, after),) = run_ranks(
        1, two_steps, directory, make_config(algorithm=SETTINGS), f"file://{tmp_path}/meeting"
    )
    expected = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in before.items()}
    groups = [
        {"params": [p for p in expected.values() if p.dim() > 1], "weight_decay": SETTINGS["weight_decay"]},
        {"params": [p for p in expected.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    betas = SETTINGS["beta1"], SETTINGS["beta2"]
    adamw = torch.optim.AdamW(groups, lr=SETTINGS["lr"], betas=betas, eps=SETTINGS["eps"])
    for gradient in gradients:
        for name, p in expected.items():
            p.grad = gradient[name].clone()
        norm = torch.nn.utils.clip_grad_norm_(expected.values(), SETTINGS["clip_grad"])
        assert norm > 1.5 * SETTINGS["clip_grad"]
        adamw.step()

    for name, tensor in after.items():
        torch.testing.assert_close(tensor, expected[name].detach(), rtol=1e-5, atol=1e-6)  # float32, another order
