"""Policy updates against the same mathematics in plain PyTorch: transformers' model, its autograd, torch's AdamW."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.config import AlgorithmConfig
from megatron_rl.types import Rollouts
from tests.trainer.ranks import run_ranks
from tests.trainer.setup import make_batch, make_config, make_rollouts, start, write_checkpoint
from tests.trainer.test_update import LENGTHS, PROMPTS, TWO_MINI_BATCHES, part_of, with_logprobs

# Small clips, a large rate and a large decay, so that each of them does something.
ALGORITHM = {
    "mini_batches": 2, "kl_coef": 0.05, "lr": 3e-3, "weight_decay": 5.0, "clip_grad": 0.1, "clip_low": 0.01,
    "clip_high": 0.03,
}  # fmt: skip
SEEDS = (0, 1)
"""Of the two batches."""
MINI_BATCHES = (range(0, 3), range(3, 6))


def updates(rank: int, directory: str, config: Any, meeting: str, out: str) -> list[dict[str, float]]:
    worker = start(rank, config, directory, meeting)
    metrics = []
    for seed in SEEDS:
        schedule = TWO_MINI_BATCHES[worker.topology.dp]
        part = part_of(worker, make_batch(make_rollouts(LENGTHS, PROMPTS, seed=seed), schedule, seed=seed))
        metrics.append(worker.update(with_logprobs(part, worker.logprobs(part))))
    worker.export(out)
    return metrics


def distribution(model: Any, rollouts: Rollouts, row: int) -> tuple[Tensor, Tensor]:
    """(log-probability, entropy) of each response token of a row."""
    tokens, _, prompt = rollouts.row(row)
    ids = torch.from_numpy(tokens).long()
    log_p = model(input_ids=ids[None]).logits[0, prompt - 1 : -1].log_softmax(-1)
    return log_p.gather(1, ids[prompt:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def by_hand(model: Any, reference: Any) -> list[dict[str, float]]:
    """Updates `model`; metrics as `Worker.update` has them."""
    a = AlgorithmConfig(**ALGORITHM)
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if p.dim() > 1], "weight_decay": a.weight_decay}]
    groups += [{"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0}]  # norms do not decay
    optimizer = torch.optim.AdamW(groups, lr=a.lr, betas=(a.beta1, a.beta2), eps=a.eps)
    out = []
    for seed in SEEDS:
        rollouts = make_rollouts(LENGTHS, PROMPTS, seed=seed)
        advantages = make_batch(rollouts, (), seed=seed).advantages
        with torch.no_grad():
            old, frozen = ([distribution(m, rollouts, i)[0] for i in range(len(LENGTHS))] for m in (model, reference))
        means: dict[str, float] = defaultdict(float)
        for rows in MINI_BATCHES:
            sums: dict[str, Any] = defaultdict(float)
            count = sum(LENGTHS[i] - PROMPTS[i] for i in rows)
            for i in rows:
                logprobs, entropy = distribution(model, rollouts, i)
                ratio, advantage = (logprobs - old[i]).exp(), float(advantages[i])
                clipped = ratio.clamp(1 - a.clip_low, 1 + a.clip_high)
                kl = (frozen[i] - logprobs).exp() - 1 - (frozen[i] - logprobs)
                sampled = torch.from_numpy(rollouts.row(i)[1][PROMPTS[i] :].copy())
                sums["loss"] += (a.kl_coef * kl - torch.minimum(ratio * advantage, clipped * advantage)).sum()
                sums["kl"] += kl.sum()
                sums["entropy"] += entropy.sum()
                sums["ratio"] += ratio.sum()
                sums["clip_fraction"] += (
                    (ratio > 1 + a.clip_high) if advantage > 0 else (ratio < 1 - a.clip_low)
                ).sum()
                sums["mismatch/logprob_abs_diff_mean"] += (old[i] - sampled).abs().sum()
            optimizer.zero_grad()
            (sums["loss"] / count).backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, a.clip_grad)
            optimizer.step()
            for name, value in {**sums, "grad_norm": norm * count}.items():
                means[name] += float(value) / count / len(MINI_BATCHES)
        out.append(dict(means))
    return out


def test_metrics_and_weights_of_updates_are_those_of_plain_torch(tmp_path: Path) -> None:
    import transformers

    directory, out = write_checkpoint(tmp_path / "hf", "deepseek_v3"), tmp_path / "out"
    out.mkdir()
    config = make_config({"ep": 2}, world_size=2, algorithm=ALGORITHM)
    *_, found = run_ranks(2, updates, directory, config, f"file://{tmp_path}/meeting", str(out))
    load, exact = transformers.AutoModelForCausalLM.from_pretrained, {"dtype": torch.float32}
    model, reference = (load(directory, **exact, attn_implementation="eager").eval() for _ in range(2))

    expected = by_hand(model, reference)

    assert expected[0]["clip_fraction"] > 0.1 and expected[1]["kl"] > 1e-3 and expected[1]["grad_norm"] > 0.1
    for ours, want in zip(found, expected, strict=True):
        # Adam divides a gradient by its own size: where it is nearly 0, rounding moves a weight by as much as lr.
        assert {name: ours[name] for name in want} == pytest.approx(want, rel=2e-3, abs=2e-6)
    ours = dict(load(out, **exact).named_parameters())
    for name, want in model.named_parameters():
        change = (want - reference.get_parameter(name)).norm()
        assert (ours[name] - want).norm() <= 1e-2 * change, name
