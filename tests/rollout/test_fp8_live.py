"""A server that keeps FP8 on this machine's CPU: it begins without weights, and takes them both ways."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.layouts.megatron_topology import MegatronTopology
from megatron_rl.layouts.sglang_topology import SglangTopology
from megatron_rl.models.random_checkpoint import write_random_checkpoint
from megatron_rl.resharding.spec import SyncSpec
from megatron_rl.resharding.sync import EngineSync
from tests.fp8_models import FP8
from tests.rollout.pushes import WAITING, RankHere, Servers
from tests.rollout.servers import greedy_text, hf_config, running
from tests.tiny import CHARACTERS

# SGLang's checksums are of dequantized weights, and need whole blocks along the columns.
CONFIG = FP8["deepseek_v3"] | {"hidden_size": 256, "kv_lora_rank": 128}
pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


def test_what_senders_quantize_is_what_sglangs_own_loader_makes_of_the_export(tmp_path: Path) -> None:
    """Parameters, and greedy text, which sees latent attention's derived matrices too."""
    paths = [tmp_path / name for name in ("one", "other")]
    for seed, path in enumerate(paths):
        write_random_checkpoint(path, CONFIG, characters=CHARACTERS, seed=seed, jitter=0.1)
    trainer = MegatronTopology(world_size=1, num_layers=4, mtp_layers=1)
    direct = SyncSpec(hf_config(paths[0]), trainer, SglangTopology(tp=2), "bfloat16", "bfloat16", fp8=True)
    streamed = replace(direct, direct=False)
    states = {}
    # SGLang's own loader comes first: it fills the padding of vocabularies, which is random else.
    with running(paths[0], tp=2, fp8=True) as server:
        for version, (path, spec) in enumerate([(0, streamed), (1, direct), (0, direct), (1, streamed)], start=1):
            sync = EngineSync(
                RankHere(paths[path], spec), Servers(server), spec, **WAITING, verify_every=int(spec.direct)
            )
            metrics = sync.push(version=version)
            assert metrics["sync/bytes_received"] == metrics["sync/bytes_needed"] > 0
            states[path, spec.direct] = server.checksums(), greedy_text(server)
    for path in (0, 1):
        (ours, text), (theirs, own_text) = states[path, True], states[path, False]
        for rank, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            assert [name for name in our | their if our.get(name) != their.get(name)] == [], rank
        assert text == own_text
    assert states[0, True][0] != states[1, True][0] and states[0, True][1] != states[1, True][1]
