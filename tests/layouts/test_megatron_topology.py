"""Places and layers of Megatron ranks, against megatron-core's own functions and by hand."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

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


def test_the_layers_of_each_stage_are_listed_chunk_after_chunk() -> None:
    assert MegatronTopology(2, 5, pp=2, first_stage_layers=2).stage_layers() == ["0-1", "2-4"]
    assert MegatronTopology(4, 8, pp=2, vpp=2, tp=2).stage_layers() == ["0-1, 4-5", "2-3, 6-7"]
    assert MegatronTopology(3, 2, pp=3, pipeline_layout="Et|t|L").stage_layers() == ["0-0", "1-1", "none"]


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


def cuts() -> list[dict[str, Any]]:
    """Splits that come out even, without a layout string: keyword values of MegatronTopology."""
    found = []
    sizes = itertools.product((4, 7, 12), (1, 2, 3, 4), (None, 2), (None, 1, 2, 3), (None, 1, 2, 4))
    for layers, pp, vpp, first, last in sizes:
        if pp == 1 and (first or last or vpp):
            continue
        middle, rest = pp - bool(first) - bool(last), layers - (first or 0) - (last or 0)
        stages = {first or 0, last or 0, rest // middle if middle else 0}
        even = rest == 0 and not vpp if middle == 0 else rest > 0 and rest % middle == 0
        if even and all(n % (vpp or 1) == 0 for n in stages):
            ends = {"first_stage_layers": first, "last_stage_layers": last}
            found.append({"num_layers": layers, "pp": pp, "vpp": vpp, **ends})
    for layers, pp, vpp, with_embedding, with_loss in itertools.product(
        (2, 3, 5, 6, 7, 10, 11), (2, 3, 4), (None, 2, 3), (False, True), (False, True)
    ):
        accounts = {"account_for_embedding": with_embedding, "account_for_loss": with_loss}
        if (layers + with_embedding + with_loss) % (pp * (vpp or 1)) == 0:
            found.append({"num_layers": layers, "pp": pp, "vpp": vpp, **accounts})
    return found


def test_layers_lie_where_megatron_core_puts_them() -> None:
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    checked = standalone = 0
    for cut in cuts():
        topology = MegatronTopology(world_size=cut["pp"], **cut)
        config = SimpleNamespace(
            num_layers=topology.num_layers,
            pipeline_model_parallel_size=topology.pp,
            virtual_pipeline_model_parallel_size=topology.vpp,
            num_layers_in_first_pipeline_stage=topology.first_stage_layers,
            num_layers_in_last_pipeline_stage=topology.last_stage_layers,
            pipeline_model_parallel_layout=None,
            account_for_embedding_in_pipeline_split=topology.account_for_embedding,
            account_for_loss_in_pipeline_split=topology.account_for_loss,
        )
        held = []
        for rank in range(topology.pp):
            for c, chunk in enumerate(topology.chunks(rank)):
                stage = None if topology.vpp is None else c
                assert len(chunk.layers) == get_num_layers_to_build(config, vp_stage=stage, pp_rank=rank)
                if chunk.layers:
                    assert chunk.layers.start == get_transformer_layer_offset(config, vp_stage=stage, pp_rank=rank)
                standalone += not chunk.layers
                held += chunk.layers
                checked += 1
        assert sorted(held) == list(range(topology.num_layers))
    assert checked > 200 and standalone > 5


@st.composite
def layout_strings(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """(layout string, sizes): often legal, with one letter changed at times."""
    layers, mtp = draw(st.integers(1, 6)), draw(st.sampled_from([0, 0, 1, 2]))
    pp, vpp = draw(st.sampled_from([(1, None), (2, None), (3, None), (4, None), (2, 2), (3, 2), (2, 3)]))
    letters = ["E", *"t" * layers, *"m" * mtp, "L"]
    bars = pp * (vpp or 1) - 1
    places = draw(st.lists(st.integers(draw(st.sampled_from([0, 1])), layers + mtp + 1), min_size=bars, max_size=bars))
    for place in sorted(places, reverse=True):
        letters.insert(place, "|")
    if draw(st.integers(0, 3)) == 0:
        letters[draw(st.integers(0, len(letters) - 1))] = draw(st.sampled_from(["", "|", "t", "m", "E", "x", "t*2"]))
    return "".join(letters), {"num_layers": layers, "mtp_layers": mtp, "pp": pp, "vpp": vpp}


@settings(max_examples=300, deadline=None)
@given(drawn=layout_strings())
@example(drawn=("E|(t|)*2,t*2|L", {"num_layers": 4, "mtp_layers": 0, "pp": 5, "vpp": None}))
@example(drawn=("Et*3|(tt|)*29,m|L", {"num_layers": 61, "mtp_layers": 1, "pp": 16, "vpp": 2}))
@example(drawn=("|Ett|L", {"num_layers": 2, "mtp_layers": 0, "pp": 3, "vpp": None}))
def test_a_layout_string_means_what_megatron_core_makes_of_it(drawn: tuple[str, dict[str, Any]]) -> None:
    from megatron.core import parallel_state
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    text, sizes = drawn
    pp, vpp = sizes["pp"], sizes["vpp"]
    try:
        theirs = PipelineParallelLayerLayout(text, pp)
        assert theirs.virtual_pipeline_model_parallel_size == (vpp or 1)
        theirs.validate_layer_layout(sizes["num_layers"], sizes["mtp_layers"] or None)
        # It puts the embedding into the first part and the output layer into the last, even if the string does not.
        assert theirs.layout[0][0][:1] == [LayerType.embedding] and theirs.layout[-1][-1][-1:] == [LayerType.loss]
        assert pp > 1
    except (AssertionError, IndexError):
        with pytest.raises(LayoutError, match="parallel.pipeline_layout="):
            MegatronTopology(world_size=pp, pipeline_layout=text, **sizes)
        return
    topology = MegatronTopology(world_size=pp, pipeline_layout=text, **sizes)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(vpp)
    try:
        for rank in range(pp):
            for c, chunk in enumerate(topology.chunks(rank)):
                assert list(chunk.layers) == theirs.get_layer_id_list(LayerType.decoder, vp_stage=c, pp_rank=rank)
                assert chunk.has_mtp == bool(theirs.get_num_layers_to_build(LayerType.mtp, vp_stage=c, pp_rank=rank))
    finally:
        parallel_state.set_virtual_pipeline_model_parallel_world_size(None)


def test_prediction_layers_bring_an_embedding_and_part_norm_and_head() -> None:
    # MTP alone on the next to last stage; the last decoder layer, and with it the norm, is before it.
    topology = MegatronTopology(4, 4, pp=4, mtp_layers=2, pipeline_layout="Ett|tt|mm|L")
    chunks = [topology.chunks(rank)[0] for rank in range(4)]
    assert [c.has_embedding for c in chunks] == [True, False, True, False]
    assert [c.has_norm for c in chunks] == [False, True, False, False]
    assert [c.has_mtp for c in chunks] == [False, False, True, False]
    assert [c.has_head for c in chunks] == [False, False, False, True]
    # Without a string they are on the last stage, where no decoder layer need be.
    topology = MegatronTopology(2, 1, pp=2, mtp_layers=1, account_for_loss=True)
    assert [(c.has_norm, c.has_mtp) for rank in range(2) for c in topology.chunks(rank)] == [
        (True, False),
        (False, True),
    ]


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
        ({"world_size": 2, "pp": 2, "first_stage_layers": 0}, r"0 of them in the first stage.* at least one"),
        (
            {"world_size": 2, "pp": 2, "account_for_loss": True},
            r"4 layers and 1 for .* are 5, which parallel.pp=2 does",
        ),
        ({"world_size": 1, "account_for_loss": True}, r"account_for_loss=true with parallel.pp=1 has no effect"),
        ({"world_size": 1, "pipeline_layout": "Et*4L"}, r"pipeline_layout='Et\*4L' with parallel.pp=1 has no effect"),
        (
            {"world_size": 2, "pp": 2, "pipeline_layout": "Ett|ttL", "last_stage_layers": 2},
            r"last_stage_layers=2 and parallel.pipeline_layout='Ett\|ttL': .* Keep one\.",
        ),
        ({"world_size": 2, "pp": 2, "pipeline_layout": "Ett|tT|L"}, r"has 'T': known are E \(embedding\), t"),
        ({"world_size": 2, "pp": 2, "pipeline_layout": "Et|t|t|tL"}, r"has 4 parts, .*needs 2.* Set parallel.vpp=2\."),
        ({"world_size": 2, "pp": 2, "pipeline_layout": "Et|t|tL"}, r"has 3 parts, .*needs 2.* Write as many\."),
        ({"world_size": 2, "pp": 2, "pipeline_layout": "Ett|tL"}, r"places 3 decoder layers, the model has 4"),
        (
            {"world_size": 2, "pp": 2, "pipeline_layout": "Ett|ttmL"},
            r"places 1 prediction \(MTP\) layers, the model has 0",
        ),
        ({"world_size": 3, "pp": 3, "pipeline_layout": "|Ett|ttL"}, r"must begin its first part with the only E"),
        ({"world_size": 2, "pp": 2, "pipeline_layout": "Ett|tmtL", "mtp_layers": 1}, r"with every m behind every t"),
        ({"world_size": 2, "pp": 2, "pipeline_layout": "Ettttm|mL", "mtp_layers": 2}, r"spreads its m over several"),
    ],
)
def test_an_impossible_cut_is_refused_with_the_mend(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        MegatronTopology(num_layers=4, **sizes)
