"""megatron-core's own objects on real ranks: what it builds where, and what its distributed checkpoints call each part.

Weights are ids (see layouts/reference.py). A rank fills its tensors by the table and says what its `sharded_state_dict`
makes of them: key, place in the whole tensor, and values. The whole tensors are the reference's.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

from megatron_rl.checks import topology_of
from megatron_rl.layouts.compile import megatron_layouts
from megatron_rl.models import load_architecture, load_table
from megatron_rl.trainer import build, weights
from tests.layouts import reference
from tests.tiny import GRID as WHOLE_GRID
from tests.tiny import TINY
from tests.trainer.ranks import run_ranks
from tests.trainer.setup import make_config

RANKS = 4
TP2 = {"tp": 2, "sp": True}
GRID: list[tuple[int, dict[str, Any]]] = [
    (4, {**TP2, "pp": 2}),
    (4, {**TP2, "etp": 2, "ep": 2}),
    (4, {"tp": 4, "sp": True}),  # more ranks than Qwen's 2 key-value heads
    (4, {"pp": 2, "vpp": 2, "ep": 2}),
    (4, {"pp": 2, "first_stage_layers": 1, "etp": 2}),
    (4, {**TP2, "cp": 2, "ep": 4}),
    (6, {"pp": 4, "account_for_embedding": True, "account_for_loss": True}),
    (3, {"pp": 4, "account_for_loss": True}),
    (4, {"pp": 4, "pipeline_layout": "E|ttt|tM|L"}),
    (4, {"pp": 4, "pipeline_layout": "Ett|tt|M|L"}),
    (4, {"pp": 2, "vpp": 2, "ep": 2, "pipeline_layout": "Ettt|||tML"}),
    (3, {**TP2, "pp": 2, "vpp": 2, "pipeline_layout": "Et|t|tM|L"}),
]
"""(layers, parallel.*) on four ranks; M stands for the model's multi-token prediction layers."""
OTHERS: list[tuple[int, dict[str, Any]]] = [(4, {**TP2, "pp": 2}), (4, {**TP2, "etp": 2, "ep": 2})]
"""Of the families that are not run over the whole grid; the second, of those with experts."""


