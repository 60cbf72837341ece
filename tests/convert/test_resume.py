"""A conversion that failed half-way goes on: what was done is kept, and the result is that of one that never failed."""

import filecmp
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_rl.convert import exporting, importing
from megatron_rl.convert.exporting import export_checkpoint
from megatron_rl.convert.importing import import_checkpoint
from megatron_rl.errors import BackendError, ConfigError
from tests.trainer.setup import write_checkpoint

REAL: dict[type, Callable[[Any], None]] = {
    importing.Unit: importing.write_unit,
    exporting.Unit: exporting.write_unit,
}
KEPT = 3
"""Units that are done when the disk is full."""


def noted(unit: Any) -> None:
    """Writes a unit, in a worker, and says so."""
    REAL[type(unit)](unit)
    with open(unit.partial.parent / "written", "a") as file:
        file.write(f"{unit.number}\n")


def failing(unit: Any) -> None:
    """As on a disk that gets full."""
    log = unit.partial.parent / "written"
    if log.exists() and len(log.read_text().split()) >= KEPT:
        raise BackendError("there is no room")
    noted(unit)


def when_free(convert: Callable[[], Any]) -> Any:
    """Workers of the call that failed end their unit before they let go of the directory."""
    for _ in range(200):
        try:
            return convert()
        except ConfigError as error:
            assert "Another process is writing" in str(error)
            time.sleep(0.1)
    raise TimeoutError


def convert_twice(module: ModuleType, convert: Callable[[Path], Any], out: Path) -> Any:
    """Fail at a unit, then go on. Returns: what the second call did. Asserts that no unit was written twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "write_unit", failing)
        with pytest.raises(BackendError, match="there is no room"):
            convert(out)
        assert not out.exists()
        before = (out.parent / "written").read_text().split()
        patch.setattr(module, "write_unit", noted)
        result = when_free(lambda: convert(out))
    after = (out.parent / "written").read_text().split()
    assert len(before) == KEPT < len(after) and Counter(after).most_common(1)[0][1] == 1
    return result


def test_an_import_and_an_export_go_on_and_write_no_unit_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf = Path(write_checkpoint(tmp_path / "hf", "qwen3_moe", dtype="bfloat16"))
    monkeypatch.setattr(exporting, "UNIT_BYTES", 20_000)
    for name in ("in", "out"):
        (tmp_path / name).mkdir()

    notes = convert_twice(importing, lambda out: import_checkpoint(hf, out, processes=1), tmp_path / "in" / "megatron")
    differing, _ = convert_twice(
        exporting,
        lambda out: export_checkpoint(tmp_path / "in" / "megatron", out, processes=1, quantize=False),
        tmp_path / "out" / "again",
    )

    assert any(note.startswith("resumed: ") for note in notes)
    assert differing == []
    names = sorted(path.name for path in hf.iterdir())
    assert filecmp.cmpfiles(hf, tmp_path / "out" / "again", names, shallow=False) == (names, [], [])
