"""The engine's layouts against SGLang's own weight loader: names, shapes, dtypes and every byte."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.models.random_checkpoint import write_random_checkpoint
from tests.tiny import CHARACTERS, TINY

ROOT = Path(__file__).parents[2]
CUTS = ("1x1", "2x1", "2x2", "4x1", "4x2", "4x4")


@pytest.mark.live
@pytest.mark.parametrize("family", sorted(TINY))
def test_every_rank_gets_what_sglangs_own_loader_gives_it(family: str, tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, TINY[family], characters=CHARACTERS, seed=3, jitter=0.2)
    stubs = ROOT / "megatron_rl" / "rollout" / "sglang_cpu" / "stubs"
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}:{stubs}",
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, str(ROOT / "tests" / "layouts" / "sglang_loader.py"), str(tmp_path), *CUTS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [(r["tp"], r["ep"], r["rank"]) for r in ranks] == [
        (tp, ep, rank) for tp, ep in ((int(c[0]), int(c[2])) for c in CUTS) for rank in range(tp)
    ]
    assert {(r["tp"], r["ep"], r["rank"]): r["differences"] for r in ranks if r["differences"]} == {}
