"""Random models and topologies of both systems: every rank's tensors, and a sync and an export, against the reference.

A drawn topology may be impossible: then the reference has no answer, and ours must be a LayoutError.
"""

from collections import Counter
from typing import Any

import numpy as np
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from megatron_rl.errors import LayoutError
from megatron_rl.layouts.boxes import TensorLayout
from megatron_rl.layouts.compile import hf_layouts, megatron_layouts, sglang_layouts
from megatron_rl.layouts.megatron_topology import MegatronTopology
from megatron_rl.layouts.sglang_topology import SglangTopology
from megatron_rl.layouts.table import Table
from megatron_rl.models import FAMILIES, load_table
from megatron_rl.resharding.plan import Copy, make_plan
from tests.layouts import reference
from tests.layouts.reference import PLAIN_TP, WHOLE_DENSE
from tests.layouts.reference_ranks import HEAD_OVER_ALL, engine_ranks, has_experts, megatron_ranks
from tests.tiny import TINY

Layouts = dict[int, tuple[TensorLayout, ...]]
Arrays = dict[int, dict[str, np.ndarray]]
few = st.sampled_from([1, 1, 2, 2, 3])
seldom = st.integers(0, 14).map(lambda n: n == 0)


@st.composite
def trainers(draw: st.DrawFn, mtp: int) -> tuple[int, dict[str, Any]]:
    """(layers of a model, fields of a MegatronTopology), possible or not; `mtp`: its multi-token prediction layers."""
    pp = draw(st.sampled_from([1, 2, 2, 3, 4]))
    vpp = draw(st.sampled_from([None, None, 2])) if pp > 1 or draw(seldom) else None
    chunks, extra = vpp or 1, draw(seldom)
    cut = dict.fromkeys(("first_stage_layers", "last_stage_layers", "pipeline_layout"))
    accounts = {"account_for_embedding": False, "account_for_loss": False}
    layers = pp * chunks * draw(st.sampled_from([1, 1, 2])) + extra
    match draw(st.sampled_from(["even", "uneven", "accounts", "layout"])) if pp > 1 or draw(seldom) else "even":
        case "uneven":
            first, last = draw(st.sampled_from([(None, 1), (1, None), (2, None), (2, 1), (1, 2)]))
            cut["first_stage_layers"] = first and first * chunks
            cut["last_stage_layers"] = last and last * chunks
            middle = pp - bool(first) - bool(last)
            layers = chunks * ((first or 0) + (last or 0) + middle * draw(st.sampled_from([1, 2]))) + extra
        case "accounts":
            accounts = {key: draw(st.booleans()) for key in accounts}
            layers = max(layers - sum(accounts.values()), 1)
        case "layout":
            layers = draw(st.integers(1, 6))
            letters, bars = ["E", *"t" * (layers + extra), *"m" * mtp, "L"], pp * chunks - 1
            places = draw(st.lists(st.integers(1, layers + mtp + 1), min_size=bars, max_size=bars))
            for at in sorted(places, reverse=True):
                letters.insert(at, "|")
            cut["pipeline_layout"] = "".join(letters)
    tp, cp, ep, etp = draw(few), draw(st.sampled_from([1, 1, 2])), draw(few), draw(st.sampled_from([1, 1, 2, 3]))
    stage = int(np.lcm(tp * cp, ep * etp)) * draw(st.sampled_from([1, 1, 2]))
    world = pp * stage + draw(seldom)
    sizes = {"world_size": world, "tp": tp, "pp": pp, "vpp": vpp, "cp": cp, "ep": ep, "etp": etp}
    return max(layers, 1), {**sizes, **cut, **accounts}


