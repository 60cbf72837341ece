"""The engine's layouts against SGLang's own weight loader: names, shapes, dtypes and every byte."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.errors import LayoutError
from megatron_rl.layouts.compile import check_sglang
from megatron_rl.layouts.sglang_topology import SglangTopology
from megatron_rl.models import load_table
from megatron_rl.models.random_checkpoint import write_random_checkpoint
from tests.fp8_models import ENGINES, FP8, write_both
from tests.tiny import CHARACTERS, TINY

ROOT = Path(__file__).parents[2]
PLAIN = [{}, {"tp": 2}, {"tp": 4}, {"pp": 3}, {"tp": 2, "pp": 2}]
EXPERTS = [{"tp": 2, "ep": 2}, {"tp": 4, "ep": 2}, {"tp": 4, "ep": 4}, {"tp": 2, "ep": 2, "pp": 2}]
DP_ATTENTION = [
    {"tp": 2, "dp_attention": 2},
    {"tp": 4, "dp_attention": 2, "ep": 4},
    {"tp": 4, "dp_attention": 2, "ep": 2, "dp_lm_head": True},
    {"tp": 2, "dp_attention": 2, "pp": 3},
    {"tp": 4, "dp_attention": 2, "dp_lm_head": True},
]
WHOLE_DENSE_LAYERS = [{"tp": 2, "moe_dense_tp": 1}, {"tp": 4, "moe_dense_tp": 1, "dp_attention": 4, "dp_lm_head": True}]
CUTS = {
    "deepseek_v3": [*PLAIN, *EXPERTS, *DP_ATTENTION, *WHOLE_DENSE_LAYERS],
    "kimi_k2": [*PLAIN, *EXPERTS, *DP_ATTENTION, *WHOLE_DENSE_LAYERS],
    "llama": PLAIN,
    "moonlight": [*PLAIN, *EXPERTS, *DP_ATTENTION, *WHOLE_DENSE_LAYERS],
    "glm4_moe": [*PLAIN, *EXPERTS, *DP_ATTENTION, *WHOLE_DENSE_LAYERS],
    "mixtral": [*PLAIN, *EXPERTS],
    "qwen2": [cut for cut in PLAIN if "pp" not in cut],
    "qwen2_moe": [*PLAIN, *EXPERTS, *DP_ATTENTION],
    "qwen3": [*PLAIN, *(cut for cut in DP_ATTENTION if "ep" not in cut)],
    "qwen3_moe": [*PLAIN, *EXPERTS, *DP_ATTENTION],
    "qwen3_tied": [*(cut for cut in PLAIN if "pp" not in cut), {"tp": 2, "dp_attention": 2}],
}
"""What SGLang's class of the family can do."""


ALL_CUTS = CUTS | {f"{family}_fp8": cuts for family, cuts in ENGINES.items()}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: Any) -> list[dict[str, Any]]:
    """What the program prints: one process for all, because SGLang takes long to import."""
    directory = tmp_path_factory.mktemp("checkpoints")
    for family in TINY:
        write_random_checkpoint(directory / family, TINY[family], characters=CHARACTERS, seed=3, jitter=0.2)
    for family, config in FP8.items():
        write_both(directory / "hf" / family, directory / f"{family}_fp8", config)
    stubs = ROOT / "megatron_rl" / "rollout" / "sglang_cpu" / "stubs"
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}:{stubs}",
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [
        sys.executable,
        str(ROOT / "tests" / "layouts" / "sglang_loader.py"),
        str(directory),
        json.dumps(ALL_CUTS),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.live
@pytest.mark.parametrize("family", sorted(ALL_CUTS))
def test_every_rank_gets_what_sglangs_own_loader_gives_it(family: str, loaded: list[dict[str, Any]]) -> None:
    ranks = [r for r in loaded if r["family"] == family]
    assert [(r["cut"], r["rank"]) for r in ranks] == [
        (cut, rank) for cut in ALL_CUTS[family] for rank in range(SglangTopology(**cut).world_size)
    ]
    assert [r for r in ranks if r["differences"]] == []


@pytest.mark.parametrize("family", sorted(TINY))
def test_what_sglangs_class_of_a_family_does_not_cut_is_refused(family: str) -> None:
    table = load_table({**TINY[family], "vocab_size": len(CHARACTERS)})
    for cut in [*PLAIN, *EXPERTS, *DP_ATTENTION, *WHOLE_DENSE_LAYERS]:
        if cut in CUTS[family]:
            check_sglang(table, SglangTopology(**cut))
        else:
            with pytest.raises(LayoutError, match="Set it to "):
                check_sglang(table, SglangTopology(**cut))
