"""Layouts by example: names, dtypes, refusals and scale. See test_coverage for random models and topologies."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_rl.errors import LayoutError
from megatron_rl.layouts.compile import check_megatron, check_sglang, hf_layouts, megatron_layouts, sglang_layouts
from megatron_rl.layouts.megatron_topology import MegatronTopology
from megatron_rl.layouts.sglang_topology import SglangTopology
from megatron_rl.models import load_table
from tests.layouts import reference
from tests.tiny import TINY

VOCAB = 61
HF: dict[str, dict[str, Any]] = {family: {**hf, "vocab_size": VOCAB} for family, hf in TINY.items()}
MODEL = {family: reference.whole_model(hf, vocab=VOCAB) for family, hf in HF.items()}


def of_family(family: str, topology: MegatronTopology) -> MegatronTopology:
    """The topology with the multi-token prediction layers of a family's tiny model."""
    return replace(topology, mtp_layers=HF[family].get("num_nextn_predict_layers", 0))


def equal(layouts: tuple[Any, ...], wanted: dict[str, np.ndarray], model: dict[str, np.ndarray]) -> None:
    names = [layout.name for layout in layouts]
    assert len(set(names)) == len(names)
    assert set(names) == set(wanted)
    for layout in layouts:
        np.testing.assert_array_equal(reference.fill(layout, model), wanted[layout.name], err_msg=layout.name)


@pytest.mark.parametrize("family", sorted(HF))
def test_hf_layouts_are_the_checkpoint_itself(family: str) -> None:
    equal(hf_layouts(load_table(HF[family]), dtype="bfloat16"), MODEL[family], MODEL[family])


@pytest.mark.parametrize("family", sorted(HF))
def test_every_row_is_made_of_the_same_hf_tensors_on_both_sides(family: str) -> None:
    table = load_table(HF[family])
    names = {layout.name for layout in hf_layouts(table, dtype="bfloat16")}
    megatron = megatron_layouts(table, of_family(family, MegatronTopology(1, 4)), 0, dtype="bfloat16")
    engine = sglang_layouts(table, SglangTopology(), 0, dtype="bfloat16")
    assert {box.hf for layout in megatron for box in layout.boxes} == names
    served = {name for name in names if not name.startswith("model.layers.4.")}  # no multi-token prediction
    assert {box.hf for layout in engine for box in layout.boxes} == served


def test_the_correction_bias_stays_float32_on_every_side() -> None:
    table = load_table(HF["deepseek_v3"])
    sides = (
        (megatron_layouts(table, MegatronTopology(1, 4, mtp_layers=1), 0, dtype="bfloat16"), 4),
        (sglang_layouts(table, SglangTopology(), 0, dtype="bfloat16"), 3),
        (hf_layouts(table, dtype="bfloat16"), 4),
    )
    for side, count in sides:
        pinned = {layout.name.rsplit(".", 1)[1] for layout in side if layout.dtype == "float32"}
        assert pinned <= {"expert_bias", "e_score_correction_bias"}
        assert sum(layout.dtype == "float32" for layout in side) == count  # layers 1, 2, 3, and prediction


@pytest.mark.parametrize(
    ("family", "sizes", "message"),
    [
        (
            "qwen3_moe",
            {"tp": 3},
            r"parallel.tp=3 does not divide .*key-value heads.* are 2.* 1, 2 or a multiple of 2\.",
        ),
        ("deepseek_v3", {"tp": 3}, r"parallel.tp=3 does not divide .*q_b_proj.*blocks of 24 rows.* one of 1, 2, 4\."),
        ("deepseek_v3", {"ep": 5}, r"parallel.ep=5 does not divide the experts.* one of 1, 2, 3, 4, 6, 12\."),
        ("llama", {"ep": 2}, r"parallel.ep=2: the model has no experts. Set it to 1\."),
        ("qwen3_moe", {"etp": 3}, r"parallel.etp=3 does not divide .*gate_proj.* of which there are 40"),
    ],
)
def test_a_cut_that_does_not_divide_is_refused_with_the_legal_sizes(family: str, sizes: Any, message: str) -> None:
    topology = of_family(family, MegatronTopology(world_size=60, num_layers=4, **sizes))
    with pytest.raises(LayoutError, match=message):
        check_megatron(load_table(HF[family]), topology)


def test_a_late_pipeline_stage_is_checked_too() -> None:
    # Layer 0 is dense: with pp=4 the first stage alone would let ep=5 pass.
    topology = MegatronTopology(world_size=20, num_layers=4, pp=4, ep=5, mtp_layers=1)
    megatron_layouts(load_table(HF["deepseek_v3"]), topology, 0, dtype="bfloat16")
    with pytest.raises(LayoutError, match="parallel.ep=5"):
        check_megatron(load_table(HF["deepseek_v3"]), topology)


def test_an_engine_repeats_key_value_heads_only_in_whole_multiples() -> None:
    table = load_table(HF["qwen3_moe"])
    check_sglang(table, SglangTopology(tp=4))
    with pytest.raises(LayoutError, match=r"rollout.tp=3 does not divide .*k_proj.*1, 2 or a multiple of 2"):
        check_sglang(table, SglangTopology(tp=3, ep=3))


def test_a_topology_for_another_depth_is_refused() -> None:
    with pytest.raises(LayoutError, match="places 6 layers .*the model has 4 and 0"):
        megatron_layouts(load_table(HF["qwen3_moe"]), MegatronTopology(1, 6), 0, dtype="bfloat16")
