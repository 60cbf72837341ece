"""Places of an engine's ranks, by hand."""

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
    assert SglangTopology(tp=tp).padded_vocab(vocab) == padded


def test_experts_over_a_share_of_the_ranks_that_does_not_divide_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"rollout.ep=3 does not divide rollout.tp=4.* one of 1, 2, 4\."):
        SglangTopology(tp=4, ep=3)
