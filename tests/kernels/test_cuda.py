"""The CUDA kernels: compiled for a GPU and read; and run, on a CPU, against the references."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from megatron_rl_kernels import reference
from megatron_rl_kernels.copy_table import KIND, compile_copy
from megatron_rl_kernels.cuda_ops import copy_boxes, nvrtc
from megatron_rl_kernels.quantize_table import compile_quantize
from triton.backends import nvidia

from tests.kernels import cuda_on_cpu
from tests.kernels.views import Cut, bits, random, weights

TOOLS = Path(nvidia.__file__).parent / "bin"
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}


@pytest.fixture(scope="module", params=["sm_90", "sm_100"])
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def sass_of(name: str, arch: str, folder: Path, **macros: int) -> tuple[dict[str, str], str]:
    """Instructions of each kernel, and the resources of all."""
    (folder / "cubin").write_bytes(nvrtc.compile_source(name, arch, **macros).code)

    def run(*command: str) -> str:
        return subprocess.run(
            [TOOLS / command[0], *command[1:], folder / "cubin"], capture_output=True, text=True
        ).stdout

    parts = re.split(r"\n\.text\.(\w+):", run("nvdisasm", "-c"))
    return dict(zip(parts[1::2], parts[2::2], strict=True)), run("cuobjdump", "-res-usage")


def count(instruction: str, sass: str) -> int:
    return len(re.findall(instruction, sass))


def test_the_copy_moves_16_bytes_at_a_time(arch: str, tmp_path: Path) -> None:
    kernels, resources = sass_of("copy_boxes", arch, tmp_path, **copy_boxes.MACROS)

    (sass,) = kernels.values()
    assert count(r"LDG\.E[\w.]*\.128", sass) == 1024 // nvrtc.THREADS + 2 * 256 // nvrtc.THREADS
    assert count(r"STG\.E[\w.]*\.128", sass) == 1024 // nvrtc.THREADS + 256 // nvrtc.THREADS
    assert "STACK:0 " in resources and not count(r"\b(STL|LDL)\b", sass)


def test_blocks_are_read_once_by_16_bytes_and_divided_as_ieee_says(arch: str, tmp_path: Path) -> None:
    kernels, resources = sass_of("quantize_boxes", arch, tmp_path)

    each = 128 * 128 // nvrtc.THREADS
    for dtype, size in DTYPES.items():
        sass = kernels[f"{dtype}_aligned"]
        assert count(r"LDG\.E[\w.]*\.128", sass) == each * size // 16
        assert count(r"STG\.E[\w.]*\.128", sass) == each // 16
    for sass in kernels.values():
        assert count("FCHK", sass) == each + 1  # the check of an IEEE division: of each element, and of the scale
        assert not count(r"\b(STL|LDL)\b", sass)
    assert resources.count("STACK:0 ") == len(kernels) == 6


def test_the_copy_copies_every_bit_and_writes_nothing_else(tmp_path: Path) -> None:
    """Pairs of every kind of row."""
    run = cuda_on_cpu.build("copy_boxes", ["copy_boxes"], tmp_path, **copy_boxes.MACROS)
    torch.manual_seed(0)
    floats, half, single, byte = torch.float32, torch.bfloat16, torch.float32, torch.uint8
    cases = [
        (Cut((3, 5, 3072), (0, 1, 16), (0, 2, 32), 1, (0, 1, 2)), half, half),
        (Cut((9, 320), (1, 16), (0, 8), 1, (0, 1)), half, floats),
        (Cut((9, 77), (1, 3), (0, 5), 1, (0, 1)), half, floats),
        (Cut((2, 3, 2, 5), (1, 0, 1, 2), (0, 1, 0, 1), 2, (2, 0, 1, 3)), byte, byte),
        (Cut((6, 12), (1, 4), (0, 4), 1, (0, 1)), half, half),
        (Cut((6, 12), (1, 2), (0, 4), 1, (0, 1)), half, half),
        (Cut((6, 13), (1, 1), (0, 4), 1, (1, 0)), half, half),
        (Cut((6, 13), (1, 1), (0, 4), 2, (0, 1)), single, single),
    ]
    sources = [cut.view(of)[1] for cut, _, of in cases]
    for source, (_, to, of) in zip(sources, cases, strict=True):
        source.copy_(random(tuple(source.shape), of) if to == of else torch.randn(source.shape))
    got, want = ([cut.view(to) for cut, to, _ in cases] for _ in range(2))
    table = compile_copy([view for _, view in got], sources)

    rows, row_of_tile = table.tiles.rows, table.tiles.row_of_tile
    run("copy_boxes", len(row_of_tile), rows.data_ptr(), row_of_tile.data_ptr())

    reference.copy_boxes([view for _, view in want], sources)
    assert set(rows[:, KIND].tolist()) == {1, 2, 4, 8, 16, 32, 33}
    assert [torch.equal(a, b) for (a, _), (b, _) in zip(got, want, strict=True)] == [True] * len(cases)


@pytest.fixture(scope="module")
def quantize(tmp_path_factory: pytest.TempPathFactory) -> cuda_on_cpu.Run:
    names = [f"{dtype}_{kind}" for dtype in DTYPES for kind in ("aligned", "any")]
    return cuda_on_cpu.build("quantize_boxes", names, tmp_path_factory.mktemp("cuda"))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantizing_equals_the_reference(
    quantize: cuda_on_cpu.Run, dtype: str, aligned: bool, power_of_two: bool
) -> None:
    torch.manual_seed(0)
    parts = weights(getattr(torch, dtype), aligned=aligned)
    cut = Cut((141, parts[0].shape[1]), (1, 16), (1, 16 if aligned else 3), 1, (0, 1))
    (got, to), (want, want_to) = cut.view(torch.float8_e4m3fn), cut.view(torch.float8_e4m3fn)
    scale, want_scale = torch.zeros(3, 2).t(), torch.zeros(2, 3)

    (table,) = compile_quantize([to], [scale], [parts], power_of_two=power_of_two)
    pointers = (t.data_ptr() for t in (table.tiles.rows, table.tiles.row_of_tile, table.lines))
    quantize(f"{dtype}_{'aligned' if table.aligned else 'any'}", 6, *pointers, int(power_of_two))

    reference.quantize_boxes([want_to], [want_scale], [parts], power_of_two=power_of_two)
    assert table.aligned == aligned
    assert torch.equal(got, want)
    assert torch.equal(bits(scale.contiguous()), bits(want_scale))


def test_every_bfloat16_is_rounded_as_the_reference_does(quantize: cuda_on_cpu.Run) -> None:
    source = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16).view(256, 256)
    to, scale = torch.zeros(256, 256).to(torch.float8_e4m3fn), torch.zeros(2, 2)
    want, want_scale = to.clone(), scale.clone()

    (table,) = compile_quantize([to], [scale], [[source]], power_of_two=False)
    pointers = (t.data_ptr() for t in (table.tiles.rows, table.tiles.row_of_tile, table.lines))
    quantize("bfloat16_aligned", 4, *pointers, 0)

    reference.quantize_boxes([want], [want_scale], [[source]])
    assert torch.equal(bits(to), bits(want)) and torch.equal(bits(scale), bits(want_scale))
