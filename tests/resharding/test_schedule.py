"""The messages of a sync, carried out on real bytes in this process: every family, over pairs of topologies."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest

from megatron_rl.layouts.megatron_topology import MegatronTopology
from megatron_rl.layouts.sglang_topology import SglangTopology
from megatron_rl.models import FAMILIES
from megatron_rl.resharding.messages import ALIGN_BYTES, Message
from megatron_rl.resharding.schedule import Schedule, make_schedule, needed_bytes, receives, sends
from megatron_rl.resharding.spec import Placement, SyncSpec
from tests.layouts import reference
from tests.layouts.reference_ranks import engine_ranks, megatron_ranks, mtp_layers
from tests.layouts.test_coverage import leave_out_what_the_family_lacks, window
from tests.tiny import TINY

Arrays = dict[int, dict[str, np.ndarray]]
LAYERS, VOCAB, SIZE = 6, 67, 4
SMALL = {  # of the keys that a config has; what the layouts cut still divides by 4
    **{"intermediate_size": 20, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 28, "head_dim": 3},
    **{"q_lora_rank": 6, "kv_lora_rank": 2, "qk_nope_head_dim": 5, "qk_rope_head_dim": 1, "v_head_dim": 7},
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), 4),
}


def small(hf: dict[str, Any]) -> dict[str, Any]:
    sizes = {key: value for key, value in SMALL.items() if hf.get(key) is not None}
    hidden = 12 if "head_dim" in hf or "kv_lora_rank" in hf else 2 * hf["num_attention_heads"]
    return {**hf, **sizes, "hidden_size": hidden, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}


CONFIGS = [small(hf) for hf in TINY.values()]
CONFIGS += [{**CONFIGS[i], "tie_word_embeddings": False} for i, hf in enumerate(CONFIGS) if hf["tie_word_embeddings"]]
TRAINERS: list[dict[str, Any]] = [
    {"world_size": 1},
    {"world_size": 4, "tp": 2, "ep": 2},
    {"world_size": 4, "tp": 4, "ep": 4},
    {"world_size": 4, "pp": 2, "vpp": 3, "ep": 2},
    {"world_size": 6, "pp": 3, "tp": 2, "etp": 2},
    {"world_size": 8, "pp": 2, "first_stage_layers": 2, "ep": 2, "etp": 2},
    {"world_size": 8, "tp": 2, "cp": 2, "ep": 4},
    {"world_size": 8, "pp": 4, "account_for_embedding": True, "account_for_loss": True, "ep": 2},
    {"world_size": 4, "pp": 2, "tp": 2, "ep": 2, "pipeline_layout": "Ett|tttt{m}L"},
    {"world_size": 8, "pp": 2, "vpp": 2, "tp": 2, "cp": 2, "ep": 4, "pipeline_layout": "Et|tt|t|tt{m}L"},
]
ENGINES: list[dict[str, Any]] = [
    {"tp": 1},
    {"tp": 2},
    {"tp": 4, "ep": 2},
    {"tp": 1, "pp": 2},
    {"tp": 2, "pp": 2, "ep": 2},
    {"tp": 1, "pp": 3},
    {"tp": 4, "ep": 4, "dp_attention": 4, "moe_dense_tp": 1},
    {"tp": 2, "ep": 2, "dp_attention": 2, "dp_lm_head": True},
    {"tp": 4, "dp_attention": 2, "moe_dense_tp": 4},
]
NONE = ("first_stage_layers", "last_stage_layers", "pipeline_layout", "vpp")
FALSE = ("account_for_embedding", "account_for_loss", "dp_lm_head")


def complete(sizes: dict[str, Any], *others: str) -> dict[str, Any]:
    """Every field of a topology."""
    values = dict.fromkeys(NONE) | dict.fromkeys(FALSE, False) | {"moe_dense_tp": None}
    return {key: sizes.get(key, values.get(key, 1)) for key in others}


def pairs(architecture: str) -> list[tuple[int, dict[str, Any], dict[str, Any]]]:
    """(number of a config, trainer, engine) without repetition; what a family lacks is left out."""
    ours = [i for i, hf in enumerate(CONFIGS) if hf["architectures"] == [architecture]]
    found = {}
    for (t, trainer), (e, engine) in product(enumerate(TRAINERS), enumerate(ENGINES)):
        fit = [i for i in ours if engine.get("pp", 1) == 1 or not CONFIGS[i]["tie_word_embeddings"]]
        number = fit[(t + e) % len(fit)]
        trainer = complete(trainer, "world_size", "tp", "pp", "cp", "ep", "etp", *NONE, *FALSE[:2])
        engine = complete(engine, "tp", "ep", "pp", "dp_attention", "dp_lm_head", "moe_dense_tp")
        leave_out_what_the_family_lacks(CONFIGS[number], trainer, engine)
        if trainer["pipeline_layout"]:
            letters = "m" * mtp_layers(CONFIGS[number])
            trainer["pipeline_layout"] = trainer["pipeline_layout"].format(m=letters)
        found.setdefault(str((trainer, engine)), (number, trainer, engine))
    return list(found.values())


@cache
def ids(number: int) -> dict[str, np.ndarray]:
    return reference.whole_model(CONFIGS[number], vocab=VOCAB)


def place(kind: int, trainers: int, readers: int) -> Placement | None:
    """All on one node; nodes of two, apart; nodes of four that both share, device by device; some shared."""
    if kind == 0:
        return None
    per_node, first = ((2, -(-trainers // 2) * 2), (4, 0), (3, trainers // 2))[kind - 1]
    at = [divmod(i, per_node) for i in range(first + max(trainers, readers))]
    return Placement(tuple(at[:trainers]), tuple(at[first : first + readers]))


def carry_out(schedule: Schedule, held: Arrays, wanted: Arrays) -> tuple[Arrays, dict[int, list[Message]]]:
    """Pack every message into bytes, in order, and unpack them. Asserts what holds for each message."""
    spec = schedule.spec
    sent: dict[int, tuple[Message, np.ndarray]] = {}
    for rank, tensors in held.items():
        messages = sends(schedule, rank)
        assert [m.number for m in messages] == sorted({m.number for m in messages})
        for message in messages:
            packed = np.zeros(message.nbytes, np.uint8)
            assert message.src == rank and message.number not in sent and message.nbytes <= spec.bucket_bytes
            for piece in message.pieces:
                room = packed[piece.at : piece.at + piece.nbytes].view(np.uint32).reshape(piece.shape)
                assert piece.at % ALIGN_BYTES == 0 and not room.any()
                room[...] = window(tensors[piece.tensor], piece.offset, piece.shape) + 1
            sent[message.number] = replace(message, pieces=()), packed
    got: Arrays = {}
    received: dict[int, list[Message]] = {}
    unread = {number: set(message.readers) for number, (message, _) in sent.items()}
    for reader, tensors in wanted.items():
        got[reader] = {name: np.full(t.shape, -1) for name, t in tensors.items()}
        received[reader] = list(receives(schedule, reader))
        assert [m.number for m in received[reader]] == sorted({m.number for m in received[reader]})
        for message in received[reader]:
            header, packed = sent[message.number]
            assert header == replace(message, pieces=()) and message.fetcher in message.readers
            unread[message.number].remove(reader)
            assert sum(p.nbytes for p in message.pieces) == message.payload_bytes
            for piece in message.pieces:
                target = window(got[reader][piece.tensor], piece.offset, piece.shape)
                assert (target == -1).all(), "written twice"
                target[...] = packed[piece.at : piece.at + piece.nbytes].view(np.uint32).reshape(piece.shape) - 1
    assert not any(unread.values())
    return got, received


def elements(ranks: Iterable[dict[str, np.ndarray]], total: int) -> np.ndarray:
    """[total] which ids the ranks hold."""
    held = np.zeros(total + 1, bool)  # the last one is that of padding, -1
    for tensors in ranks:
        for tensor in tensors.values():
            held[tensor] = True
    return held[:-1]


def check_bytes(schedule: Schedule, held: Arrays, wanted: Arrays, received: dict[int, list[Message]]) -> None:
    """What each reader got is what its device lacked, and what crossed to each node, once, what the node lacked."""
    placed = schedule.spec.placed()
    total = 1 + max(int(t.max()) for ranks in (held, wanted) for tensors in ranks.values() for t in tensors.values())
    for reader, tensors in wanted.items():
        near = [held[r] for r, at in enumerate(placed.trainers) if at == placed.engines[reader]]
        lacks = (elements([tensors], total) & ~elements(near, total)).sum()
        arrived = sum(m.payload_bytes for m in received[reader] if m.kind != "local")
        assert arrived == lacks * SIZE == needed_bytes(schedule, reader)
    for node in {node for node, _ in placed.engines}:
        here = [r for r, at in enumerate(placed.engines) if at[0] == node]
        near = [held[r] for r, at in enumerate(placed.trainers) if at[0] == node]
        lacks = (elements([wanted[r] for r in here], total) & ~elements(near, total)).sum()
        crossed = {m.number: m for r in here for m in received[r] if m.kind == "network"}
        assert all(placed.engines[r][0] == node for m in crossed.values() for r in m.readers)
        assert sum(m.payload_bytes for m in crossed.values()) == lacks * SIZE


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_messages_bring_every_rank_its_own_elements_once_and_nothing_else(architecture: str) -> None:
    cases = pairs(architecture)
    assert len(cases) >= 60
    known: dict[str, Arrays] = {}
    kinds: Counter[str] = Counter()
    for i, (number, trainer, engine) in enumerate(cases):
        hf = CONFIGS[number]
        for ranks, sizes in ((megatron_ranks, trainer), (engine_ranks, engine)):
            if (key := f"{number} {sizes}") not in known:
                known[key] = ranks(hf, ids(number), sizes)
        held, one = known[f"{number} {trainer}"], known[f"{number} {engine}"]
        engines = 1 + i % 2
        wanted = {e * len(one) + r: tensors for e in range(engines) for r, tensors in one.items()}
        spec = SyncSpec(
            *(hf, MegatronTopology(num_layers=LAYERS, mtp_layers=mtp_layers(hf), **trainer), SglangTopology(**engine)),
            *("float32", "float32"),
            engines=engines,
            bucket_bytes=(100, 3000, 64 << 20)[i % 3],
            placement=place(i // 2 % 4, len(held), len(wanted)),
        )
        schedule = make_schedule(spec)
        got, received = carry_out(schedule, held, wanted)
        for reader, tensors in wanted.items():
            assert got[reader].keys() == tensors.keys()
            for name, want in tensors.items():
                assert np.array_equal(got[reader][name], want), (trainer, engine, reader, name)
        check_bytes(schedule, held, wanted, received)
        kinds.update(m.kind for messages in received.values() for m in messages)
    assert kinds.keys() == {"local", "node", "network"}
