"""The compatibility layer holds what megatron-core needs without CUDA, and nothing more."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_rl.trainer import cpu
from megatron_rl.trainer.rank_batch import split
from tests.trainer.ranks import run_ranks
from tests.trainer.setup import make_batch, make_config, make_rollouts, start, write_checkpoint

SCHEDULE = ((((0, 1),), ((2, 3),)),)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA nothing is patched")


def update_without(rank: int, directory: str, config: Any, meeting: str, left_out: str | None) -> float:
    if left_out:
        del cpu.GROUPS[left_out]
    worker = start(rank, config, directory, meeting)
    batch = make_batch(make_rollouts([11, 23, 20, 5], [3, 7, 4, 2]), SCHEDULE)
    return worker.update(split(batch, 2)[rank])["grad_norm"]


@pytest.mark.parametrize("left_out", [*cpu.GROUPS, None])
def test_every_group_of_patches_is_needed(left_out: str | None, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "hf", "deepseek_v3")
    config = make_config({"ep": 2}, world_size=2)
    arguments = (directory, config, f"file://{tmp_path}/meeting", left_out)
    if left_out is None:
        assert min(run_ranks(2, update_without, *arguments)) > 0
        return
    with pytest.raises((RuntimeError, TypeError, AssertionError, TimeoutError)):
        run_ranks(2, update_without, *arguments, timeout_s=30)


def unequal_parts(rank: int, meeting: str) -> Any:
    cpu.install()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    own = torch.full((rank + 1, 2), float(rank))
    parts = list(torch.empty(3, 2).split([1, 2]))
    dist.all_gather(parts, own)
    scattered = torch.empty(rank + 1, 2)
    dist.reduce_scatter(scattered, list((torch.arange(6.0).view(3, 2) * (rank + 1)).split([1, 2])))
    return parts, scattered


def test_unequal_parts_are_gathered_and_scattered_over_gloo(tmp_path: Path) -> None:
    first, second = run_ranks(2, unequal_parts, f"file://{tmp_path}/meeting")
    for parts, _ in (first, second):
        assert [p.tolist() for p in parts] == [[[0, 0]], [[1, 1], [1, 1]]]
    assert first[1].tolist() == [[0, 3]]  # (0, 1) once from rank 0 and twice from rank 1
    assert second[1].tolist() == [[6, 9], [12, 15]]


def test_nothing_is_patched_in_this_process() -> None:
    """Building a trainer patches torch: only rank processes may."""
    assert not issubclass(torch.cuda.Stream, cpu._Stream)
