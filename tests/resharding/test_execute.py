"""Packing and unpacking: simulated trainer ranks and engine ranks in this process, every byte compared."""

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_rl.errors import LayoutError, SyncError
from megatron_rl.layouts.boxes import TensorLayout
from megatron_rl.layouts.megatron_topology import MegatronTopology
from megatron_rl.layouts.sglang_topology import SglangTopology
from megatron_rl.resharding.execute import Receiver, Sender
from megatron_rl.resharding.spec import Bucket, Placement, SyncSpec, compile_sync
from tests.tiny import CHARACTERS, TINY

VOCAB = len(set(CHARACTERS)) + 3
PAD = 77.0
TRAINERS = {
    "one": MegatronTopology(world_size=1, num_layers=4),
    "tp2_ep2": MegatronTopology(world_size=4, num_layers=4, tp=2, ep=2),
    "pp2_vpp2_ep2": MegatronTopology(world_size=4, num_layers=4, pp=2, vpp=2, ep=2),
}
ENGINES = {"tp1": SglangTopology(), "tp2": SglangTopology(tp=2), "tp2_ep2": SglangTopology(tp=2, ep=2)}


def make_spec(family: str, trainer: str, engine: str, dtype: str = "float32", to: str = "float32") -> SyncSpec:
    mtp = TINY[family].get("num_nextn_predict_layers", 0)
    ours, theirs = replace(TRAINERS[trainer], mtp_layers=mtp), ENGINES[engine]
    if not any(key.endswith("experts") for key in TINY[family]):
        ours, theirs = replace(ours, ep=1), replace(theirs, ep=1)
    return SyncSpec({**TINY[family], "vocab_size": VOCAB}, ours, theirs, dtype, to)


