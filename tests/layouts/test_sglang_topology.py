"""Places of an engine's ranks, by hand."""

from typing import Any

import pytest

from megatron_rl.errors import LayoutError
from megatron_rl.layouts.sglang_topology import SglangTopology


def test_ranks_that_cut_one_expert_are_neighbours() -> None:
    axes = [SglangTopology(tp=4, ep=2).axes(rank) for rank in range(4)]
    assert [a["ep"].rank for a in axes] == [0, 0, 1, 1]
    assert [a["moe_tp"].rank for a in axes] == [0, 1, 0, 1]
    assert [a["tp"].rank for a in axes] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("vocab", "tp", "padded"),
    [(61, 1, 64), (61, 4, 64), (65, 2, 128), (61, 3, 192), (129280, 32, 129280), (151936, 5, 152000)],
)
def test_vocabulary_is_padded_to_64_or_to_64_a_rank(vocab: int, tp: int, padded: int) -> None:
    # 61 over 3 ranks: 64 does not divide by 3, so a multiple of 64 * 3; 151936 over 5: 475 * 320.
    assert SglangTopology(tp=tp).padded_vocab(vocab, tp) == padded


def test_ranks_of_an_attention_group_are_neighbours_and_stages_follow_each_other() -> None:
    topology = SglangTopology(tp=4, ep=2, pp=2, dp_attention=2)
    axes = [topology.axes(rank) for rank in range(8)]
    assert [a["attn_tp"].rank for a in axes] == [0, 1, 0, 1] * 2
    assert [a["head_tp"].rank for a in axes] == [0, 1, 2, 3] * 2
    assert [a["ep"].rank for a in axes] == [0, 0, 1, 1] * 2
    assert [topology.chunk(rank, 4).layers for rank in (0, 3, 4, 7)] == [range(2), range(2), range(2, 4), range(2, 4)]


@pytest.mark.parametrize(("layers", "pp"), [(4, 1), (6, 4), (61, 4), (7, 7), (61, 16)])
def test_layers_are_where_sglang_puts_them(layers: int, pp: int) -> None:
    # Its get_pp_indices: the last ones of the stages have a layer more.
    each, rest = divmod(layers, pp)
    counts = [each] * (pp - rest) + [each + 1] * rest
    chunks = [SglangTopology(pp=pp).chunk(stage, layers) for stage in range(pp)]
    assert [len(c.layers) for c in chunks] == counts
    assert [layer for c in chunks for layer in c.layers] == list(range(layers))
    assert [c.has_embedding for c in chunks] == [True] + [False] * (pp - 1)
    assert [c.has_head for c in chunks] == [c.has_norm for c in chunks] == [False] * (pp - 1) + [True]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 4, "dp_attention": 3}, r"rollout.dp_attention=3 does not divide rollout.tp=4: .* one of 1, 2, 4\."),
        ({"tp": 4, "dp_lm_head": True}, r"rollout.dp_lm_head=true with rollout.dp_attention=1 has no effect"),
        ({"tp": 4, "moe_dense_tp": 2}, r"rollout.moe_dense_tp=2 with rollout.tp=4: .* to 1 or null\."),
    ],
)
def test_an_impossible_engine_is_refused_with_the_mend(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        SglangTopology(**sizes)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(LayoutError, match="An engine of 5 pipeline stages with a model of 4 layers"):
        SglangTopology(pp=5).chunk(0, 4)


def test_experts_over_a_share_of_the_ranks_that_does_not_divide_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"rollout.ep=3 does not divide rollout.tp=4.* one of 1, 2, 4\."):
        SglangTopology(tp=4, ep=3)
