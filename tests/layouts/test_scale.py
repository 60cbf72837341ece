"""The published models at the scale they are trained and served at: what compiling one rank's layouts takes."""

import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from megatron_rl.layouts.boxes import TensorLayout
from megatron_rl.layouts.compile import megatron_layouts, sglang_layouts
from megatron_rl.layouts.megatron_topology import MegatronTopology
from megatron_rl.layouts.sglang_topology import SglangTopology
from megatron_rl.models import load_table
from tests.tiny import PUBLISHED

TRAINERS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"ep": 64, "pipeline_layout": "Ettt|(t*4|)*14,ttmL"},
    "kimi_k2": {"ep": 64, "pipeline_layout": "Ettt|(t*4|)*14,ttL"},
    "qwen3_235b_a22b": {"ep": 64, "first_stage_layers": 5, "last_stage_layers": 5},
    "qwen3_30b_a3b": {"ep": 64},
    "glm4_5": {"ep": 32, "pipeline_layout": "E,t*5|(t*6|)*14,t*3,mL"},  # 160 experts are not shared out over 64
    "mixtral_8x22b": {"ep": 8, "pipeline_layout": "Et*3|(t*4|)*8(t*3|)*6,t*3L"},
}
ENGINES: dict[str, dict[str, Any]] = {name: {"tp": 32, "ep": 32} for name in TRAINERS} | {
    "mixtral_8x22b": {"tp": 16, "ep": 8},  # 48 heads and 8 experts
}


def measured(compile_rank: Callable[[], tuple[TensorLayout, ...]]) -> tuple[tuple[TensorLayout, ...], float, float]:
    """(layouts, processor seconds of the fastest of three, peak MB)."""
    seconds = []
    for _ in range(3):
        start = time.process_time()
        compile_rank()
        seconds.append(time.process_time() - start)
    tracemalloc.start()
    layouts = compile_rank()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return layouts, min(seconds), peak / 1e6


@pytest.mark.parametrize("name", sorted(TRAINERS))
def test_one_rank_of_a_large_trainer_compiles_in_no_time(name: str) -> None:
    table = load_table(PUBLISHED[name])
    sizes = {"tp": 8, "pp": 16, "mtp_layers": table.mtp_layers, **TRAINERS[name]}
    for rank in (0, 500, 1023):
        layouts, seconds, peak_mb = measured(
            lambda rank=rank: megatron_layouts(
                load_table(PUBLISHED[name]), MegatronTopology(1024, table.num_layers, **sizes), rank, dtype="bfloat16"
            )
        )
        boxes = sum(len(layout.boxes) for layout in layouts)
        print(f"{name} trainer rank {rank}: {seconds * 1e3:.1f} ms, {peak_mb:.2f} MB, {boxes} boxes")
        assert seconds < 1 and peak_mb < 10  # 0.02 s and 1 MB when written
        assert 0 < boxes < 500


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_one_rank_of_a_large_engine_compiles_in_no_time(name: str) -> None:
    hf, topology = PUBLISHED[name], SglangTopology(**ENGINES[name])
    for rank in (0, topology.world_size - 1):
        layouts, seconds, peak_mb = measured(
            lambda rank=rank: sglang_layouts(load_table(hf), topology, rank, dtype="bfloat16")
        )
        boxes = sum(len(layout.boxes) for layout in layouts)
        print(f"{name} engine rank {rank}: {seconds * 1e3:.1f} ms, {peak_mb:.2f} MB, {boxes} boxes")
        assert seconds < 1 and peak_mb < 10  # 0.1 s and 1 MB when written
        assert 0 < boxes < 5000


def test_counts_of_deepseek_v3_by_hand() -> None:
    table = load_table(PUBLISHED["deepseek_v3"])
    layouts = sglang_layouts(table, SglangTopology(tp=32, ep=32), 5, dtype="bfloat16")
    # Embedding, norm and head; 3 dense layers of 10 tensors; 58 with experts of 14.
    assert len(layouts) == 3 + 3 * 10 + 58 * 14
    # One box each, but 2 for the stacked down projections and each gate and up; 8 experts of 2 and of 1.
    assert sum(len(layout.boxes) for layout in layouts) == 3 + 3 * 12 + 58 * (11 + 8 * 2 + 8 + 2 + 1)
    sizes = {"tp": 8, "pp": 16, "mtp_layers": 1, **TRAINERS["deepseek_v3"]}
    stage_6 = megatron_layouts(table, MegatronTopology(1024, 61, **sizes), 6 * 64 + 9, dtype="bfloat16")
    # Layers 23 to 26, each with 4 of 256 experts (2 tensors each) and 13 other tensors.
    assert len(stage_6) == 4 * (4 * 2 + 13)
