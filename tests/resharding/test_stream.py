"""A push for a loader that takes whole HF tensors: what it is given, in which order, and in how much memory."""

import time
from dataclasses import replace

import pytest
import torch

from megatron_rl.errors import SyncError
from megatron_rl.layouts.megatron_topology import MegatronTopology
from megatron_rl.resharding.destination import NamedTensors
from tests.layouts.reference import whole_model
from tests.resharding.pushing import VOCAB, Pushing, hf_value, make_spec, pushing
from tests.resharding.test_push import TWO_NODES
from tests.tiny import TINY

BUCKET = 4096


def checkpoint(hf: dict) -> dict[str, torch.Tensor]:
    """What an engine loads of it."""
    extra = tuple(f"model.layers.{hf['num_hidden_layers'] + i}." for i in range(hf.get("num_nextn_predict_layers", 0)))
    shapes = {name: ids.shape for name, ids in whole_model(hf, vocab=VOCAB).items() if not name.startswith(extra)}
    return {name: hf_value(name, (0,) * len(shape), shape) for name, shape in shapes.items()}


def check(it: Pushing, dtype: torch.dtype = torch.float32) -> None:
    """Every reader's loader got the checkpoint, each tensor once, all in one order."""
    wanted = checkpoint(it.spec.hf_config)
    for loaded, got in zip(it.loaded, it.parameters, strict=True):
        assert sorted(loaded) == sorted(wanted)
        assert loaded == it.loaded[0]
        assert all(torch.equal(got[name].float(), want.to(dtype).float()) for name, want in wanted.items())


@pytest.mark.parametrize("family", TINY)
def test_each_engine_rank_gets_every_tensor_of_the_checkpoint_once(family: str) -> None:
    spec = make_spec(family, "pp2_vpp2_ep2", "tp2", bucket_bytes=BUCKET, direct=False)
    with pushing(spec) as it:
        _, loaded = it.push()

        check(it)
        tensors = checkpoint(spec.hf_config).values()
        for report in loaded:
            assert report.received_bytes == report.needed_bytes == sum(t.nbytes for t in tensors)
            # Unfinished tensors, and the one that the loader looked at last: it asks for the next with it in hand.
            assert report.staging_bytes <= 2 * max(BUCKET, *(t.nbytes for t in tensors))


def test_tensors_are_cast_to_the_dtype_of_the_engine_and_the_next_push_brings_them_again() -> None:
    with pushing(make_spec("deepseek_v3", "tp2_ep2", "tp1", to="bfloat16", direct=False)) as it:
        it.push(version=1)
        for tensor in it.parameters[0].values():
            tensor.zero_()
        it.loaded[0].clear()
        it.push(version=2)

        kept = {name for name, tensor in it.parameters[0].items() if tensor.dtype == torch.float32}
        assert kept and all(name.endswith("e_score_correction_bias") for name in kept)
        wanted = checkpoint(it.spec.hf_config)
        assert sorted(it.loaded[0]) == sorted(wanted)
        for name, got in it.parameters[0].items():
            assert torch.equal(got, wanted[name].to(got.dtype))


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_tensors_cross_nodes_once_and_are_handed_on_inside(family: str) -> None:
    spec = make_spec(family, "pp2_vpp2_ep2", "tp2", engines=2, placement=TWO_NODES, bucket_bytes=1 << 18, direct=False)
    with pushing(spec) as it:
        _, loaded = it.push()

        check(it)
        assert all(report.received_bytes == report.needed_bytes for report in loaded)


def test_a_trainer_rank_whose_turn_is_far_off_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stall_s, delay_s = 2.0, 0.05
    trainer = MegatronTopology(world_size=2, num_layers=4, mtp_layers=0, pp=2)
    spec = replace(make_spec("qwen3_moe", "one", "tp1", bucket_bytes=BUCKET, direct=False), trainer=trainer)
    assert len(checkpoint(spec.hf_config)) / 2 * delay_s > 1.5 * stall_s  # while the first stage has its turn
    with pushing(spec) as it:
        it.push(version=1)  # the links are there
        it.loaded[0].clear()
        load = it.load

        def slow(reader: int, tensors: NamedTensors) -> None:
            load(reader, (named for named in tensors if not time.sleep(delay_s)))

        monkeypatch.setattr(it, "load", slow)
        monkeypatch.setattr("megatron_rl.resharding.transport.links.STALL_S", stall_s)
        monkeypatch.setattr("megatron_rl.resharding.progress.STALL_S", stall_s)
        it.push(version=2)

        check(it)


def test_a_loader_that_ends_early_is_an_error_that_names_what_it_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with pushing(make_spec("qwen3_moe", "tp2_ep2", "tp2", bucket_bytes=BUCKET, direct=False)) as it:
        with monkeypatch.context() as patch:
            patch.setattr(it, "load", lambda reader, tensors: list(tensors) if reader else None)
            with pytest.raises(SyncError):
                it.push(version=1)
        assert any("engine 0 rank 0: the engine's loader ended before model.embed" in error for error in it.errors)

        it.push(version=2)

        check(it)
