"""What may differ between checkpoints: files, dtypes, FP8, buffers, who saved them. And what is noticed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.convert import fp8
from megatron_rl.convert.exporting import export_checkpoint
from megatron_rl.convert.importing import import_checkpoint
from megatron_rl.convert.verifying import verify_checkpoint
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.formats import manifest, torch_dist
from megatron_rl.models import load_table
from megatron_rl.trainer import state
from tests.trainer.ranks import run_ranks
from tests.trainer.setup import make_config, start, write_checkpoint

INDEX = "model.safetensors.index.json"
INV_FREQ = "model.layers.0.self_attn.rotary_emb.inv_freq"


def read(directory: Path) -> dict[str, Tensor]:
    return {name: t for path in sorted(directory.glob("*.safetensors")) for name, t in load_file(path).items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit for bit, dtypes included."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def there_and_back(hf: Path, *, quantize: bool = False) -> Path:
    import_checkpoint(hf, hf.with_name("megatron"), processes=2)
    differing, _ = export_checkpoint(hf.with_name("megatron"), hf.with_name("again"), processes=2, quantize=quantize)
    assert differing == []
    return hf.with_name("again")


def test_shards_mixed_dtypes_and_odd_values_come_back_as_they_were(tmp_path: Path) -> None:
    hf = Path(write_checkpoint(tmp_path / "hf", "deepseek_v3", dtype="bfloat16"))
    tensors = load_file(hf / "model.safetensors")
    copies = load_table(json.loads((hf / "config.json").read_text())).aliases
    dtypes = (torch.float16, torch.float32, torch.bfloat16)
    for i, (name, tensor) in enumerate(sorted(tensors.items())):
        if "correction_bias" not in name and name not in copies:
            tensors[name] = tensor.to(dtypes[i % 3])
    tensors |= {name: tensors[own].clone() for name, own in copies.items()}
    tensors["model.norm.weight"][:4] = torch.tensor([torch.nan, torch.inf, -0.0, 1e-40])
    names = sorted(tensors, key=lambda name: name[::-1])  # neighbours of the model in different files
    (hf / "model.safetensors").unlink()
    files = {f"weights-{i}.safetensors": names[i::3] for i in range(3)}
    for file, own in files.items():
        buffers = (
            {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)} if file == "weights-1.safetensors" else {}
        )
        save_file({**{name: tensors[name] for name in own}, **buffers}, hf / file, metadata={"format": "pt"})
    places = {name: file for file, own in files.items() for name in own}
    places[INV_FREQ] = "weights-1.safetensors"
    (hf / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))

    notes = import_checkpoint(hf, tmp_path / "megatron", processes=2)
    differing, _ = export_checkpoint(tmp_path / "megatron", tmp_path / "again", processes=1, quantize=False)

    assert differing == []
    assert any("left out 1 buffers that follow from config.json: model.layers.0" in note for note in notes)
    for file, own in files.items():
        assert_same(load_file(tmp_path / "again" / file), {name: tensors[name] for name in own})
    weight_map = json.loads((tmp_path / "again" / INDEX).read_text())["weight_map"]
    assert weight_map == {name: file for name, file in places.items() if "inv_freq" not in name}


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Block by block, slowly: scale = max|w| / 448."""
    rows, columns = weight.shape
    out = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scale = torch.empty(-(-rows // 128), -(-columns // 128))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = weight[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128].float()
            scale[i, j] = block.abs().max() / 448
            out[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128] = (block / scale[i, j]).to(torch.float8_e4m3fn)
    return out, scale


def dequantized(weight: Tensor, scale: Tensor) -> Tensor:
    """Block by block, slowly."""
    out = torch.empty(weight.shape, dtype=torch.bfloat16)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            place = (slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128))
            out[place] = (weight[place].float() * scale[i, j]).bfloat16()
    return out


def test_fp8_in_and_out(tmp_path: Path) -> None:
    """q of Qwen3-MoE is 192 rows: one and a half blocks, in two groups of key-value heads."""
    hf = Path(write_checkpoint(tmp_path / "hf", "qwen3_moe", dtype="bfloat16"))
    tensors, expected = {}, {}
    for name, tensor in load_file(hf / "model.safetensors").items():
        expected[name] = tensors[name] = tensor
        if "_proj" in name:
            # Scales that are no powers of two, and a weight's blocks far apart.
            tensors[name], tensors[name + "_scale_inv"] = quantized(tensor * torch.linspace(1, 9, tensor.shape[1]))
            expected[name] = dequantized(tensors[name], tensors[name + "_scale_inv"])
    save_file(tensors, hf / "model.safetensors")
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps({**config, "quantization_config": fp8.CONFIG}))

    again = there_and_back(hf)
    export_checkpoint(tmp_path / "megatron", tmp_path / "fp8", processes=1, quantize=True)

    assert_same(read(again), expected)
    assert json.loads((again / "config.json").read_text()) == config
    requantized = {name: (quantized(tensor) if "_proj" in name else (tensor,)) for name, tensor in expected.items()}
    names = {name: (name, name + "_scale_inv") for name in expected}
    assert_same(
        read(tmp_path / "fp8"),
        {one: value for name, own in requantized.items() for one, value in zip(names[name], own, strict=False)},
    )
    assert json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"] == fp8.CONFIG
    assert verify_checkpoint(tmp_path / "megatron", hf, processes=1)[0] == []


def test_a_tied_model_comes_back_with_its_output_layer_or_without(tmp_path: Path) -> None:
    """Tiny ones are written with it, and come back so in test_roundtrip.py; most published ones are without."""
    hf = Path(write_checkpoint(tmp_path / "hf", "qwen2", dtype="bfloat16"))
    tensors = load_file(hf / "model.safetensors")
    assert torch.equal(tensors.pop("lm_head.weight"), tensors["model.embed_tokens.weight"])
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})

    assert_same(read(there_and_back(hf)), tensors)


