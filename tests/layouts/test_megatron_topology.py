"""Places and layers of Megatron ranks, against megatron-core's own functions and by hand."""

import itertools
from types import SimpleNamespace

import pytest

from megatron_rl.errors import LayoutError
from megatron_rl.layouts.megatron_topology import MegatronTopology


def test_ranks_of_two_stages_by_hand() -> None:
    # tp fastest, then dp, then pp: ranks 0-3 are stage 0, and of them 2 and 3 are the second replica.
    topology = MegatronTopology(8, 4, tp=2, pp=2, ep=2)
    at = [topology.coordinates(rank) for rank in range(8)]
    assert [a.pp for a in at] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [a.tp for a in at] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [a.dp for a in at] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [a.ep for a in at] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [a.edp for a in at] == [0, 0, 1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("tp", "cp", "dp", "pp", "ep", "etp"),
    [
        (2, 1, 1, 1, 1, 1),
        (2, 2, 3, 2, 1, 1),
        (1, 1, 8, 2, 4, 2),
        (4, 1, 2, 3, 2, 2),
        (2, 2, 2, 2, 8, 1),
        (2, 1, 4, 1, 2, 1),
    ],
)
def test_groups_of_ranks_are_those_of_megatron_core(tp: int, cp: int, dp: int, pp: int, ep: int, etp: int) -> None:
    from megatron.core.parallel_state import RankGenerator

    world = tp * cp * dp * pp
    topology = MegatronTopology(world, 12, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp)
    order = "tp-cp-ep-dp-pp"  # the default of initialize_model_parallel
    edp = world // (ep * etp * pp)
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    expert = RankGenerator(tp=etp, ep=ep, dp=edp, pp=pp, cp=1, order=order)
    ours = {"tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp"}
    grids = [
        (dense, ours, ("tp", "cp", "dp", "pp")),
        (expert, {"tp": "etp", "ep": "ep", "dp": "edp"}, ("etp", "ep", "edp", "pp")),
    ]
    for generator, names, grid in grids:
        for theirs, mine in names.items():
            # Ranks of a group, in order, count up along the axis and agree on every other one of the grid.
            for group in generator.get_ranks(theirs):
                places = [topology.coordinates(rank) for rank in group]
                assert [getattr(p, mine) for p in places] == list(range(len(group)))
                for other in set(grid) - {mine}:
                    assert len({getattr(p, other) for p in places}) == 1


def cuts() -> list[tuple[int, int, int | None, int | None, int | None]]:
    """(layers, pp, vpp, first, last) that come out even."""
    found = []
    for layers, pp, vpp, first, last in itertools.product(
        (4, 7, 12), (1, 2, 3, 4), (None, 2), (None, 1, 2, 3), (None, 1, 2, 4)
    ):
        if pp == 1 and (first or last or vpp):
            continue
        middle, rest = pp - bool(first) - bool(last), layers - (first or 0) - (last or 0)
        stages = {first or 0, last or 0, rest // middle if middle else 0}
        even = rest == 0 and not vpp if middle == 0 else rest > 0 and rest % middle == 0
        if even and all(n % (vpp or 1) == 0 for n in stages):
            found.append((layers, pp, vpp, first, last))
    return found


def test_layers_lie_where_megatron_core_puts_them() -> None:
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    checked = 0
    for layers, pp, vpp, first, last in cuts():
        topology = MegatronTopology(pp, layers, 1, pp, vpp, first_stage_layers=first, last_stage_layers=last)
        config = SimpleNamespace(
            num_layers=layers,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
            num_layers_in_first_pipeline_stage=first,
            num_layers_in_last_pipeline_stage=last,
            pipeline_model_parallel_layout=None,
            account_for_embedding_in_pipeline_split=False,
            account_for_loss_in_pipeline_split=False,
        )
        held = []
        for rank in range(pp):
            for c, chunk in enumerate(topology.chunks(rank)):
                stage = None if vpp is None else c
                assert len(chunk.layers) == get_num_layers_to_build(config, vp_stage=stage, pp_rank=rank)
                if chunk.layers:
                    assert chunk.layers.start == get_transformer_layer_offset(config, vp_stage=stage, pp_rank=rank)
                held += chunk.layers
                checked += 1
        assert sorted(held) == list(range(layers))
    assert checked > 100


def test_embedding_and_head_are_on_the_first_and_last_chunk_only() -> None:
    topology = MegatronTopology(3, 12, pp=3, vpp=2)
    chunks = {(rank, c): chunk for rank in range(3) for c, chunk in enumerate(topology.chunks(rank))}
    assert [place for place, chunk in chunks.items() if chunk.has_embedding] == [(0, 0)]
    assert [place for place, chunk in chunks.items() if chunk.has_head] == [(2, 1)]
    assert chunks[1, 1].layers == range(8, 10)  # parts of two layers: 0 1 2 on chunk 0, 3 4 5 on chunk 1


def test_vocabulary_is_padded_to_eight_rows_a_rank() -> None:
    assert MegatronTopology(1, 4).padded_vocab(61) == 64
    assert MegatronTopology(4, 4, tp=4).padded_vocab(65) == 96
    assert MegatronTopology(8, 4, tp=8).padded_vocab(129280) == 129280


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"world_size": 6, "tp": 4}, r"world_size=6 is not a multiple of parallel.tp=4 x .* = 4: .* multiple of 4"),
        ({"world_size": 4, "ep": 4, "etp": 2}, r"world_size=4 is not a multiple of parallel.ep=4 x parallel.etp=2"),
        ({"world_size": 2, "vpp": 2}, r"parallel.vpp=2 with parallel.pp=1: .*Set parallel.pp to at least 2"),
        ({"world_size": 3, "pp": 3}, r"4 layers, leave 4 for 3 of parallel.pp=3 stages: .* one of 1, 2, 4\."),
        ({"world_size": 2, "pp": 2, "first_stage_layers": 4}, r"4 of them in the first stage, leave 0 for 1"),
        ({"world_size": 1, "first_stage_layers": 3}, r"3 of them in the first stage, leave 1 for 0"),
        (
            {"world_size": 2, "pp": 2, "vpp": 2, "first_stage_layers": 2, "last_stage_layers": 2},
            r"parallel.vpp=2 with parallel.pp=2 and both .* Set one of the two to null",
        ),
        ({"world_size": 2, "pp": 2, "vpp": 4}, r"parallel.vpp=4 does not divide the layers .*\[2, 2\]"),
    ],
)
def test_an_impossible_cut_is_refused_with_the_mend(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        MegatronTopology(num_layers=4, **sizes)
