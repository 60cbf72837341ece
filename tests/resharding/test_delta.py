"""Pushes that send only what changed: engines get the same bits, less travels, and nothing is built on a wrong base."""

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.errors import SyncError
from megatron_rl.resharding.receiver import Receiver
from megatron_rl.resharding.spec import LoadReport, Placement, SendReport
from megatron_rl.resharding.transport.links import Session
from megatron_rl.resharding.transport.slots import Slots
from tests.resharding.pushing import PAD, Pushing, flip_a_bit, make_spec, pushing

TWO_NODES = Placement(((0, 0), (0, 1), (1, 0), (1, 1)), ((1, 2), (1, 3), (2, 0), (2, 1)))
SHARED_DEVICES = Placement(((0, 0), (0, 1), (0, 2), (0, 3)), ((0, 0), (0, 1)))
BUCKET_BYTES = 1 << 15
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "local": ("tp2_ep2", {"placement": SHARED_DEVICES}),
    "node": ("tp2_ep2", {}),
    "network": ("pp2_vpp2_ep2", {"placement": TWO_NODES, "engines": 2}),
}


def small(trainer: str = "one", to: str = "float32", family: str = "deepseek_v3", **options: Any) -> Any:
    return make_spec(family, trainer, "tp2", to, **{"bucket_bytes": BUCKET_BYTES, "delta": True, **options})


def edit(it: Pushing, where: Callable[[Tensor], Tensor], value: float | Tensor) -> None:
    """Put `value` in the place of elements in all trainer ranks, and of what the engines should hold; padding stays."""
    for tensors in (*it.tensors.values(), *it.wanted):
        for t in tensors.values():
            t[where(t) & (t != PAD)] = value


def some(t: Tensor) -> Tensor:
    return t % 97 == 5


def round_all(it: Pushing) -> None:
    """To what bfloat16 can hold: then both sides of a cast are edited alike."""
    for tensors in (*it.tensors.values(), *it.wanted):
        for t in tensors.values():
            t.copy_(t.bfloat16())


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


def is_equal(it: Pushing) -> bool:
    """Whether the engines hold what they should, bit for bit."""
    return all(
        torch.equal(bits(got[name]), bits(want[name]))
        for got, want in zip(it.parameters, it.wanted, strict=True)
        for name in want
    )


def shares(sent: list[SendReport], loaded: list[LoadReport]) -> tuple[float, float]:
    """Of the elements that changed, and of the bytes that travelled."""
    assert all(report.covered_bytes == report.needed_bytes for report in loaded)
    needed = sum(report.needed_bytes for report in loaded)
    compared = sum(report.compared for report in sent)
    travelled = sum(report.received_bytes for report in loaded) / needed
    return sum(report.changed for report in sent) / compared if compared else -1.0, travelled


@pytest.mark.parametrize("kind", KINDS)
def test_what_changed_is_all_that_travels(kind: str) -> None:
    trainer, options = KINDS[kind]
    with pushing(small(trainer, **options)) as it:
        assert shares(*it.push(1)) == (-1.0, 1.0) and is_equal(it)
        assert shares(*it.push(2)) == (0.0, 0.0) and is_equal(it)

        edit(it, some, 0.25)
        changed, travelled = shares(*it.push(3))
        assert is_equal(it)
        assert 0.003 < changed < 0.03  # one of 97, the values of small tensors apart
        assert 2 * changed < travelled < 3 * changed  # index and value, where a full push sends the value

        for tensors in (*it.tensors.values(), *it.wanted):
            for t in tensors.values():
                t[t != PAD] += 1
        assert shares(*it.push(4))[1] == 1.0  # index and value would be longer
        assert is_equal(it)


def test_other_bits_of_equal_numbers_are_changes() -> None:
    other_nan = torch.tensor(0x7FC00001, dtype=torch.int32).view(torch.float32)
    with pushing(small()) as it:
        edit(it, some, 0.0)
        it.push(1)
        edit(it, lambda t: t == 0, -0.0)
        changed, _ = shares(*it.push(2))
        assert changed > 0 and is_equal(it)
        edit(it, lambda t: t == 0, float("nan"))
        assert shares(*it.push(3))[0] == changed and is_equal(it)
        edit(it, torch.isnan, other_nan)
        assert shares(*it.push(4))[0] == changed and is_equal(it)
        assert shares(*it.push(5)) == (0.0, 0.0) and is_equal(it)


