"""Pushes between random layouts of random models, through the real transport: what each rank receives and holds."""

from typing import Any

from hypothesis import HealthCheck, assume, given, settings

from megatron_rl.layouts.megatron_topology import MegatronTopology
from megatron_rl.layouts.sglang_topology import SglangTopology
from megatron_rl.models import load_table
from megatron_rl.resharding.spec import SyncSpec
from tests.layouts.test_coverage import cases, compile_engine, compile_trainer
from tests.resharding.pushing import pushing

MOST_RANKS = 8
"""Of each side: every one is a thread with connections to others."""


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_every_rank_of_any_pair_receives_its_own_bytes_and_no_other(case: Any) -> None:
    hf, trainer, engine = case
    table = load_table(hf)
    assume(trainer["world_size"] <= MOST_RANKS and engine["tp"] * engine["pp"] <= MOST_RANKS)
    assume(compile_trainer(table, trainer) and compile_engine(table, engine))
    ours = MegatronTopology(num_layers=table.num_layers, mtp_layers=table.mtp_layers, **trainer)
    spec = SyncSpec(hf, ours, SglangTopology(**engine), "float32", "bfloat16", bucket_bytes=4096)
    with pushing(spec) as it:
        _, loaded = it.push()

        assert it.is_complete()
        for report, want in zip(loaded, it.wanted, strict=True):
            assert report.received_bytes == report.needed_bytes <= sum(t.nbytes for t in want.values())
