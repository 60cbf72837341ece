"""Each part of a message is proved before it is written, and both sides cut a message into the same parts."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.errors import SyncError
from megatron_rl.layouts.megatron_topology import MegatronTopology
from megatron_rl.layouts.sglang_topology import SglangTopology
from megatron_rl.resharding import views
from megatron_rl.resharding.arrival import proved
from megatron_rl.resharding.delta import Rebuild
from megatron_rl.resharding.messages import Message, Part, Piece
from megatron_rl.resharding.schedule import make_schedule, receives, sends
from megatron_rl.resharding.spec import SyncSpec
from megatron_rl.resharding.timer import Timer
from tests.fp8_models import FP8
from tests.resharding.pushing import TRAINERS, VOCAB, make_spec

LEAST_BYTES = 64


def message_of(*pieces: Piece, nbytes: int) -> Message:
    return Message(7, 3, (1,), "node", 1, nbytes, sum(p.nbytes for p in pieces), "digest", pieces)


WORDS = message_of(
    Piece("a", (0,), (5,), "float32", 0),  # 20 bytes, and 12 of alignment
    Piece("b", (0,), (7,), "float32", 32),
    Piece("c", (0,), (40,), "float32", 64),  # more than a part by itself
    Piece("d", (0,), (16,), "float32", 224),
    Piece("e", (0,), (1,), "float32", 288),
    nbytes=304,
)


def where(parts: list[Part]) -> list[tuple[int, int, str]]:
    return [(part.start, part.end, part.content) for part in parts]


def test_a_message_is_cut_between_rectangles_and_its_last_part_is_what_is_left() -> None:
    assert where(WORDS.parts(LEAST_BYTES)) == [(0, 64, "a ... b"), (64, 224, "c"), (224, 288, "d"), (288, 304, "e")]
    assert where(WORDS.parts(65)) == [(0, 224, "a ... c"), (224, 304, "d ... e")]
    assert where(WORDS.parts(304)) == [(0, 304, "a ... e")]


def test_a_rectangle_stays_with_its_scales_and_where_it_is_held_once_more() -> None:
    both = Piece("w", (0, 0), (7, 9), "float8_e4m3fn", 0), Piece("w_scale_inv", (0, 0), (1, 1), "float32", 64)
    again = Piece("v", (0, 0), (7, 9), "float8_e4m3fn", 0), Piece("v_scale_inv", (0, 0), (1, 1), "float32", 64)
    last = Piece("x", (0, 0), (2, 3), "float8_e4m3fn", 80), Piece("x_scale_inv", (0, 0), (1, 1), "float32", 88)

    assert where(message_of(*both, *again, *last, nbytes=96).parts(LEAST_BYTES)) == [
        (0, 80, "w ... v_scale_inv"),
        (80, 96, "x ... x_scale_inv"),
    ]


def fp8_spec(family: str) -> SyncSpec:
    hf = FP8[family] | {"vocab_size": VOCAB}
    trainer = MegatronTopology(**TRAINERS["tp2_ep2"], num_layers=4, mtp_layers=hf.get("num_nextn_predict_layers", 0))
    return SyncSpec(hf, trainer, SglangTopology(tp=2), "bfloat16", "bfloat16", fp8=True, bucket_bytes=1 << 17)


@pytest.mark.parametrize(
    "spec",
    [
        *(make_spec(family, "pp2_vpp2_ep2", "tp2_ep2", "bfloat16") for family in ("deepseek_v3", "glm4_moe")),
        *map(fp8_spec, ("deepseek_v3", "qwen3_moe")),
    ],
    ids=["deepseek_v3", "glm4_moe", "deepseek_v3, FP8", "qwen3_moe, FP8"],
)
@pytest.mark.parametrize("least_bytes", [1, 100, 5000, 1 << 30])
def test_both_sides_cut_a_message_alike(spec: SyncSpec, least_bytes: int) -> None:
    schedule = make_schedule(spec)
    cuts: dict[int, set[tuple[tuple[int, int], ...]]] = {}
    for message in [m for rank in range(4) for m in sends(schedule, rank)] + [
        m for reader in range(spec.readers) for m in receives(schedule, reader)
    ]:
        parts = message.parts(least_bytes)
        assert [piece for part in parts for piece in part.pieces] == list(message.pieces)
        assert all(p.start <= piece.at and piece.at + piece.nbytes <= p.end for p in parts for piece in p.pieces)
        assert [p.end for p in parts] == [*(p.start for p in parts[1:]), message.nbytes] and parts[0].start == 0
        cuts.setdefault(message.number, set()).add(tuple((p.start, p.end) for p in parts))
    assert all(len(found) == 1 for found in cuts.values())
    assert any(len(parts) > 1 for (parts,) in cuts.values()) == (least_bytes < 1 << 30)


def arriving(memory: Tensor, checksums: list[str], timer: Timer) -> list[Part]:
    """The parts that were proved; the first that was not is the end."""
    news: dict[str, Any] = {"nbytes": WORDS.nbytes, "checksums": checksums, "delta": None}
    found = []
    try:
        for part, whole in proved(
            WORDS, news, memory, me="engine 0 rank 1", giver="trainer rank 3", rebuild=NO_REBUILD, timer=timer
        ):
            assert whole is memory
            found.append(part)
    except SyncError as error:
        at = len(found)
        part = WORDS.parts(LEAST_BYTES)[at]
        told = f"engine 0 rank 1: the {part.end - part.start} bytes at {part.start} of message 7 from trainer rank 3"
        assert str(error).startswith(f"{told} ({part.content}) arrived with checksum "), error
        assert f"sent with {checksums[at]}. Push again." in str(error)
    return found


NO_REBUILD = Rebuild("engine 0 rank 1", {}, 0)


def test_whichever_byte_differs_its_part_is_named_and_nothing_from_there_on_is_handed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(views, "PART_BYTES", LEAST_BYTES)
    random_bits = random.Random(0)
    memory, timer = torch.full((WORDS.nbytes,), 255, dtype=torch.uint8), Timer()
    tensors = {p.tensor: torch.arange(p.shape[0]) * 0.37 + p.at for p in WORDS.pieces}
    checksums = views.pack(views.packing(memory, WORDS, tensors), timer)
    parts = WORDS.parts(LEAST_BYTES)
    assert torch.equal(memory[64:224].view(torch.float32), tensors["c"])
    assert arriving(memory, checksums, timer) == parts

    for at in range(WORDS.nbytes):
        bit = 1 << random_bits.randrange(8)
        memory[at] ^= bit
        assert arriving(memory, checksums, timer) == [part for part in parts if part.end <= at]
        memory[at] ^= bit
    for i, j in ((0, 1), (2, 0), (3, 2)):  # right bytes in another part's place
        assert arriving(memory, [*checksums[:i], checksums[j], *checksums[i + 1 :]], timer) == parts[:i]
