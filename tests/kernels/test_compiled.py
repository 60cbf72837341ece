"""What the compiler made of each Triton kernel, read from PTX and SASS, which takes no GPU."""

import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl
from megatron_rl_kernels.triton_ops import checksum_boxes, copy_boxes, delta_boxes, quantize_boxes
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(nvidia.__file__).parent / "bin"
TABLE = {"rows": "*i64", "row_of_tile": "*i32"}


@dataclass(frozen=True)
class Compiled:
    ptx: str
    sass: str
    resources: str

    def count(self, instruction: str) -> int:
        return len(re.findall(instruction, self.ptx))


@pytest.fixture(scope="module", params=[90, 100], ids=["sm_90", "sm_100"])
def build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Compiled]:
    folder = tmp_path_factory.mktemp("triton")

    def compiled(kernel: Any, pointers: Mapping[str, str], *, num_warps: int, **constants: Any) -> Compiled:
        aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in pointers}
        source = ASTSource(kernel, {**pointers, **dict.fromkeys(constants, "constexpr")}, constants, aligned)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_CACHE_DIR", str(folder))
            found = triton.compile(
                source, target=GPUTarget("cuda", request.param, 32), options={"num_warps": num_warps}
            )
        cubin = folder / "kernel.cubin"
        cubin.write_bytes(found.asm["cubin"])
        return Compiled(found.asm["ptx"], _run("nvdisasm", "-c", cubin), _run("cuobjdump", "-res-usage", cubin))

    return compiled


def _run(tool: str, *arguments: str | Path) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


def assert_no_spill(found: Compiled) -> None:
    assert "STACK:0 " in found.resources, found.resources
    assert "LDG" in found.sass and not re.search(r"\b(STL|LDL)\b", found.sass)


def accesses(found: Compiled, what: str) -> tuple[int, int]:
    """Of global memory, in PTX and in SASS, those of 128 bits."""
    letters = {"ld": "LDG", "st": "STG"}[what]
    wide = rf"{what}\.global\S*\.(v4\.b32|v2\.b64)"
    return found.count(wide), len(re.findall(rf"{letters}\.E[\w.]*\.128", found.sass))


def test_copies_move_16_bytes_at_a_time(build: Callable[..., Compiled]) -> None:
    found = build(copy_boxes.copy_kernel, TABLE, num_warps=copy_boxes.NUM_WARPS)

    threads = 32 * copy_boxes.NUM_WARPS
    units, casts = 1024 // threads, 256 // threads
    assert accesses(found, "ld") == (units + 2 * casts,) * 2  # eight floats are 32 bytes
    assert accesses(found, "st") == (units + casts,) * 2
    assert found.count(r"cvt\.rn\.bf16x2\.f32") == 4 * casts
    assert_no_spill(found)


@pytest.mark.parametrize(
    ("source", "size", "power_of_two"), [(tl.bfloat16, 2, False), (tl.float32, 4, True)], ids=["bf16", "fp32"]
)
def test_blocks_are_read_once_by_16_bytes_and_divided_as_ieee_says(
    build: Callable[..., Compiled], source: Any, size: int, power_of_two: bool
) -> None:
    found = _quantize(build, SOURCE=source, ALIGNED=True, POWER_OF_TWO=power_of_two)

    of_thread = 128 * 128 // (32 * quantize_boxes.NUM_WARPS)
    assert accesses(found, "ld") == (of_thread * size // 16,) * 2
    assert accesses(found, "st") == (of_thread // 16,) * 2
    assert found.count(r"div\.rn\.f32") == of_thread + 1  # and the scale
    assert found.count(r"cvt\.rn\.satfinite\.e4m3x2\.f32") == of_thread // 2
    assert_no_spill(found)


def test_blocks_that_are_not_aligned_stay_in_registers(build: Callable[..., Compiled]) -> None:
    found = _quantize(build, SOURCE=tl.float32, ALIGNED=False, POWER_OF_TWO=True)

    assert found.count(r"div\.rn\.f32") > 1 and not found.count(r"div\.(full|approx)|\.ftz")
    assert_no_spill(found)


def _quantize(build: Callable[..., Compiled], **constants: Any) -> Compiled:
    pointers = {**TABLE, "lines": "*i64"}
    found = build(quantize_boxes.quantize_kernel, pointers, num_warps=quantize_boxes.NUM_WARPS, **constants)
    assert not found.count(r"div\.(full|approx)|\.ftz")
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_versions_are_compared_16_bytes_at_a_time(build: Callable[..., Compiled], size: int) -> None:
    constants = {"TYPE": delta_boxes.TYPES[size], "WIDE": 16 // size, "num_warps": delta_boxes.NUM_WARPS}
    values = {"indices": "*i32", "values": f"*{delta_boxes.TYPES[size]}".replace("int", "i").replace("ui", "u")}
    units = delta_boxes.UNITS.value // (32 * delta_boxes.NUM_WARPS)

    count = build(delta_boxes.count_kernel, {**TABLE, "counts": "*i32"}, **constants)
    write = build(delta_boxes.write_kernel, {**TABLE, "ends": "*i64", **values}, **constants)

    for found in (count, write):
        assert accesses(found, "ld") == (2 * units,) * 2
        assert_no_spill(found)
    assert not count.count(r"\batom|\bred\.") and not write.count(r"\batom|\bred\.")


def test_changes_are_applied_without_spilling(build: Callable[..., Compiled]) -> None:
    pointers = {"rows": "*i64", "runs": "*i64", "row_of_tile": "*i32", "indices": "*i32", "values": "*i16"}

    found = build(delta_boxes.apply_kernel, pointers, num_warps=delta_boxes.NUM_WARPS, TYPE=tl.int16)

    assert_no_spill(found)


def test_a_warp_hashes_a_chunk_by_16_bytes_and_waits_for_no_other(build: Callable[..., Compiled]) -> None:
    pointers = {"chunks": "*i64", "keys": "*u64", "digests": "*u64"}

    found = build(checksum_boxes.checksum_kernel, pointers, num_warps=checksum_boxes.NUM_WARPS)

    chunk, keys = 16384 // (16 * 32), 1024 // (16 * 32)
    assert accesses(found, "ld")[1] >= chunk + 2 * keys
    assert found.sass.count("IMAD.WIDE.U32") >= 16384 // 8 // 32  # 32 x 32 bits to 64, one instruction
    assert not re.search(r"BAR\.SYNC|LDS|STS", found.sass)
    assert_no_spill(found)
