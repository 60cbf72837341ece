"""Multi-token prediction layers: carried bit for bit through training, beside a copy of the embedding that keeps up."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.errors import DataError
from tests.trainer.ranks import run_ranks
from tests.trainer.setup import make_config, start, write_checkpoint
from tests.trainer.test_state import train

COPIES = {
    "model.layers.4.embed_tokens.weight": "model.embed_tokens.weight",
    "model.layers.4.shared_head.head.weight": "lm_head.weight",
}


def update_and_export(rank: int, directory: str, config: Any, meeting: str, out: str) -> Any:
    """(this rank's tensors before, after one update), and the export of all."""
    worker = start(rank, config, directory, meeting)
    before = {name: tensor.clone() for name, tensor in worker.tensors.items()}
    train(worker, range(1))
    worker.export(out)
    return before, {name: tensor.clone() for name, tensor in worker.tensors.items()}


def test_training_leaves_them_as_they_are_and_their_copy_of_the_embedding_in_step(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "hf", "deepseek_v3")
    # In a stage of their own with the last layers: neither the first nor the last has them.
    parallel = {"pp": 3, "pipeline_layout": "Ett|ttm|L"}
    config = make_config(parallel, world_size=3, algorithm={"weight_decay": 0.1})  # which needs no gradient
    out = tmp_path / "out"
    out.mkdir()

    results = run_ranks(3, update_and_export, directory, config, f"file://{tmp_path}/meeting", str(out))

    (_, first), (before, middle), (_, last) = results
    embedding = "0:embedding.word_embeddings.weight"
    assert torch.equal(first[embedding], middle[embedding]) and embedding not in last
    assert not torch.equal(before[embedding], middle[embedding])
    carried = [name for name in middle if ":mtp." in name]
    # Three norms and a projection; 8 tensors of attention; norm, router, its bias, 2 for each of 12 experts, 2 shared.
    assert len(carried) == 4 + 8 + 3 + 24 + 2 and all(torch.equal(before[name], middle[name]) for name in carried)
    given, written = load_file(f"{directory}/model.safetensors"), load_file(out / "model.safetensors")
    assert given.keys() == written.keys()
    own = [name for name in written if name.startswith("model.layers.4.") and name not in COPIES]
    assert own and all(torch.equal(written[name], given[name]) for name in own)
    for name, shared in COPIES.items():
        assert torch.equal(written[name], written[shared]) and not torch.equal(written[name], given[name])


def build(rank: int, directory: str, config: Any, meeting: str) -> None:
    start(rank, config, directory, meeting)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "model.layers.4.enorm.weight",
            r"no tensor model\.layers\.4\.enorm\.weight.* set num_nextn_predict_layers to 0",
        ),
        ("model.layers.4.embed_tokens.weight", r"embed_tokens\.weight in .* differs from model\.embed_tokens\.weight"),
    ],
)
def test_a_checkpoint_without_them_or_with_another_embedding_beside_them_is_refused(
    name: str, message: str, tmp_path: Path
) -> None:
    directory = write_checkpoint(tmp_path / "hf", "deepseek_v3")
    path = Path(directory) / "model.safetensors"
    tensors = load_file(path)
    if name in COPIES:
        tensors[name][7, 5] += 1
    else:
        del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(DataError, match=message):
        run_ranks(1, build, directory, make_config(), f"file://{tmp_path}/meeting")