@st.composite
def engines(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of an SglangTopology, possible or not."""
    tp = draw(st.sampled_from([1, 2, 2, 3, 4, 4, 6]))
    divisors = st.sampled_from([n for n in range(1, tp + 1) if tp % n == 0 or draw(seldom)])
    dp = draw(divisors)
    return {
        "tp": tp,
        "ep": draw(divisors),
        "pp": draw(st.sampled_from([1, 1, 2, 3])),
        "dp_attention": dp,
        "dp_lm_head": draw(st.booleans()) if dp > 1 else draw(seldom),
        "moe_dense_tp": draw(st.sampled_from([None, None, 1, tp, 2])),
    }


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(config of some family, trainer, engine); three in four models are made to fit, apart from the pipeline."""
    hf = dict(TINY[draw(st.sampled_from(sorted(TINY)))])
    if "num_nextn_predict_layers" in hf:
        hf["num_nextn_predict_layers"] = draw(st.sampled_from([0, 1, 2]))
    if "num_experts_per_tok" not in hf:
        hf["tie_word_embeddings"] = draw(st.booleans())
    layers, trainer = draw(trainers(hf.get("num_nextn_predict_layers", 0)))
    hf["num_hidden_layers"], engine = layers, draw(engines())
    fits = draw(st.integers(0, 3)) > 0
    if "first_k_dense_replace" in hf:
        hf["first_k_dense_replace"] = draw(st.integers(0, layers - 1 if fits else layers))
    if fits:
        leave_out_what_the_family_lacks(hf, trainer, engine)
    tps, ep = [trainer["tp"], engine["tp"]], max(engine["ep"], 1)
    attn = max(engine["tp"] // engine["dp_attention"], 1)

    def size(*divisors: int, most: int = 2) -> int:
        return draw(st.integers(1, most)) * int(np.lcm.reduce(divisors)) if fits else draw(st.integers(1, 6))

    expert = (trainer["etp"], max(engine["tp"] // ep, 1), *(tps if "n_shared_experts" in hf else []))
    sizes = {
        "intermediate_size": expert if hf["model_type"] == "mixtral" else tps,
        "moe_intermediate_size": expert,
        "shared_expert_intermediate_size": tps,
        **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), (trainer["ep"], ep)),
    }
    hf |= {key: size(*divisors) for key, divisors in sizes.items() if key in hf}
    free = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_shared_experts")
    hf |= {key: draw(st.integers(1, 3)) for key in free if hf.get(key) is not None}
    groups = size(trainer["tp"], draw(st.sampled_from([1, attn])))
    if fits and groups % attn and attn % groups:
        groups *= attn
    hf["num_attention_heads"] = groups * (int(np.lcm(groups, attn)) // groups if fits else draw(st.integers(1, 3)))
    hf["num_key_value_heads"] = groups if reference.is_grouped(hf) else hf["num_attention_heads"]
    if "head_dim" in hf:
        hf["head_dim"], hf["hidden_size"] = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    else:
        hf["hidden_size"] = hf["num_attention_heads"] * draw(st.integers(1, 2))
    hf["vocab_size"] = draw(st.integers(1, 140))
    return hf, trainer, engine


def leave_out_what_the_family_lacks(hf: dict[str, Any], trainer: dict[str, Any], engine: dict[str, Any]) -> None:
    """Axes that would cut nothing of it."""
    kind = hf["model_type"]
    if not has_experts(hf, hf["num_hidden_layers"]):
        trainer |= {"ep": 1, "etp": 1}
        engine |= {"ep": 1}
    if kind in PLAIN_TP:
        engine |= {"dp_attention": 1, "dp_lm_head": False}
    if kind in HEAD_OVER_ALL or hf["tie_word_embeddings"]:
        engine |= {"dp_lm_head": False}
    if hf["tie_word_embeddings"]:
        engine |= {"pp": 1}
    if kind not in WHOLE_DENSE or not hf.get("first_k_dense_replace"):
        engine |= {"moe_dense_tp": None}


def compile_trainer(table: Table, sizes: dict[str, Any]) -> Layouts | None:
    """Every rank's layouts; None when they are refused."""
    try:
        topology = MegatronTopology(num_layers=table.num_layers, mtp_layers=table.mtp_layers, **sizes)
        return {r: megatron_layouts(table, topology, r, dtype="float32") for r in range(topology.world_size)}
    except LayoutError:
        return None


def compile_engine(table: Table, sizes: dict[str, Any]) -> Layouts | None:
    """Every rank's layouts; None when they are refused."""
    try:
        topology = SglangTopology(**sizes)
        return {r: sglang_layouts(table, topology, r, dtype="bfloat16") for r in range(topology.world_size)}
    except LayoutError:
        return None


def answer(ranks: Any, *args: Any) -> Arrays | None:
    """The reference's; None where it has none."""
    try:
        return ranks(*args)
    except ValueError:
        return None


def filled(layouts: Layouts, model: dict[str, np.ndarray]) -> Arrays:
    """What the layouts say each rank holds; asserts that names differ and that no element is written twice."""
    out: Arrays = {}
    seen: dict[tuple[TensorLayout, ...], dict[str, np.ndarray]] = {}
    for rank, tensors in layouts.items():
        if tensors not in seen:  # replicas
            seen[tensors] = {t.name: reference.fill(t, model) for t in tensors}
            assert len(seen[tensors]) == len(tensors), Counter(t.name for t in tensors).most_common(1)
        out[rank] = seen[tensors]
    return out


def assert_equal(got: Arrays, wanted: Arrays) -> None:
    """The same tensors on every rank, element for element, padding included."""
    assert got.keys() == wanted.keys()
    compared = set()
    for rank, tensors in wanted.items():
        if (id(tensors), id(got[rank])) in compared:
            continue
        compared.add((id(tensors), id(got[rank])))
        assert got[rank].keys() == tensors.keys(), (rank, got[rank].keys() ^ tensors.keys())
        for name, value in tensors.items():
            assert np.array_equal(got[rank][name], value), (rank, name)


def run(plan: tuple[Copy, ...], have: Arrays, destinations: Layouts) -> Arrays:
    """Carry out a plan on ids. Asserts that nothing is written twice and no padding is sent."""
    got = {r: {t.name: np.full(t.shape, -1) for t in layouts} for r, layouts in destinations.items()}
    for copy in plan:
        source = window(have[copy.src_rank][copy.src], copy.src_offset, copy.shape)
        target = window(got[copy.dst_rank][copy.dst], copy.dst_offset, copy.shape)
        assert source.shape == target.shape == copy.shape
        assert target.max() == -1 and source.min() > -1, copy
        target[...] = source
    return got


def window(array: np.ndarray, offset: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    lead = len(offset) - len(shape)
    return array[offset[:lead]][tuple(slice(o, o + n) for o, n in zip(offset[lead:], shape, strict=True))]


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_every_element_of_every_rank_is_the_references_and_a_sync_and_an_export_bring_it(case: Any) -> None:
    hf, trainer, engine = case
    model, table = reference.whole_model(hf, vocab=hf["vocab_size"]), load_table(hf)
    sources, destinations = compile_trainer(table, trainer), compile_engine(table, engine)
    held, wanted = answer(megatron_ranks, hf, model, trainer), answer(engine_ranks, hf, model, engine)
    event(f"trainer {'possible' if held else 'impossible'}, engine {'possible' if wanted else 'impossible'}")
    assert (sources is None) == (held is None), "a refusal, or none, against the reference"
    assert (destinations is None) == (wanted is None), "a refusal, or none, against the reference"
    if destinations is not None and wanted is not None:
        assert_equal(filled(destinations, model), wanted)
    if sources is None or held is None:
        return
    have = filled(sources, model)
    assert_equal(have, held)
    checkpoint = {0: hf_layouts(table, dtype="float32")}
    assert_equal(run(make_plan(sources, checkpoint), have, checkpoint), {0: model})
    if destinations is not None and wanted is not None:
        plan = make_plan(sources, destinations)
        assert_equal(run(plan, have, destinations), wanted)
        assert plan == make_plan(dict(reversed(sources.items())), destinations)


def test_every_family_is_drawn() -> None:
    assert {hf["architectures"][0] for hf in TINY.values()} == set(FAMILIES)
