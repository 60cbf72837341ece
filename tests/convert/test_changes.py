"""What is changed after an import is noticed, wherever it is: manifest, config, the bytes around the data."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.convert.exporting import export_checkpoint
from megatron_rl.convert.importing import import_checkpoint
from megatron_rl.convert.verifying import verify_checkpoint
from megatron_rl.errors import DataError
from megatron_rl.formats import manifest, torch_dist, torch_save
from megatron_rl.formats.manifest import Manifest, TensorEntry
from megatron_rl.formats.torch_dist import Item
from tests.trainer.setup import write_checkpoint


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds hf, and what was imported from it, megatron."""
    directory = tmp_path_factory.mktemp("imported")
    write_checkpoint(directory / "hf", "qwen3_moe", dtype="bfloat16")
    (directory / "hf" / "read me.txt").touch()
    import_checkpoint(directory / "hf", directory / "megatron", processes=1)
    return directory


def test_a_changed_manifest_is_none(tmp_path: Path) -> None:
    entry = TensorEntry("bfloat16", (2,), "0" * 32, "model.safetensors")
    written = Manifest({"a": entry, "b": entry}, {}, {}, from_fp8=False)
    manifest.write(tmp_path, written)
    assert manifest.read(tmp_path) == written
    path = tmp_path / "manifest.json"
    text = path.read_text()

    without_b = json.loads(text)
    del without_b["tensors"]["b"]
    for changed in (json.dumps(without_b), text.replace("bfloat16", "float16", 1)):
        path.write_text(changed)
        with pytest.raises(DataError, match=r"manifest\.json is no manifest \(.*it was changed after it was written"):
            manifest.read(tmp_path)


def test_export_takes_no_config_that_was_changed(imported: Path, tmp_path: Path) -> None:
    shutil.copytree(imported / "megatron", tmp_path / "megatron")
    path = tmp_path / "megatron" / "config.json"
    path.write_text(path.read_text().replace('"rope_theta": ', '"rope_theta": 1'))

    with pytest.raises(DataError, match=r"config\.json has \d+ bytes that hash to .*it was changed after it was writ"):
        export_checkpoint(tmp_path / "megatron", tmp_path / "out", processes=1, quantize=False)
    assert not (tmp_path / "out").exists()


def test_rows_that_only_the_other_checkpoint_has_are_a_difference(imported: Path, tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    shutil.copytree(imported / "hf", hf)
    tensors = load_file(hf / "model.safetensors")
    rows, columns = tensors["lm_head.weight"].shape
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        tensors[name] = torch.cat([tensors[name], torch.ones(3, columns, dtype=torch.bfloat16)])
    save_file(tensors, hf / "model.safetensors")
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps({**config, "vocab_size": rows + 3}))

    lines, _ = verify_checkpoint(imported / "megatron", hf, processes=1)

    end = f" is bfloat16 [{rows}, {columns}], in {hf} bfloat16 [{rows + 3}, {columns}]"
    assert sorted(lines) == ["lm_head.weight" + end, "model.embed_tokens.weight" + end]


def test_without_a_file_that_holds_no_tensors_they_are_compared(imported: Path, tmp_path: Path) -> None:
    shutil.copytree(imported / "megatron", tmp_path / "megatron")
    (tmp_path / "megatron" / "read me.txt").unlink()

    (line,), (note,) = verify_checkpoint(tmp_path / "megatron", None, processes=1)

    assert line.startswith("file read me.txt is missing; written: 0 bytes")
    assert note.startswith("1 differences between 135 tensors")


def test_a_flipped_bit_around_the_data_is_damage_and_no_crash(tmp_path: Path) -> None:
    before, after = torch_save.envelope("bfloat16", (3, 5))
    whole = before + bytes(30) + after
    item = Item("key", (0, 0), (3, 5), "file", 0, len(whole))
    refused = 0
    for at in [*range(len(before)), *range(len(before) + 30, len(whole))]:
        (tmp_path / "file").write_bytes(whole[:at] + bytes([whole[at] ^ 64]) + whole[at + 1 :])
        with open(tmp_path / "file", "rb") as f:
            try:
                torch_dist.data_of(f, item, itemsize=2)
            except DataError as error:
                refused += 1
                assert str(error).startswith("file "), error

    assert refused > 50
