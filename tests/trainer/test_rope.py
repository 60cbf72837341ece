"""Rope scaling with the published parameters, at positions far beyond the original maximum, against transformers."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as yarn
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_rl.models import load_architecture
from megatron_rl.trainer import cpu, rope
from megatron_rl.trainer.build import transformer_config
from tests.tiny import PUBLISHED
from tests.trainer.ranks import run_ranks
from tests.trainer.setup import make_config


def frequencies(rank: int, hf: dict[str, Any]) -> Any:
    """(as megatron has them without scaling, with it, what layers scale cosine and sine by)."""
    torch.set_num_threads(1)  # threads of the parent are not there after a fork
    cpu.install()
    model, settings = load_architecture(hf), make_config()
    config = transformer_config(model, settings.parallel, settings.trainer, has_cuda=False)
    size = {"kv_channels": config.kv_channels, "rotary_base": model.rotary_base, "use_cpu_initialization": True}
    plain, scaled = (RotaryEmbedding(rotary_percent=1.0, **size) for _ in range(2))
    if rope.embedding_type(model.rope_scaling) == "yarn":
        attributes = {
            key.removeprefix("yarn_"): value for key, value in vars(config).items() if key.startswith("yarn_")
        }
        factor = attributes.pop("rotary_scaling_factor")
        embedding = yarn.YarnRotaryEmbedding(scaling_factor=factor, **attributes, **size)
        found = embedding.get_emb(2)[0][1, 0, 0, : len(plain.inv_freq)]  # angles of position 1
    else:
        rope.scale(SimpleNamespace(rotary_pos_emb=scaled), model.rope_scaling)
        found = scaled.inv_freq
    return plain.inv_freq, found, yarn._yarn_get_concentration_factor_from_config(config)


@pytest.mark.parametrize("name", ["llama3_1_8b", "llama3_2_1b", "qwen2_5_7b"])
def test_frequencies_are_those_of_transformers(name: str) -> None:
    hf = copy.deepcopy(PUBLISHED[name])
    if name == "qwen2_5_7b":  # as its model card has it for long texts
        hf["rope_scaling"] = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
    scaling = load_architecture(hf).rope_scaling
    assert scaling is not None

    ((plain, found, concentration),) = run_ranks(1, frequencies, hf)

    compute = ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
    wanted, attention_factor = compute(transformers.AutoConfig.for_model(**hf), torch.device("cpu"))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)  # float32
    assert concentration == pytest.approx(attention_factor, rel=1e-12)
    # In radians: without scaling, positions beyond the original maximum would be told apart otherwise.
    assert float((4 * scaling["original_max_position_embeddings"] * (found - plain)).abs().max()) > 1.0