def cases() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(config of a model, parallel.*)."""
    for family in TINY:
        others = OTHERS if "num_experts_per_tok" in TINY[family] else OTHERS[:1]
        for layers, parallel in GRID if family in WHOLE_GRID else others:
            hf = {**TINY[family], "num_hidden_layers": layers, "vocab_size": 61}
            text = parallel.get("pipeline_layout")
            letters = "m" * hf.get("num_nextn_predict_layers", 0)
            yield hf, parallel if text is None else {**parallel, "pipeline_layout": text.replace("M", letters)}


def look(rank: int, meeting: str, grid: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[Any]:
    """For each case, of every shard of the distributed checkpoint: key, place, and whether it is a replica.

    Raises: AssertionError where layers or values are not those of the reference.
    """
    found = []
    for i, (hf, parallel) in enumerate(grid):
        # A world of its own for each: destroy_model_parallel leaves the groups, each with threads and sockets.
        dist.init_process_group("gloo", init_method=f"{meeting}-{i}", rank=rank, world_size=RANKS)
        config = make_config(parallel, world_size=RANKS)
        table, model = load_table(hf), load_architecture(hf)
        topology = topology_of(config, table)
        build.start_megatron(model, config.parallel, topology, seed=0)
        megatron = build.transformer_config(model, config.parallel, config.trainer, has_cuda=False)
        chunks = build.build_chunks(model, megatron, topology, distributed_optimizer=False)
        layouts = megatron_layouts(table, topology, rank, dtype="float32")
        tensors, ids = weights.named_tensors(chunks, layouts), reference.whole_model(hf, vocab=61)
        for layout in layouts:
            tensors[layout.name].copy_(torch.from_numpy(reference.fill(layout, ids)))
        layers = [[layer.layer_number - 1 for layer in chunk.module.decoder.layers] for chunk in chunks]
        assert layers == [list(chunk.layers) for chunk in topology.chunks(rank)], (rank, parallel, layers)
        whole, places = whole_tensors(hf, parallel.get("tp", 1)), []
        for key, offset, is_replica, values in (shard for chunk in chunks for shard in shards(chunk.module)):
            window = tuple(slice(a, a + n) for a, n in zip(offset, values.shape, strict=True))
            assert np.array_equal(values, whole[key][window]), (hf["architectures"], parallel, rank, key)
            places.append((key, window, is_replica))
        found.append(places)
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return found


def shards(chunk: Any) -> Iterator[tuple[str, tuple[int, ...], bool, np.ndarray]]:
    """(key, offset in the whole tensor, whether it is a replica, values with the whole tensor's dims)."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = chunk.sharded_state_dict(metadata={"dp_cp_group": group})
    apply_factories(state)
    pending = list(state.values())
    while pending:
        value = pending.pop()
        if isinstance(value, dict | list):
            pending += value.values() if isinstance(value, dict) else value
        elif isinstance(value, ShardedTensor) and value.data is not None:
            replica = value.replica_id if isinstance(value.replica_id, int) else max(value.replica_id)
            values = value.data.detach().numpy().astype(np.int64)
            extra = (1,) * value.prepend_axis_num
            yield value.key, value.global_offset, replica > 0, values.reshape(extra + values.shape)


def whole_tensors(hf: dict[str, Any], tp: int) -> reference.Arrays:
    """Key of the distributed checkpoint -> the whole tensor, from the reference's single rank."""
    ids, one = reference.whole_model(hf, vocab=61), (1, 0)
    rows = 61 + -61 % (8 * tp)
    out = {
        "embedding.word_embeddings.weight": reference.pad_rows(ids["model.embed_tokens.weight"], rows),
        "decoder.final_layernorm.weight": ids["model.norm.weight"],
    }
    if not hf["tie_word_embeddings"]:
        out["output_layer.weight"] = reference.pad_rows(ids["lm_head.weight"], rows)
    layers = [
        stack_experts(reference.megatron_layer(hf, ids, i, tp=one, ep=one, etp=one))
        for i in range(hf["num_hidden_layers"])
    ]
    if "first_k_dense_replace" in hf:  # megatron-core numbers layers that differ, and stacks layers that do not
        out |= {f"decoder.layers.{i}.{name}": value for i, layer in enumerate(layers) for name, value in layer.items()}
    else:
        out |= {f"decoder.layers.{name}": np.stack([layer[name] for layer in layers]) for name in layers[0]}
    for k in range(hf.get("num_nextn_predict_layers", 0)):
        mtp = stack_experts(reference.megatron_mtp(hf, ids, k, tp=one, ep=one, etp=one))
        out |= {f"mtp.layers.{k}.{n.replace('mtp_model_layer', 'transformer_layer')}": v for n, v in mtp.items()}
    return out


def stack_experts(layer: reference.Arrays) -> reference.Arrays:
    """The experts' tensors of a layer as one tensor each."""
    out = {name: value for name, value in layer.items() if "mlp.experts." not in name}
    for fc in ("linear_fc1", "linear_fc2"):
        head = next((name[: -len("0")] for name in layer if name.endswith(f"mlp.experts.{fc}.weight0")), None)
        if head is not None:
            experts = [layer[f"{head}{e}"] for e in range(sum(name.startswith(head) for name in layer))]
            out[head.replace("mlp.experts.", "mlp.experts.experts.")] = np.stack(experts)
    return out


@pytest.mark.live
def test_ranks_hold_the_layers_and_the_parts_that_megatron_core_says_they_do(tmp_path: Path) -> None:
    grid = list(cases())
    ranks = run_ranks(RANKS, look, f"file://{tmp_path}/meeting", grid, timeout_s=400)
    for i, (hf, parallel) in enumerate(grid):
        whole = whole_tensors(hf, parallel.get("tp", 1))
        painted = {key: np.zeros(value.shape, int) for key, value in whole.items()}
        for found in ranks:
            for key, window, is_replica in found[i]:
                painted[key][window] += not is_replica
        assert [key for key, count in painted.items() if (count != 1).any()] == [], parallel
