"""One end of a push fails the other: every rank ends soon, says what happened, and the next push is whole."""

import itertools
import re
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_rl.errors import LayoutError, SyncError
from megatron_rl.resharding import destination
from megatron_rl.resharding.receiver import Receiver
from megatron_rl.resharding.spec import LoadReport, Placement, SendReport, SyncSpec
from megatron_rl.resharding.transport import links, network, slots
from megatron_rl.resharding.transport.links import Link, Session
from megatron_rl.resharding.transport.slots import Slots
from tests.resharding.pushing import PAD, Pushing, flip_a_bit, make_spec, pushing

STALL_S = 12.0
SOON_S = STALL_S + links.PATIENCE_S + 5
"""Until every rank of both sides has ended, on a busy machine; with the real STALL_S that is less than 30."""
STALLS_S = 1.0
"""In a session whose ranks have met already."""
TWO_NODES = Placement(((0, 0), (0, 1), (1, 0), (1, 1)), ((1, 2), (1, 3)))
"""The first pipeline stage's weights come over the network, and some of them are handed on."""
KINDS = {"node": None, "network": TWO_NODES}
RANK = r"(trainer|engine 0) rank \d"
TENSOR = r"(layers|embed|norm|head|output_layer)"
DAMAGED = rf"engine 0 rank \d: the \d+ bytes at \d+ of message \d+ from {RANK} \(.*{TENSOR}.*checksum"


def spec_of(kind: str, **options: Any) -> SyncSpec:
    values = {"placement": KINDS[kind], "bucket_bytes": 8192, **options}
    return make_spec("qwen3_moe", "pp2_vpp2_ep2", "tp2", **values)