def test_dequantized_weights_under_a_config_that_still_says_fp8(tmp_path: Path) -> None:
    hf = Path(write_checkpoint(tmp_path / "hf", "qwen3_moe", dtype="bfloat16"))
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps({**config, "quantization_config": fp8.CONFIG}))

    again = there_and_back(hf)

    assert_same(read(again), read(hf))
    assert json.loads((again / "config.json").read_text()) == config
    assert verify_checkpoint(tmp_path / "megatron", hf, processes=1)[0] == []


def test_verify_names_the_tensor_and_its_first_differing_element(tmp_path: Path) -> None:
    hf = Path(write_checkpoint(tmp_path / "hf", "qwen3_moe", dtype="bfloat16"))
    import_checkpoint(hf, tmp_path / "megatron", processes=1)
    assert verify_checkpoint(tmp_path / "megatron", hf, processes=1)[0] == []
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    tensors = load_file(hf / "model.safetensors")
    was = float(tensors[name][31, 17])
    tensors[name][31, 17:19] = 3.0
    save_file(tensors, hf / "model.safetensors")

    (line,), _ = verify_checkpoint(tmp_path / "megatron", hf, processes=1)

    assert line.startswith(f"{name} differs first at [31, 17]: {was:.9g} here, 3 there, 2 elements")


def flip(directory: Path, name: str) -> str:
    """Change one bit of a tensor in the checkpoint. Returns: the file."""
    contents = torch_dist.read_contents(directory)
    item = next(item for key, items in contents.items.items() if key == name for item in items)
    with open(directory / item.file, "r+b") as f:
        at = torch_dist.data_of(f, item, itemsize=2) + 7
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 4]))
    return item.file


def build(rank: int, directory: str, config: Any, meeting: str) -> None:
    start(rank, config, directory, meeting)


def test_changed_bytes_stop_the_trainer_and_the_export(tmp_path: Path) -> None:
    hf = Path(write_checkpoint(tmp_path / "hf", "qwen3_moe", dtype="bfloat16"))
    import_checkpoint(hf, tmp_path / "megatron", processes=1)
    file = flip(tmp_path / "megatron", "output_layer.weight")

    differing, _ = export_checkpoint(tmp_path / "megatron", tmp_path / "again", processes=1, quantize=False)
    lines, _ = verify_checkpoint(tmp_path / "megatron", None, processes=1)

    assert differing == ["lm_head.weight"] and not (tmp_path / "again").exists()
    assert [line.split()[0:2] for line in lines] == [["file", file], ["lm_head.weight", "hashes"]]
    with pytest.raises(DataError, match=rf"{file} has \d+ bytes that hash to .*it was changed after it was written"):
        run_ranks(1, build, str(tmp_path / "megatron"), make_config(dtype="bfloat16"), f"file://{tmp_path}/m")


def save(rank: int, directory: str, config: Any, meeting: str, out: str) -> None:
    worker = start(rank, config, directory, meeting)
    state.save_weights(Path(out), worker.chunks)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_export_of_what_a_run_saved_on_other_ranks(family: str, tmp_path: Path) -> None:
    """Its shards are cut by tensor and expert parallelism; the vocabulary is padded."""
    run = tmp_path / "runs" / "one"
    write_checkpoint(run / "model", family, dtype="bfloat16")
    step = run / "checkpoints" / "step_000003"
    step.mkdir(parents=True)
    config = make_config({"tp": 2, "sp": True, "ep": 2}, world_size=2, dtype="bfloat16")
    run_ranks(2, save, str(run / "model"), config, f"file://{tmp_path}/m", str(step / "weights"))

    _, notes = export_checkpoint(step, tmp_path / "out", processes=1, quantize=False)

    assert_same(read(tmp_path / "out"), read(run / "model"))
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in (run / "model").iterdir()}
    assert "no manifest" in notes[1]
    assert verify_checkpoint(step, run / "model", processes=1)[0] == []
    with pytest.raises(ConfigError, match=r"weights has no manifest: a run saved it.*--hf DIR"):
        verify_checkpoint(step, None, processes=1)
    other = json.loads((run / "model" / "config.json").read_text())
    (run / "model" / "config.json").write_text(json.dumps({**other, "vocab_size": 99}))
    with pytest.raises(DataError, match=r"holds \d+ of the \d+ elements of model\.embed_tokens\.weight: it was"):
        export_checkpoint(step, tmp_path / "wrong", processes=1, quantize=False)
    (run / "model" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"weights has no config\.json, and neither has .*model.*Copy config\.json"):
        export_checkpoint(step, tmp_path / "wrong", processes=1, quantize=False)


def test_the_manifest_says_what_each_tensor_hashes_to(tmp_path: Path) -> None:
    import xxhash

    hf = Path(write_checkpoint(tmp_path / "hf", "qwen3_moe", dtype="bfloat16"))
    import_checkpoint(hf, tmp_path / "megatron", processes=1)

    written = manifest.read(tmp_path / "megatron")

    assert written is not None
    with safe_open(hf / "model.safetensors", "pt") as f:
        assert set(written.tensors) == set(f.keys())
        for name, entry in written.tensors.items():
            data = f.get_tensor(name).view(torch.uint8).numpy()
            assert entry.xxh3 == xxhash.xxh3_128(np.ascontiguousarray(data)).hexdigest(), name
    assert set(written.files) == {p.name for p in (tmp_path / "megatron").iterdir()} - {"manifest.json"}
