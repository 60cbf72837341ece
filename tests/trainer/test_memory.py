"""What memory.py says a rank holds is what megatron holds."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.memory import trainer_use
from tests.trainer.ranks import run_ranks
from tests.trainer.setup import make_batch, make_config, make_rollouts, start, write_checkpoint
from tests.trainer.test_update import LENGTHS, PROMPTS, TWO_MINI_BATCHES, part_of


def held(rank: int, directory: str, config: Any, meeting: str) -> tuple[dict[str, int], dict[str, int]]:
    """(bytes of this rank's tensors after an update, and as `trainer_use` has them)."""
    worker = start(rank, config, directory, meeting)
    worker.update(part_of(worker, make_batch(make_rollouts(LENGTHS, PROMPTS), TWO_MINI_BATCHES[worker.topology.dp])))
    buffers = [b for chunk in worker.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    found = {
        "weights": sum(t.nbytes for t in worker.tensors.values()),
        "gradients": sum(b.grad_data.nbytes for b in buffers),
        "optimizer": _optimizer_bytes(worker.optimizer),
    }
    use = trainer_use(
        worker.config, worker.table, worker.model.megatron, worker.topology, worker.topology.coordinates(rank).pp
    )
    return found, {name: use[name] for name in found}


def _optimizer_bytes(chained: Any) -> int:
    """Of float32 weights that are not the model's own, and of Adam's moments."""
    total = 0
    for optimizer in getattr(chained, "chained_optimizers", [chained]):
        masters = getattr(optimizer, "shard_fp32_from_float16_groups", [])
        total += sum(t.nbytes for group in masters for t in group if t is not None)
        for state in optimizer.optimizer.state.values():
            total += sum(t.nbytes for t in state.values() if isinstance(t, torch.Tensor) and t.dim())
    return total


@pytest.mark.parametrize(
    ("parallel", "world_size", "dtype"),
    [({"ep": 2}, 2, "bfloat16"), ({"ep": 2}, 2, "float32"), ({"tp": 2, "sp": True, "ep": 2, "pp": 2}, 4, "bfloat16")],
    ids=["ep2", "ep2_float32", "tp2_pp2"],
)
def test_a_rank_holds_what_was_said(parallel: dict[str, Any], world_size: int, dtype: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "hf", "deepseek_v3", dtype="bfloat16")
    config = make_config(parallel, world_size=world_size, dtype=dtype)
    meeting = f"file://{tmp_path}/meeting"

    for found, said in run_ranks(world_size, held, directory, config, meeting):
        print(found, said)
        assert found["weights"] == said["weights"]
        # Megatron pads buckets, to multiples of the ranks that share them: little in a model that is not tiny.
        assert said["gradients"] <= found["gradients"] <= said["gradients"] * 1.05
        assert found["optimizer"] == pytest.approx(said["optimizer"], rel=0.05)