def test_a_change_that_the_cast_swallows_is_not_sent() -> None:
    with pushing(small(to="bfloat16", family="qwen3_moe")) as it:
        round_all(it)
        it.push(1)
        for t in it.tensors[0].values():
            t *= 1 + 2**-12  # an eighth of bfloat16's step, or less

        assert shares(*it.push(2)) == (0.0, 0.0)
        assert is_equal(it)


def test_messages_of_several_dtypes_are_compared_too() -> None:
    with pushing(small(to="bfloat16", family="glm4_moe")) as it:  # routers stay float32
        round_all(it)
        it.push(1)
        edit(it, some, 0.25)
        changed, travelled = shares(*it.push(2))

        assert {t.dtype for t in it.wanted[0].values()} == {torch.bfloat16, torch.float32}
        assert 0 < travelled < 4 * changed
        assert is_equal(it)


def test_a_damaged_delta_is_refused_and_the_next_push_sends_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    with pushing(small()) as it:
        it.push(1)
        edit(it, some, 0.25)
        with monkeypatch.context() as patch:
            flip_a_bit(patch)
            with pytest.raises(
                SyncError, match=r"rank \d: the \d+ bytes at \d+ of message .*trainer rank 0 .*sent with"
            ):
                it.push(2)

        assert shares(*it.push(2)) == (-1.0, 1.0)
        assert is_equal(it)


def test_parameters_that_something_wrote_over_are_noticed_and_healed() -> None:
    with pushing(small()) as it:
        it.push(1)
        name = "model.layers.1.self_attn.o_proj.weight"
        it.parameters[1][name][0, 0] += 1
        edit(it, some, 0.25)
        with pytest.raises(SyncError, match=r"engine 0 rank 1: message .*model\.layers\.1\..* no longer version 1\."):
            it.push(2)

        assert it.push(2) and is_equal(it)


def test_an_engine_that_was_replaced_gets_everything() -> None:
    with pushing(small()) as it:
        it.push(1)
        it.receivers[1].close()
        for t in it.parameters[1].values():
            t.fill_(PAD)
        it.receivers[1] = Receiver(it.spec, 1)
        with pytest.raises(SyncError, match="engine 0 rank 1"):
            it.push(2)

        assert shares(*it.push(2)) == (-1.0, 1.0)
        assert is_equal(it)


def test_a_version_that_was_skipped_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    offer = Slots.offer

    def later(slots: Slots, session: Session, takers: Collection[str], nbytes: int, **description: Any) -> None:
        offer(slots, session, takers, nbytes, **description | {"delta": description["delta"] | {"since": 2}})

    with pushing(small()) as it:
        it.push(1)
        with monkeypatch.context() as patch:
            patch.setattr(Slots, "offer", later)
            with pytest.raises(SyncError, match=r"engine 0 rank \d holds version 1, .* rank 0 .*since version 2"):
                it.push(3)

        assert it.push(3) and is_equal(it)


def test_comparing_is_of_the_whole_and_leaves_the_base_alone() -> None:
    with pushing(small()) as it:
        it.push(1)
        edit(it, some, 0.25)
        it.push(2)
        assert shares(*it.push(2, compare=True)) == (-1.0, 1.0)
        assert shares(*it.push(3)) == (0.0, 0.0)
        name = "model.layers.1.self_attn.o_proj.weight"
        it.parameters[1][name][0, 0] += 1
        with pytest.raises(SyncError, match=rf"engine 0 rank 1: {name}\[0, 0\] is .* after the load"):
            it.push(3, compare=True)


def test_two_messages_and_a_copy_are_all_that_it_takes() -> None:
    with pushing(small()) as it:
        it.push(1)
        sent, loaded = it.push(2)

        of_ranks = [sum(t.nbytes for t in want.values()) for want in it.wanted]
        assert max(of_ranks) < 4 * sent[0].compared <= sum(of_ranks)  # what both ranks want whole is one message
        assert 0 < sent[0].staging_bytes - 4 * sent[0].compared <= 2.1 * BUCKET_BYTES  # a little is alignment
        assert all(0 < report.staging_bytes <= BUCKET_BYTES for report in loaded)

        edit(it, some, 0.25)
        (more,), _ = it.push(3)
        messages = len(it.senders[0]._messages)
        # An index and a value for each change of the message with the most of them.
        assert 8 * more.changed / messages <= more.staging_bytes - sent[0].staging_bytes < 8 * more.changed
