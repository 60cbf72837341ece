"""Import asks megatron-core whether tensors lie where the table says: see test_roundtrip.py for every family."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.convert.importing import import_checkpoint
from megatron_rl.convert.placement import compare, find_placement
from megatron_rl.errors import LayoutError
from tests.tiny import TINY
from tests.trainer.setup import write_checkpoint


def test_a_tensor_that_megatron_keeps_elsewhere_is_named() -> None:
    ours = find_placement({**TINY["qwen3_moe"], "vocab_size": 73})
    name, key = "model.layers.2.mlp.experts.5.up_proj.weight", "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    (spot,) = ours.spots[name]
    assert (spot.key, spot.offset, spot.shape) == (key, (2, 5, 40, 0), (40, 56))
    assert ours.sizes[key] == (4, 8, 80, 56)

    compare(ours, ours)
    moved = replace(ours, spots={**ours.spots, name: (replace(spot, offset=(2, 5, 0, 0)),)})
    with pytest.raises(LayoutError, match=rf"keeps 1 tensors of the model elsewhere .*\({name}\).*requirements/ pins"):
        compare(ours, moved)
    grown = replace(ours, sizes={**ours.sizes, key: (4, 9, 80, 56)})
    with pytest.raises(LayoutError, match=rf"keeps 1 tensors of the model elsewhere .*\({key}\)"):
        compare(ours, grown)


def test_export_and_verify_import_neither_torch_nor_megatron(tmp_path: Path) -> None:
    """They would take longer than to copy gigabytes."""
    write_checkpoint(tmp_path / "hf", "qwen3_moe", dtype="bfloat16")
    import_checkpoint(tmp_path / "hf", tmp_path / "megatron", processes=1)
    code = """if True:
        import sys
        from pathlib import Path
        from megatron_rl.convert.exporting import export_checkpoint
        from megatron_rl.convert.verifying import verify_checkpoint
        megatron, out = map(Path, sys.argv[1:])
        print(export_checkpoint(megatron, out, processes=1, quantize=False)[0])
        print(verify_checkpoint(megatron, out, processes=1)[0])
        print(sorted({"torch", "megatron"} & set(sys.modules)))"""

    words = [sys.executable, "-c", code, str(tmp_path / "megatron"), str(tmp_path / "again")]
    out = subprocess.run(words, capture_output=True, text=True, check=True)

    assert out.stdout.splitlines() == ["[]", "[]", "[]"]