@pytest.fixture(scope="module", autouse=True)
def quick_resolver() -> Iterator[None]:
    """A TCPStore looks up the name of every peer's address; a lost packet there costs 5 s by default."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RES_OPTIONS", "timeout:1 attempts:1")
        yield


@pytest.fixture(scope="module", params=KINDS)
def it(request: pytest.FixtureRequest) -> Iterator[Pushing]:
    with pushing(spec_of(request.param)) as both:
        yield both


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (links, network):
        monkeypatch.setattr(module, "STALL_S", STALL_S)


def fails(it: Pushing, match: str) -> None:
    """A push ends soon on every rank, and one says what happened."""
    begin = time.monotonic()
    with pytest.raises((SyncError, LayoutError, torch.OutOfMemoryError)):
        it.push(version=1)
    assert time.monotonic() - begin < SOON_S
    assert any(re.search(match, text, re.DOTALL) for text in it.errors), it.errors


def heals(it: Pushing) -> None:
    """The next push brings every byte."""
    for tensors in it.parameters:
        for tensor in tensors.values():
            tensor.fill_(PAD)
    it.push(version=2)
    assert it.is_complete()


def tamper(patch: pytest.MonkeyPatch, *, of: int, sends: int) -> None:
    """From now on the `of`-th offer is sent `sends` times."""
    numbers, send = itertools.count(), Link.send

    def tampered(link: Link, **news: Any) -> None:
        for _ in range(sends if "number" in news and next(numbers) == of else 1):
            send(link, **news)

    patch.setattr(Link, "send", tampered)


@pytest.fixture(params=["first", "middle", "last"])
def place(it: Pushing, request: pytest.FixtureRequest) -> int:
    """Which of a push's offers."""
    found: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        send = Link.send
        patch.setattr(Link, "send", lambda link, **news: (found.append("number" in news), send(link, **news)))
        it.push()
    return {"first": 0, "middle": sum(found) // 2, "last": sum(found) - 1}[request.param]


def test_a_flipped_bit_is_named_with_tensor_and_ranks_everywhere(it: Pushing, monkeypatch: pytest.MonkeyPatch) -> None:
    for of in (0, 20, 40):
        with monkeypatch.context() as patch:
            flip_a_bit(patch, of=of)
            fails(it, DAMAGED)

        assert len(set(it.errors)) == 1  # who was told repeats what it was told
        heals(it)


def test_a_bit_that_flips_where_a_fetcher_hands_on_is_found(it: Pushing, monkeypatch: pytest.MonkeyPatch) -> None:
    handed_on = [(r, engine._slots) for r, engine in enumerate(it.receivers) if engine._takers]
    assert bool(handed_on) == (it.spec.placement is not None)
    for fetcher, memory in handed_on:
        offer = memory.offer

        def damaged(session: Session, takers: Any, nbytes: int, m=memory, offer=offer, **more: Any) -> None:
            m.next(nbytes)[nbytes - 1] ^= 128
            offer(session, takers, nbytes, **more)

        with monkeypatch.context() as patch:
            patch.setattr(memory, "offer", damaged)
            fails(it, rf"engine 0 rank {1 - fetcher}: .* from engine 0 rank {fetcher} \(.*{TENSOR}.*checksum")
        heals(it)


def test_an_offer_that_is_lost_is_named(it: Pushing, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(links, "STALL_S", STALLS_S)
        tamper(patch, of=place, sends=0)
        fails(it, rf"{RANK} heard nothing for \d s: .*{RANK} has not taken .*{TENSOR}")
    heals(it)


def test_an_offer_that_comes_twice_is_named(it: Pushing, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        tamper(patch, of=place, sends=2)
        fails(it, rf"engine 0 rank \d: {RANK} sent message \d+ \(.*{TENSOR}.*\) twice")
    heals(it)


@pytest.mark.parametrize("left_out", [slice(1, None), slice(None, -1)])
def test_a_message_that_is_never_sent_is_named(it: Pushing, left_out: slice, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = it.senders[0]
    with monkeypatch.context() as patch:
        patch.setattr(sender, "_messages", sender._messages[left_out])
        fails(it, rf"engine 0 rank \d: trainer rank 0 is done and 1 of its messages never came.*{TENSOR}")
    heals(it)


def test_a_rank_that_never_comes_is_named(it: Pushing, monkeypatch: pytest.MonkeyPatch) -> None:
    it.session = secrets.token_hex(8)
    with monkeypatch.context() as patch:
        patch.setattr(links, "STALL_S", 4.0)
        if it.spec.placement is None:
            patch.setattr(it.senders[1], "send", lambda tensors, push: SendReport(0, 0, 0, 0))
            name = "trainer rank 1"
        else:
            patch.setattr(it.receivers[1], "receive", lambda own, push: LoadReport(0, 0, 0, 0, 0, 0))
            name = "engine 0 rank 1"
        fails(it, rf"{RANK} (found no|waited 4 s for).*{name}")
    heals(it)


def no_memory(*args: Any, **options: Any) -> Any:
    raise torch.OutOfMemoryError("tried to allocate 64 MiB")


def test_a_side_without_memory_says_so_everywhere(it: Pushing, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {
        (Slots, "next"): "trainer",
        (slots, "attach_shared"): "engine 0",
        (destination, "prepare"): "engine 0",
    }
    for (module, what), side in places.items():
        it.session = secrets.token_hex(8)
        for part in (*it.senders.values(), *it.receivers):
            part._slots.close()
        with monkeypatch.context() as patch:
            patch.setattr(module, what, no_memory)
            fails(it, rf"{side} rank \d.*: \S*{TENSOR}.*: OutOfMemoryError: tried to allocate 64 MiB.*push again")
        heals(it)


def test_versions_that_differ_are_named(it: Pushing, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = it.receivers[1]
    receive = engine.receive
    with monkeypatch.context() as patch:
        later = lambda own, push, load: receive(own, replace(push, version=push.version + 1), load)  # noqa: E731
        patch.setattr(engine, "receive", later)
        fails(it, r"engine 0 rank 1 was told to load version 2, and (trainer|engine 0) rank \d sends version 1")
    heals(it)


def test_a_rank_with_another_plan_is_named(it: Pushing) -> None:
    usual = it.receivers[1]
    it.receivers[1] = Receiver(replace(it.spec, bucket_bytes=4096), 1)
    it.session = secrets.token_hex(8)
    fails(it, r"engine 0 rank \d.*The two computed different plans")
    it.receivers[1].close()
    it.receivers[1] = usual
    heals(it)


@pytest.mark.parametrize("side", ["trainer", "engine"])
def test_tensors_that_are_not_the_declared_ones_are_named(it: Pushing, side: str) -> None:
    tensors = it.tensors[1] if side == "trainer" else it.parameters[1]
    name = min(tensors)
    usual = tensors.pop(name)
    it.session = secrets.token_hex(8)
    fails(it, rf"{side}.* rank 1: .*{re.escape(name)} is missing")
    tensors[name] = usual
    heals(it)


def test_strangers_at_a_listener_delay_nobody(it: Pushing, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come before every taker, and say garbage, nothing, half a greeting, or that theirs is 2 GB long."""
    create, made = socket.create_server, []

    def crowded(address: Any, **options: Any) -> socket.socket:
        listener = create(address, **options)
        for words in (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"", b"0123456789", struct.pack("!i", 2**31 - 1)):
            made.append(socket.create_connection(listener.getsockname()))
            made[-1].sendall(words)
        made.append(socket.create_connection(listener.getsockname()))
        made[-1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        made[-1].close()  # with a reset
        return listener

    it.session = secrets.token_hex(8)
    begin = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(socket, "create_server", crowded)
        heals(it)

    assert made
    assert time.monotonic() - begin < STALL_S
    for one in made:
        one.close()


def test_a_peer_that_no_longer_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "STALL_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        link = Link(socket.create_connection(listener.getsockname()), "engine 0 rank 1")
        theirs, _ = listener.accept()
    with theirs, pytest.raises(SyncError, match="engine 0 rank 1 has read nothing"):
        for _ in range(10_000):
            link.send(number=1, plan="x" * 10_000)


def test_tensors_may_move_between_pushes_of_one_session(it: Pushing) -> None:
    it.push()
    session = it.session
    for tensors in (*it.tensors.values(), *it.parameters):
        for name in tensors:
            tensors[name] = tensors[name].clone()

    heals(it)

    assert it.session == session
