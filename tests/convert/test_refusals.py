"""What cannot be converted is refused by name, before a byte is written, with the mend."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.convert.exporting import export_checkpoint
from megatron_rl.convert.importing import import_checkpoint
from megatron_rl.convert.source import fingerprint, read_source
from megatron_rl.convert.unfinished import check_space, own, partial_of, write_record
from megatron_rl.convert.verifying import verify_checkpoint
from megatron_rl.errors import BackendError, ConfigError, DataError
from megatron_rl.models import load_table
from tests.trainer.setup import write_checkpoint

NORM, ROUTER_BIAS = "model.norm.weight", "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return Path(write_checkpoint(tmp_path / "hf", "deepseek_v3", dtype="bfloat16"))


def edit(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def refused(directory: Path, error: type[Exception], message: str) -> None:
    """Nothing is written, either."""
    out = directory.with_name("out")
    with pytest.raises(error, match=message):
        import_checkpoint(directory, out, processes=1)
    assert not out.exists() and not partial_of(out).exists()


def test_missing_and_extra_tensors(hf: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.bias"] = tensors.pop(NORM)

    edit(hf, change)

    refused(
        hf, DataError, r"lacks 1 tensors .* has 1 that .*: missing: model\.norm\.weight; extra: model\.norm\.bias\. Use"
    )


def test_many_missing_tensors_are_all_listed_in_a_file(hf: Path) -> None:
    edit(hf, lambda tensors: [tensors.pop(name) for name in list(tensors) if "experts.3." in name])

    # gate, up and down of three layers and of the multi-token prediction layer
    refused(hf, DataError, r"lacks 12 tensors .*; and 2 more, all of them listed in .*out\.refused\.txt\. Use")
    assert len(hf.with_name("out.refused.txt").read_text().splitlines()) == 12
    hf.with_name("out.refused.txt").unlink()
    hf.with_name("out.refused.txt").mkdir()  # as where nobody may write
    refused(hf, DataError, r"does not: (missing: [\w.]+experts\.3\.\w+\.weight(; )?){12}\. Use the config\.json that")


def test_prediction_layers_that_transformers_left_out(hf: Path) -> None:
    edit(hf, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith("model.layers.4.")])

    refused(hf, DataError, r"lacks \d+ tensors .*transformers does not save: then set num_nextn_predict_layers to 0 in")
    edit(hf, lambda tensors: tensors.pop(NORM))
    refused(hf, DataError, r"lacks \d+ tensors .*Use the config\.json that belongs to the weights, and all their files")


def test_a_config_with_fewer_layers_than_the_weights(hf: Path) -> None:
    edit_config(hf, num_hidden_layers=3, num_nextn_predict_layers=0)

    refused(hf, DataError, r"has \d+ that the model does not: extra: model\.layers\.3\..*Use the config\.json that")


def test_a_shape_that_config_json_does_not_promise(hf: Path) -> None:
    edit(hf, lambda tensors: tensors.update({NORM: tensors[NORM][:-1]}))

    refused(hf, DataError, r"model\.norm\.weight is \[47\], config\.json makes it \[48\]\. Use the config\.json that")


def test_a_truncated_file(hf: Path) -> None:
    path = hf / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])

    refused(hf, DataError, r"model\.safetensors has \d+ bytes, its header promises \d+: it was truncated\. Download it")


@pytest.mark.parametrize("content", [b"", b"<html>no such file</html>", b"\x02\0\0\0\0\0\0\0[]"])
def test_a_file_in_another_format(content: bytes, hf: Path) -> None:
    (hf / "model.safetensors").write_bytes(content)

    refused(hf, DataError, r"model\.safetensors is not in safetensors format: .*Download it again")


def test_an_index_that_is_of_another_download(hf: Path) -> None:
    names = list(load_file(hf / "model.safetensors"))
    places = {name: "model.safetensors" for name in names if name != NORM}
    (hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

    refused(hf, DataError, r"index\.json and the files disagree about 1 tensors \(model\.norm\.weight\)")


def test_an_index_of_what_is_not_there(hf: Path) -> None:
    index = hf / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {NORM: "model-2.safetensors"}}))
    refused(hf, DataError, r"model-2\.safetensors is missing, though .*index\.json names it\. Download")
    index.write_text(json.dumps({"weight_map": [NORM]}))
    refused(hf, DataError, r"index\.json is no index of weights .*Download it again")


def test_a_tensor_in_two_files(hf: Path) -> None:
    names = list(load_file(hf / "model.safetensors"))
    places = {**dict.fromkeys(names, "model.safetensors"), "other": "a.safetensors"}
    save_file({NORM: torch.zeros(48), "other": torch.zeros(1)}, hf / "a.safetensors")
    (hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

    refused(hf, DataError, r"index\.json and the files disagree about 1 tensors \(model\.norm\.weight\)")


def test_tensors_that_overlap(hf: Path) -> None:
    places = {"a": [0, 8], "b": [4, 12], "c": [12, 16]}
    header = {n: {"dtype": "U8", "shape": [end - at], "data_offsets": [at, end]} for n, (at, end) in places.items()}
    text = json.dumps(header).encode()
    (hf / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))

    refused(hf, DataError, r"has b at byte \d+, what is before it ends at \d+: its tensors overlap or leave gaps")


def test_a_copy_that_is_none(hf: Path) -> None:
    name = "model.layers.4.shared_head.head.weight"  # of the multi-token prediction layer
    edit(hf, lambda tensors: tensors[name][3].zero_())

    refused(
        hf, DataError, r"4\.shared_head\.head\.weight in .* differs from lm_head\.weight, first in byte 288, and .*Make"
    )


def test_a_dtype_that_no_weights_have(hf: Path) -> None:
    edit(hf, lambda tensors: tensors.update({NORM: tensors[NORM].double()}))

    refused(hf, DataError, r"model\.norm\.weight has dtype F64, which is not supported\. Save it as one of bfloat16, f")


def test_a_router_bias_that_was_cast(hf: Path) -> None:
    edit(hf, lambda tensors: tensors.update({ROUTER_BIAS: tensors[ROUTER_BIAS].bfloat16()}))

    refused(
        hf, DataError, r"e_score_correction_bias is bfloat16, and the model keeps it in float32: .*Take it in float32"
    )


def test_a_config_without_architecture(hf: Path) -> None:
    edit_config(hf, architectures=None)

    refused(hf, ConfigError, r"names no architecture: nothing says how its tensors are to be read\. Add")
    edit_config(hf, architectures={"model": "DeepseekV3ForCausalLM"})
    refused(hf, ConfigError, r"names no architecture")


def test_another_quantization(hf: Path) -> None:
    edit_config(hf, quantization_config={"quant_method": "awq", "bits": 4})

    refused(hf, ConfigError, r"quantized \(awq.*only FP8 e4m3 with blocks of 128 x 128 can be read\. Use the bfloat16")
    edit_config(hf, quantization_config="fp8")
    refused(hf, ConfigError, r"quantization_config='fp8', which is no object: .*Copy it from the original")


def test_fp8_without_its_scales(hf: Path) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    edit(hf, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))

    refused(
        hf, DataError, r"o_proj\.weight is FP8 with no scale: its values cannot be known\. Take .*_scale_inv and quan"
    )


def test_training_from_fp8_says_how_to_convert(hf: Path) -> None:
    edit_config(hf, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})

    with pytest.raises(ConfigError, match=r"quantized \(fp8\).*python tools/convert import --hf DIR --out DIR"):
        load_table(json.loads((hf / "config.json").read_text()))


def test_an_out_directory_in_use(hf: Path, tmp_path: Path) -> None:
    for name in ("out", "other.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").touch()

    with pytest.raises(ConfigError, match=r"out exists and is not empty: .*Choose another --out"):
        import_checkpoint(hf, tmp_path / "out", processes=1)
    with pytest.raises(ConfigError, match=r"other\.partial is in the way, and nothing that this command left\. Remove"):
        import_checkpoint(hf, tmp_path / "other", processes=1)
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    for out in (tmp_path / "link", Path("/")):
        with pytest.raises(ConfigError, match=r"is a link or where a disk is mounted: .*Choose a directory below it"):
            import_checkpoint(hf, out, processes=1)
    with pytest.raises(ConfigError, match=r"nowhere is no directory\. Make it"):
        import_checkpoint(hf, tmp_path / "nowhere" / "out", processes=1)


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"1010000\.00 GB are needed for .*out and .* free there\. Free .* GB, or"):
        check_space(10**15, tmp_path / "out")


def test_a_disk_without_room_for_what_goes_with_the_weights(hf: Path, tmp_path: Path) -> None:
    with open(hf / "tokenizer.model", "wb") as companion:  # sparse: it takes nothing
        companion.truncate(shutil.disk_usage(tmp_path).free)

    refused(hf, BackendError, r"GB are needed for .*out and .* free there\. Free .* GB, or")


def test_a_record_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (steps.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(os, "rename", lambda a, b: (steps.append(str(b)), rename(a, b)))

    write_record(tmp_path / "unit-1.json", {"file": [7, "x"]})

    assert steps == [str(tmp_path / "unit-1.tmp"), str(tmp_path / "unit-1.json")]
    assert json.loads((tmp_path / "unit-1.json").read_text()) == {"file": [7, "x"]}


def test_a_source_that_changed_before_the_import_went_on(tmp_path: Path) -> None:
    begun = {"source": "/hf", "files": {"model.safetensors": [1000, 5]}, "unit_bytes": 7}
    partial = tmp_path / "out.partial"
    with own(partial, begun):
        pass

    with own(partial, begun):
        pass  # the same goes on
    with (
        pytest.raises(DataError, match=r"model\.safetensors in /hf changed since .*Put the files back, or remove"),
        own(partial, {**begun, "files": {"model.safetensors": [1000, 6]}}),
    ):
        pass
    with (
        pytest.raises(DataError, match=r"is what another conversion left, of /hf\. Remove it, or choose another --out"),
        own(partial, {**begun, "source": "/other"}),
    ):
        pass


def test_another_spelling_of_the_source_is_the_same_source(hf: Path, tmp_path: Path) -> None:
    here, there = (read_source(directory, report=tmp_path / "report") for directory in (hf, hf / ".." / "hf"))

    assert fingerprint(here, unit_bytes=7) == fingerprint(there, unit_bytes=7)


def test_two_processes_at_once(tmp_path: Path) -> None:
    begun = {"source": "/hf", "files": {}}
    with (
        own(tmp_path / "out.partial", begun),
        pytest.raises(ConfigError, match=r"Another process is writing .*Wait"),
        own(tmp_path / "out.partial", begun),
    ):
        pass


def test_export_and_verify_of_what_is_no_checkpoint(hf: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hf holds no weights in torch_dist format .*Name what `import` wrote"):
        export_checkpoint(hf, tmp_path / "out", processes=1, quantize=False)
    with pytest.raises(ConfigError, match=r"hf holds no weights in torch_dist format"):
        verify_checkpoint(hf, None, processes=1)
