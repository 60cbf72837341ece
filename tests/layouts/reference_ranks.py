"""Which part of a model each rank holds, worked out by counting and dealing: no topology of ours takes part.

What cannot be is a ValueError, mostly numpy's own.
"""

from typing import Any

import numpy as np

from tests.layouts.reference import (
    PLAIN_TP,
    WHOLE_DENSE,
    Arrays,
    cut,
    megatron_layer,
    megatron_mtp,
    pad_rows,
    sglang_layer,
)

HEAD_ON_EVERY_STAGE = ("glm4_moe", "llama", "mixtral", "qwen2_moe", "qwen3_moe")
HEAD_OVER_ALL = ("mixtral", "qwen2")
"""model_type of families whose class in SGLang has no dp_lm_head."""


def need(claim: bool, what: object) -> None:
    if not claim:
        raise ValueError(what)


def has_experts(hf: dict[str, Any], layers: int) -> bool:
    """Whether any of the first `layers` layers has; those of multi-token prediction come behind the decoder's."""
    return "num_experts_per_tok" in hf and hf.get("first_k_dense_replace", 0) < layers


def mtp_layers(hf: dict[str, Any]) -> int:
    return hf.get("num_nextn_predict_layers", 0)


def deal(hf: dict[str, Any], sizes: dict[str, Any]) -> list[str]:
    """The parts of a pipeline, letter by letter: E embedding, t layer, m prediction (MTP) layer, L output layer."""
    layers, pp, vpp = hf["num_hidden_layers"], sizes["pp"], sizes["vpp"]
    first, last = sizes["first_stage_layers"], sizes["last_stage_layers"]
    with_e, with_l, text = sizes["account_for_embedding"], sizes["account_for_loss"], sizes["pipeline_layout"]
    need(vpp is None or pp > 1, "virtual stages of one stage")
    need(sum((bool(first or last), with_e or with_l, text is not None)) < 2, "two ways at once")
    need(pp > 1 or not (with_e or with_l or text), "no effect")
    if text is not None:
        rows = text.split("|")
        need(len(rows) == pp * (vpp or 1) and text.count("t") == layers, "another model or pipeline")
        need(rows[0][:1] == "E" and rows[-1][-1:] == "L" and text.count("E") == text.count("L") == 1, "ends")
        need(text.count("m") == mtp_layers(hf) and "m" not in text.split("t")[0], "another model")
        with_m = [i for i, row in enumerate(rows) if "m" in row]
        need(len(with_m) <= 1 and all(i // pp == (vpp or 1) - 1 for i in with_m), "not in one last chunk")
        need("t" not in text[text.index("m") :] if with_m else True, "a layer behind them")
        return rows
    if first or last:
        middle = pp - bool(first) - bool(last)
        rest = layers - (first or 0) - (last or 0)
        need(
            middle >= 0 and rest >= 0 and (rest > 0) == (middle > 0),
            "middle stages without layers, or layers without stages",
        )
        need(middle > 0 or vpp is None, "megatron-core divides by zero there")
        stages = [*([first] if first else []), *map(len, np.split(np.arange(rest), middle or 1)[:middle])]
        stages += [last] if last else []
        counts = [len(cut(np.arange(stage), vpp or 1, c)) for c in range(vpp or 1) for stage in stages]
        rows = ["t" * n for n in counts]
    else:
        slots = "E" * with_e + "t" * layers + "L" * with_l
        rows = ["".join(part) for part in np.split(np.array(list(slots)), pp * (vpp or 1))]
        need(with_e or with_l or all(rows), "a stage without layers")
    end = "m" * mtp_layers(hf) + "L"
    return [("E" * (i == 0) + row.strip("EL") + end * (i == len(rows) - 1)) for i, row in enumerate(rows)]


def megatron_ranks(hf: dict[str, Any], model: Arrays, sizes: dict[str, Any]) -> dict[int, Arrays]:
    """Every rank's tensors under the names of our layouts."""
    world, tp, pp, ep, etp = (sizes[key] for key in ("world_size", "tp", "pp", "ep", "etp"))
    need(has_experts(hf, hf["num_hidden_layers"] + mtp_layers(hf)) or ep * etp == 1, "no experts to share out")
    dense = np.arange(world).reshape(pp, -1, sizes["cp"], tp)
    expert = np.arange(world).reshape(pp, -1, ep, etp)
    parts = deal(hf, sizes)
    vocab = len(model["model.embed_tokens.weight"])
    padded = vocab + -vocab % (8 * tp)
    made: dict[tuple[int, ...], Arrays] = {}
    out = {}
    for rank in range(world):
        stage, _, _, t = (int(i[0]) for i in np.nonzero(dense == rank))
        _, _, e, f = (int(i[0]) for i in np.nonzero(expert == rank))
        if (stage, t, e, f) not in made:
            tensors: Arrays = {}
            for c, row in enumerate(parts[stage::pp]):
                start = "".join(parts[: c * pp + stage]).count("t")
                if "E" in row or "m" in row:
                    embedding = pad_rows(model["model.embed_tokens.weight"], padded)
                    tensors[f"{c}:embedding.word_embeddings.weight"] = cut(embedding, tp, t)
                for j in range(row.count("t")):
                    layer = megatron_layer(hf, model, start + j, tp=(tp, t), ep=(ep, e), etp=(etp, f))
                    tensors |= {f"{c}:decoder.layers.{j}.{name}": value for name, value in layer.items()}
                for k in range(row.count("m")):
                    layer = megatron_mtp(hf, model, k, tp=(tp, t), ep=(ep, e), etp=(etp, f))
                    tensors |= {f"{c}:mtp.layers.{k}.{name}": value for name, value in layer.items()}
                is_last = start + row.count("t") == hf["num_hidden_layers"] and "t" in row
                if is_last if mtp_layers(hf) else "L" in row:
                    tensors[f"{c}:decoder.final_layernorm.weight"] = model["model.norm.weight"]
                if "L" in row and not (hf["tie_word_embeddings"] and "E" in row):
                    head = "model.embed_tokens.weight" if hf["tie_word_embeddings"] else "lm_head.weight"
                    tensors[f"{c}:output_layer.weight"] = cut(pad_rows(model[head], padded), tp, t)
            made[stage, t, e, f] = tensors
        out[rank] = made[stage, t, e, f]
    return out


def engine_ranks(hf: dict[str, Any], model: Arrays, sizes: dict[str, Any]) -> dict[int, Arrays]:
    """Every rank's tensors of an engine."""
    kind, tp, ep, pp, dp = hf["model_type"], sizes["tp"], sizes["ep"], sizes["pp"], sizes["dp_attention"]
    layers, dense_tp = hf["num_hidden_layers"], sizes["moe_dense_tp"]
    need(ep == 1 or has_experts(hf, layers), "no experts to share out")
    need(dp == 1 or kind not in PLAIN_TP, "attention over all ranks")
    tied = hf["tie_word_embeddings"]
    need(not sizes["dp_lm_head"] or (dp > 1 and kind not in HEAD_OVER_ALL and not tied), "output layer over all ranks")
    need(not tied or pp == 1, "a copy of the embedding that some classes lack")
    has_dense = hf.get("first_k_dense_replace", 0) > 0
    need(dense_tp is None or (dense_tp in (1, tp) and kind in WHOLE_DENSE and has_dense), "dense layers over all ranks")
    need(pp <= layers, "stages without layers")
    attention = np.arange(tp).reshape(dp, -1)
    expert = np.arange(tp).reshape(ep, -1)
    stages = np.array_split(np.arange(layers)[::-1], pp)[::-1]  # the last stages are the longer ones
    out = {}
    for rank in range(pp * tp):
        stage, t = divmod(rank, tp)
        attn = (tp // dp, int(np.nonzero(attention == t)[1][0]))
        at = {"tp": (tp, t), "attn": attn, "dense": (1, 0) if dense_tp == 1 else (tp, t)}
        at["ep"], at["moe_tp"] = ((n, int(i[0])) for n, i in zip(expert.shape, np.nonzero(expert == t), strict=True))
        tensors: Arrays = {}
        if stage == 0:
            axis = at["tp"] if kind in PLAIN_TP else attn
            tensors["model.embed_tokens.weight"] = _vocabulary(model["model.embed_tokens.weight"], *axis)
        for layer in sorted(stages[stage]):
            tensors |= sglang_layer(hf, model, int(layer), at)
        if stage == pp - 1:
            tensors["model.norm.weight"] = model["model.norm.weight"]
        if not tied and (stage == pp - 1 or kind in HEAD_ON_EVERY_STAGE):
            axis = attn if sizes["dp_lm_head"] else at["tp"]
            tensors["lm_head.weight"] = _vocabulary(model["lm_head.weight"], *axis)
        out[rank] = tensors
    return out


def _vocabulary(array: np.ndarray, ranks: int, rank: int) -> np.ndarray:
    """Padded to a multiple of 64 that the ranks divide, or to 64 rows a rank."""
    rows = len(array) + -len(array) % 64
    if rows % ranks:
        rows = len(array) + -len(array) % (64 * ranks)
    return cut(pad_rows(array, rows), ranks, rank)