def hf_value(name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """What stands in a rectangle of an HF tensor: each element its own number, exact in float32."""
    index = torch.arange(offset[-1], offset[-1] + shape[-1])
    if len(shape) == 2:
        index = torch.arange(offset[0], offset[0] + shape[0])[:, None] * 1009 + index
    return (index + sum(name.encode()) * 17 % 9973).float()


def fill(layouts: tuple[TensorLayout, ...]) -> dict[str, Tensor]:
    """The tensors of a rank that holds the model of `hf_value`; padding is PAD."""
    tensors = {}
    for layout in layouts:
        tensor = torch.full(layout.shape, PAD, dtype=getattr(torch, layout.dtype))
        for box in layout.boxes:
            part = tensor[box.offset[0]] if len(box.offset) > len(box.shape) else tensor
            at = box.offset[-len(box.shape) :]
            part[tuple(slice(a, a + n) for a, n in zip(at, box.shape, strict=True))] = hf_value(
                box.hf, box.hf_offset, box.shape
            ).to(tensor.dtype)
        tensors[layout.name] = tensor
    return tensors


def pack_all(spec: SyncSpec) -> tuple[list[Sender], list[Bucket]]:
    plan = compile_sync(spec)
    senders = [Sender(spec, rank) for rank in plan.sources]
    return senders, [b for s in senders for b in s.pack(fill(plan.sources[s.rank]))]


def empty(spec: SyncSpec, rank: int) -> dict[str, Tensor]:
    return {name: torch.full_like(t, PAD) for name, t in fill(compile_sync(spec).destinations[rank]).items()}


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_rank_gets_exactly_its_own_bytes(family: str, trainer: str, engine: str) -> None:
    spec = make_spec(family, trainer, engine)
    senders, buckets = pack_all(spec)
    for rank, layouts in compile_sync(spec).destinations.items():
        got = empty(spec, rank)
        receiver = Receiver(spec, rank, got)

        received = receiver.load([b for b in buckets if b.dst_rank == rank])

        want = fill(layouts)
        assert all(torch.equal(got[name], want[name]) for name in want)
        payload = sum((t != PAD).sum().item() * t.element_size() for t in want.values())
        assert received == receiver.needed_bytes >= payload
        assert received <= sum(t.nbytes for t in want.values())
    for sender in senders:
        sender.close()


def test_a_narrower_engine_dtype_is_cast_by_the_sender_and_pinned_tensors_are_not() -> None:
    spec = make_spec("deepseek_v3", "tp2_ep2", "tp2", "float32", "bfloat16")
    senders, buckets = pack_all(spec)
    got = empty(spec, 1)

    received = Receiver(spec, 1, got).load([b for b in buckets if b.dst_rank == 1])

    want = fill(compile_sync(spec).destinations[1])
    assert {str(t.dtype) for t in got.values()} == {"torch.bfloat16", "torch.float32"}
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert received < sum(t.nbytes for t in want.values())
    for sender in senders:
        sender.close()


def test_buckets_are_reused_and_follow_new_values_and_new_storages() -> None:
    spec = make_spec("qwen3_moe", "one", "tp1")
    source = fill(compile_sync(spec).sources[0])
    sender, got = Sender(spec, 0), empty(spec, 0)
    receiver = Receiver(spec, 0, got)
    first = sender.pack(source)
    receiver.load(first)

    source["0:decoder.final_layernorm.weight"].fill_(3.0)
    moved = {name: t.clone() for name, t in source.items()}
    for tensors in (source, moved):
        tensors["0:decoder.final_layernorm.weight"].add_(1.0)
        second = sender.pack(tensors)
        receiver.load(second)
        assert torch.equal(got["model.norm.weight"], tensors["0:decoder.final_layernorm.weight"])
    assert [b.path for b in second] == [b.path for b in first]
    sender.close()


def test_what_was_overwritten_after_the_load_is_named_to_the_element() -> None:
    spec = make_spec("qwen3_moe", "tp2_ep2", "tp2", "float32", "bfloat16")
    senders, buckets = pack_all(spec)
    got = empty(spec, 1)
    mine = [b for b in buckets if b.dst_rank == 1]
    receiver = Receiver(spec, 1, got)
    receiver.load(mine)
    receiver.verify(mine)

    # Expert 5 of 8: on ranks 2 and 3 under EP2. Columns 20 to 39 of w2 are engine rank 1's.
    experts = got["model.layers.2.mlp.experts.w2_weight"]
    was = experts[5, 7, 3].item()
    experts[5, 7, 3] = float("nan")
    with pytest.raises(SyncError, match=r"engine rank 1: model.layers.2.mlp.experts.w2_weight\[5, 7, 3\] is nan"):
        receiver.verify(mine)
    experts[5, 7, 3] = was
    got["model.norm.weight"][2] = -0.0
    match = r"model.norm.weight\[2\] is -0.0 .*trainer rank \d sent .* from 0:decoder.final_layernorm.weight"
    with pytest.raises(SyncError, match=match):
        receiver.verify(mine)
    for sender in senders:
        sender.close()


def damaged(buckets: list[Bucket], **change: object) -> list[Bucket]:
    return [replace(buckets[0], **change), *buckets[1:]]  # type: ignore[arg-type]


def test_what_is_not_as_sent_is_refused_before_anything_is_written() -> None:
    spec = make_spec("deepseek_v3", "tp2_ep2", "tp1")
    senders, buckets = pack_all(spec)
    got = empty(spec, 0)
    receiver = Receiver(spec, 0, got)
    cases = {
        "trainer rank 0 .*arrived with digest": damaged(buckets, digest="0" * 32),
        "computed plan .* packed by": damaged(buckets, plan_hash="1" * 32),
        r"got buckets from trainer ranks \[1, 2, 3\]": buckets[1:],
        "has ended": damaged(buckets, path="/proc/self/fd/999"),
        "were announced": damaged(buckets, nbytes=buckets[0].nbytes + 16),
    }

    for message, wrong in cases.items():
        with pytest.raises(SyncError, match=message):
            receiver.load(wrong)

    assert all((t == PAD).all() for t in got.values())
    receiver.load(buckets)
    assert not any((t == PAD).all() for t in got.values())
    for sender in senders:
        sender.close()


def test_a_model_that_is_not_the_declared_one_is_refused_with_every_difference() -> None:
    spec = make_spec("qwen3_moe", "one", "tp1")
    parameters = empty(spec, 0)
    parameters["lm_head.weight"] = parameters["lm_head.weight"].bfloat16()
    parameters["model.norm.weight"] = torch.zeros(5)
    del parameters["model.layers.0.self_attn.q_norm.weight"]
    parameters["extra"] = torch.zeros(1)

    with pytest.raises(LayoutError, match="engine rank 0: 4 of") as error:
        Receiver(spec, 0, parameters)

    for part in ("extra is not", "q_norm.weight is missing", "(5,) float32, declared (56,)", "bfloat16, declared"):
        assert part in str(error.value)


def test_a_spec_survives_json() -> None:
    spec = make_spec("deepseek_v3", "pp2_vpp2_ep2", "tp2_ep2")
    placement = Placement(((0, 0), (0, 1), (1, 0), (1, 1)), ((0, 0), (0, 1), (2, 0), (2, 5)))

    for some in (spec, replace(spec, engines=2, bucket_bytes=1000, placement=placement)):
        assert SyncSpec.from_json(json.loads(json.dumps(some.to_json()))) == some


def test_a_spec_that_places_other_ranks_is_refused() -> None:
    spec = make_spec("deepseek_v3", "tp2_ep2", "tp2")
    with pytest.raises(LayoutError, match="names 1 trainer ranks and 2 engine ranks, where there are 4 and 2"):
        replace(spec, placement=Placement(((0, 0),), ((0, 1), (0, 2))))
    with pytest.raises(LayoutError, match="0 engines"):
        replace(spec, engines=0)
