"""Every layout computes what one rank computes, and one rank computes what transformers computes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_rl.layouts.boxes import TensorLayout
from megatron_rl.models.random_checkpoint import write_random_checkpoint
from megatron_rl.resharding.views import copy_view
from megatron_rl.trainer import step
from megatron_rl.trainer.rank_batch import micro_batches, split
from megatron_rl.types import Rollouts
from tests.tiny import CHARACTERS, GRID, TINY, norm_latents_as_configured
from tests.trainer.ranks import run_ranks
from tests.trainer.setup import gradients_of, make_batch, make_config, make_rollouts, start

LENGTHS = [11, 70, 20, 5, 9, 31, 17]
TOLERANCE = 5e-6  # float32 sums in another order
SCHEDULES = {
    1: (((0, 1), (2, 3, 4), (5, 6)),),
    2: (((0, 1), (2,)), ((3, 4, 5), (6,))),
    4: (((0,), ()), ((1,), (2,)), ((3, 4), (5,)), ((6,), ())),
}
"""Data-parallel size -> [dp_rank][micro_batch] -> samples."""
UNUSUAL = {
    "glm4_moe_plain": TINY["glm4_moe"]
    | {"num_nextn_predict_layers": 0, "use_qk_norm": False, "attention_bias": False, "partial_rotary_factor": 0.25}
    | {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "rms_norm_eps": 1e-3, "first_k_dense_replace": 2},
    "deepseek_v3_odd": TINY["deepseek_v3"]
    | {"num_nextn_predict_layers": 0, "q_lora_rank": None, "first_k_dense_replace": 0, "n_shared_experts": 3}
    | {
        "topk_group": 4,
        "num_experts_per_tok": 3,
        "rope_scaling": TINY["deepseek_v3"]["rope_scaling"] | {"mscale": 0.7},
    },
    "qwen3_moe_top1": TINY["qwen3_moe"]
    | {
        "norm_topk_prob": False,
        "num_experts_per_tok": 1,
        "num_experts": 7,
        "rope_scaling": TINY["llama"]["rope_scaling"],
    },
    "qwen2_moe_plain": TINY["qwen2_moe"] | {"qkv_bias": False, "norm_topk_prob": True, "rms_norm_eps": 1e-3},
    "llama_mqa": TINY["llama"]
    | {
        "head_dim": 20,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "rope_scaling": TINY["qwen3"]["rope_scaling"],
    },
}
"""Legal, and not as published ones are."""
TP2 = {"tp": 2, "sp": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, TP2),
    "tp4": (4, {"tp": 4, "sp": True}),  # of Qwen's 2 key-value heads two ranks each hold parts
    "pp2": (2, {"pp": 2}),
    "pp2_vpp2": (2, {"pp": 2, "vpp": 2}),
    "uneven_pp2": (2, {"pp": 2, "first_stage_layers": 1}),
    "ep2": (2, {"ep": 2}),
    "etp2": (2, {"etp": 2}),
    "tp2_etp2": (2, {**TP2, "etp": 2}),
    "cp2": (2, {"cp": 2}),
    "dp2": (2, {}),
    "tp2_ep2": (2, {**TP2, "ep": 2}),
    "tp2_pp2": (4, {**TP2, "pp": 2}),
    "tp2_cp2": (4, {**TP2, "cp": 2}),
    "pp2_ep2": (4, {"pp": 2, "ep": 2}),
    "ep2_etp2": (4, {"ep": 2, "etp": 2}),
    "tp2_pp2_vpp2_cp2_ep2": (8, {**TP2, "pp": 2, "vpp": 2, "cp": 2, "ep": 2}),
}
STRINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "ends_alone": (4, {"pp": 4, "pipeline_layout": "E|ttt|t|L"}),
    "empty_chunk": (4, {"pp": 2, "vpp": 2, "ep": 2, "pipeline_layout": "Ettt||t|L"}),
}


def measure(rank: int, directory: str, world_size: int, parallel: dict[str, Any], meeting: str, batch: Any) -> Any:
    """(logits of every response token that this rank sees, gradients, layouts, coordinates, metrics)."""
    config = make_config(parallel, world_size=world_size, distributed_optimizer=False)
    worker = start(rank, config, directory, meeting)
    seen, loss, spied = [], worker._loss, step.token_logprobs

    def spy_logits(logits_TV: Tensor, index_N: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(logits_TV[index_N].detach())
        return spied(logits_TV, index_N, *args, **kwargs)

    places = []

    def spy_places(micro_batch: Any, *args: Any) -> Any:
        places.append((micro_batch.places_N, micro_batch.responses))
        return loss(micro_batch, *args)

    step.token_logprobs, worker._loss = spy_logits, spy_places
    at = worker.topology.coordinates(rank)
    (rows,) = micro_batches(split(batch, worker.topology.dp)[at.dp])
    metrics = worker.gradients(rows)
    logits = [(place, count, value) for (place, count), value in zip(places, seen, strict=True)]
    return logits, gradients_of(worker), worker.layouts, at, metrics


def joined_logits(results: list[Any], batch: Any) -> Tensor:
    """[N, V] over the whole batch in the order of its samples, from the pieces that the ranks hold."""
    pieces: dict[tuple[int, int], Tensor] = {}
    tps = max(r[3].tp for r in results) + 1
    for logits, _, _, at, _ in results:
        for number, (places, count, value) in enumerate(logits):
            whole = pieces.setdefault((at.dp, number), torch.full((count, tps * value.shape[1]), torch.nan))
            columns = slice(at.tp * value.shape[1], (at.tp + 1) * value.shape[1])
            whole[places, columns] = value
    out: dict[int, Tensor] = {}
    (mini,) = batch.schedule
    for dp, numbers in enumerate(mini):
        for number, samples in enumerate(numbers):
            sizes = [len(batch.samples[i].rollouts.row(i)[0]) - 1 for i in samples]
            out |= dict(zip(samples, pieces[dp, number].split(sizes), strict=True))
    return torch.cat([out[i] for i in sorted(out)])


def to_hf(gradients: dict[str, Tensor], layouts: tuple[TensorLayout, ...]) -> dict[str, list[tuple[Any, Tensor]]]:
    """HF name -> [(slices of the HF tensor, what this rank holds of it)]."""
    out: dict[str, list[tuple[Any, Tensor]]] = {}
    for layout in layouts:
        if layout.name.endswith("expert_bias") or ":mtp." in layout.name:
            continue
        for box in layout.boxes:
            where = tuple(slice(a, a + n) for a, n in zip(box.hf_offset, box.shape, strict=True))
            out.setdefault(box.hf, []).append((where, copy_view(gradients[layout.name], box.offset, box.shape)))
    return out


def assemble(pieces: dict[str, list[tuple[Any, Tensor]]]) -> dict[str, Tensor]:
    """Whole HF tensors, from one rank that holds all of them."""
    out = {}
    for name, parts in pieces.items():
        whole = torch.full([max(w[d].stop for w, _ in parts) for d in range(len(parts[0][0]))], torch.nan)
        for where, part in parts:
            whole[where] = part
        assert not whole.isnan().any(), name
        out[name] = whole
    return out


def assert_close(a: Tensor, b: Tensor, tolerance: float, what: str) -> None:
    """Within `tolerance`, relative to the size of the whole tensor b."""
    error, size = float((a - b).norm()), float(b.norm())
    assert error <= tolerance * size, (what, error, size)


def rollouts_from_one() -> Rollouts:
    """Every token but the first is a response token."""
    return make_rollouts(LENGTHS, [1] * len(LENGTHS))


CASES = [
    *((family, name) for family in GRID for name in LAYOUTS),
    *(("qwen3_moe", name) for name in STRINGS),
    ("qwen2_moe", "tp2_ep2"),  # gate of the shared expert, q, k, v biases
    ("glm4_moe", "tp2_ep2"),  # part of a head rotated, router in float32
    *(("qwen2", name) for name in ("tp2", "pp2", "pp2_vpp2")),  # the output layer is the embedding
]


@pytest.fixture(scope="module", params=[*TINY, *UNUSUAL])
def one_rank(request: Any, tmp_path_factory: Any) -> Any:
    """(checkpoint, logits, gradients by HF name, metrics) of one rank."""
    directory = str(tmp_path_factory.mktemp(request.param))
    model = {**(TINY | UNUSUAL)[request.param], "dtype": "float32"}
    write_random_checkpoint(Path(directory), model, characters=CHARACTERS, seed=0, jitter=0.1)
    batch = make_batch(rollouts_from_one(), (SCHEDULES[1],))
    meeting = f"file://{directory}/meeting"
    results = run_ranks(1, measure, directory, 1, {}, meeting, batch)
    _, gradients, layouts, _, metrics = results[0]
    return directory, joined_logits(results, batch), assemble(to_hf(gradients, layouts)), metrics


@pytest.mark.parametrize(("one_rank", "name"), CASES, indirect=["one_rank"])
def test_layout_has_the_logits_and_gradients_of_one_rank(one_rank: Any, name: str, tmp_path: Path) -> None:
    directory, logits, gradients, metrics = one_rank
    world_size, parallel = {**LAYOUTS, **STRINGS}[name]
    dp = world_size // (parallel.get("tp", 1) * parallel.get("pp", 1) * parallel.get("cp", 1))
    batch = make_batch(rollouts_from_one(), (SCHEDULES[dp],))

    results = run_ranks(world_size, measure, directory, world_size, parallel, f"file://{tmp_path}/meeting", batch)

    vocab = json.loads((Path(directory) / "config.json").read_text())["vocab_size"]
    assert_close(joined_logits(results, batch)[:, :vocab], logits[:, :vocab], TOLERANCE, "logits")
    covered = set()
    for _, local, layouts, at, _ in results:
        for hf, parts in to_hf(local, layouts).items():
            covered.add(hf)
            for where, part in parts:
                # Against the whole tensor's size: a part may be nearly zero.
                error, size = float((part - gradients[hf][where]).norm()), float(gradients[hf].norm())
                assert error <= TOLERANCE * size, (hf, at, error, size)
    assert covered == set(gradients)
    assert {n: pytest.approx(v, rel=1e-5) for n, v in metrics.items()} == results[-1][4]  # as the logits


def test_one_rank_has_the_logits_and_gradients_of_transformers(one_rank: Any) -> None:
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    directory, logits, gradients, _ = one_rank
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    norm_latents_as_configured(model)
    rollouts = rollouts_from_one()
    advantages = make_batch(rollouts, ()).advantages
    expected, loss, total = [], 0.0, 0
    for i in range(len(LENGTHS)):
        tokens = torch.from_numpy(np.array(rollouts.row(i)[0], np.int64))
        out = model(input_ids=tokens[None]).logits[0, :-1]
        expected.append(out.detach())
        # The clipped loss's gradient at ratio 1 is that of -advantage * logprob.
        loss = loss - advantages[i] * out.log_softmax(-1).gather(1, tokens[1:, None]).sum()
        total += len(tokens) - 1
    (loss / total).backward()

    expected_NV = torch.cat(expected)
    assert float((logits[:, : expected_NV.shape[1]] - expected_NV).abs().max()) <= 1e-5
    # transformers keeps experts fused in memory, and writes one tensor for each.
    wanted = revert_weight_conversion(model, {name: p.grad for name, p in model.named_parameters()})
    assert wanted.keys() == gradients.keys()
    for name, want in wanted.items():
        assert_close(gradients[name], want, 2e-5, name)  # transformers sums experts and attention otherwise


SCALED = [family for family in TINY if "kv_lora_rank" not in TINY[family] and TINY[family].get("rope_scaling")]


@pytest.mark.parametrize("one_rank", SCALED, indirect=True)
def test_positions_beyond_the_original_maximum_are_scaled(one_rank: Any) -> None:
    """The test above would not see it if neither side scaled, or if it made no difference."""
    import transformers

    directory, logits, _, _ = one_rank
    config = transformers.AutoConfig.from_pretrained(directory)
    scaling = config.rope_parameters
    config.rope_parameters = {"rope_type": "default", "rope_theta": scaling["rope_theta"]}
    unscaled = transformers.AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=torch.float32)
    rollouts = rollouts_from_one()
    longest, start = int(np.argmax(LENGTHS)), scaling["original_max_position_embeddings"]
    tokens = torch.from_numpy(np.array(rollouts.row(longest)[0], np.int64))
    with torch.no_grad():
        other = unscaled(input_ids=tokens[None]).logits[0, start:-1]

    ours = logits.split([n - 1 for n in LENGTHS])[longest][start:, : other.shape[1]]
    assert len(ours) >= 5
    assert float((ours - other).abs().amax(-1).min()) > 0.02  # at every such position; the sides agree within 1e-5
