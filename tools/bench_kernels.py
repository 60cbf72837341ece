"""Kernels on this machine's GPU: first bit for bit against their references, then GB/s against the device's own copy.

Counted are the bytes that an operation cannot avoid to read and write; a copy of contiguous gigabytes, measured in the
same run, is 100%. Every working set is far larger than any L2 cache.
Usage: python tools/bench_kernels.py [--json FILE] [--gib 4]
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

import torch  # noqa: E402
from megatron_rl_kernels import reference  # noqa: E402
from megatron_rl_kernels.triton_ops import checksum_boxes, copy_boxes, delta_boxes, quantize_boxes  # noqa: E402
from torch import Tensor  # noqa: E402

WARM_UP, REPEATS = 3, 20
EXPERT = (2048, 7168)
"""A weight of one of DeepSeek-V3's experts."""


@dataclass(frozen=True, slots=True)
class Result:
    """Of one operation."""

    operation: str
    implementation: str
    case: str
    nbytes: int
    """Read and written."""
    ms: float
    """Median."""
    gb_per_s: float
    share_of_copy: float


def implementations() -> Iterator[tuple[str, ModuleType, ModuleType]]:
    """Name, copy_boxes and quantize_boxes."""
    from megatron_rl_kernels.cuda_ops import copy_boxes as cuda_copy
    from megatron_rl_kernels.cuda_ops import quantize_boxes as cuda_quantize

    yield "triton", copy_boxes, quantize_boxes
    yield "cuda", cuda_copy, cuda_quantize


def bits(tensor: Tensor) -> Tensor:
    """As integers, on the CPU."""
    return tensor.view(reference.INTEGERS[tensor.element_size()]).cpu()


def expect_equal(found: list[Tensor], want: list[Tensor], what: str) -> None:
    """Stop the program when a bit differs."""
    for i, (a, b) in enumerate(zip(found, want, strict=True)):
        differs = int((bits(a) != bits(b)).sum())
        if differs:
            raise SystemExit(f"{what}: {differs} of {b.numel()} elements of output {i} are not the reference's.")
    print(f"bit-equal  {what}")


def random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random bytes."""
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8).view(dtype)


def cuts(memory: Tensor) -> list[Tensor]:
    """Views of every kind that do not overlap, of a [600, 1100] tensor."""
    whole, bulk = memory[:100].view(50, 2, 1100), memory[100:200, 16:1040]
    return [whole, bulk, memory[200:300, 3:700], memory[300:400, ::3], memory[400:500, :90].t(), memory[500:, 4:1000:2]]


def check_copy(name: str, module: ModuleType) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8):
        source, want = random((600, 1100), dtype), torch.zeros(600, 1100).to(dtype)
        found, there = want.cuda(), source.cuda()
        module.prepare(cuts(found), cuts(there))()
        reference.copy_boxes(cuts(want), cuts(source))
        expect_equal([found], [want], f"copy_boxes {name} {dtype}")
    floats, want = torch.randn(600, 1100) * torch.logspace(-45, 38, 1100), torch.zeros(600, 1100).bfloat16()
    found = want.cuda()
    module.prepare(cuts(found), cuts(floats.cuda()))()
    reference.copy_boxes(cuts(want), cuts(floats))
    expect_equal([found], [want], f"copy_boxes {name} float32 to bfloat16")


def check_quantize(name: str, module: ModuleType) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for columns in (1040, 1037):
            for power_of_two in (False, True):
                source = (torch.randn(700, 1100) * torch.logspace(-7, 3, 1100)).to(dtype)
                source[:128, :256], source[300, 300], source[550, 10] = 0, torch.nan, -torch.inf
                outputs = [torch.zeros(700, columns).to(torch.float8_e4m3fn), torch.zeros(6, -(-columns // 128))]
                found = [t.cuda() for t in outputs]

                def pieces(t: Tensor, columns: int = columns) -> list[Tensor]:
                    return [t[200:500, :columns], t[:200, :columns], t[500:, :columns]]

                module.prepare([found[0]], [found[1]], [pieces(source.cuda())], power_of_two=power_of_two)()
                reference.quantize_boxes([outputs[0]], [outputs[1]], [pieces(source)], power_of_two=power_of_two)
                expect_equal(found, outputs, f"quantize_boxes {name} {dtype}, {columns} columns, {power_of_two=}")


def check_delta() -> None:
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float32):
        old = random((600, 1100), dtype)
        new = torch.where(torch.rand(600, 1100) < 0.02, bits(random((600, 1100), dtype)), bits(old)).view(dtype)
        there = old.cuda()
        found = delta_boxes.prepare(cuts(new.cuda()), cuts(there))()
        want = reference.delta_boxes(cuts(new), cuts(old))
        expect_equal(
            [found.counts, found.indices, found.values], [want.counts, want.indices, want.values], f"delta {dtype}"
        )
        delta_boxes.prepare_apply(cuts(there))(found)
        reference.apply_delta(cuts(old), want)
        expect_equal([there], [old], f"apply_delta {dtype}")


def check_checksum() -> None:
    buffers = [random((n,), torch.uint8) for n in (0, 1, 8, 15, 16, 1023, 16384, 16385, 1 << 20, (1 << 24) + 5)]
    if checksum_boxes.prepare([b.cuda() for b in buffers])() != reference.checksum_boxes(buffers):
        raise SystemExit("checksum_boxes: the GPU's are not the reference's.")
    print("equal      checksum_boxes")


def measure(run: Callable[[], Any]) -> float:
    """Median milliseconds, warm."""
    times = []
    for i in range(WARM_UP + REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        if i >= WARM_UP:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def cases(count: int) -> Iterator[tuple[str, str, str, int, Callable[[], Any]]]:
    """Operation, implementation, case, bytes and what to run, over `count` experts' weights."""
    n = count * EXPERT[0] * EXPERT[1]
    weights = [torch.randn(EXPERT, device="cuda").bfloat16() for _ in range(count)]
    bucket = torch.empty(count, *EXPERT, dtype=torch.bfloat16, device="cuda")
    halves = [half for w in weights for half in w.chunk(2, dim=1)]
    packed = [half.view(EXPERT[0], -1) for b in bucket for half in b.view(-1).chunk(2)]
    rows = -(-EXPERT[0] // 128), -(-EXPERT[1] // 128)
    eights = [torch.empty(EXPERT, dtype=torch.float8_e4m3fn, device="cuda") for _ in weights]
    scales = [torch.empty(rows, device="cuda") for _ in weights]
    for name, copy, quantize in implementations():
        yield "copy_boxes", name, "bf16, contiguous", 4 * n, copy.prepare(list(bucket), weights)
        yield "copy_boxes", name, "bf16, halves of rows", 4 * n, copy.prepare(packed, halves)
        yield "quantize_boxes", name, "bf16", 3 * n, quantize.prepare(eights, scales, [[w] for w in weights])
    old = [w.clone() for w in weights]
    for w in old:
        w.view(-1)[::100] += 1
    yield "delta_boxes", "triton", "bf16, 1% changed", 4 * n + 6 * n // 100, delta_boxes.prepare(weights, old)
    yield "checksum_boxes", "triton", "bf16", 2 * n, checksum_boxes.prepare(weights)
    del old
    floats = [w.float() for w in weights]
    for name, copy, quantize in implementations():
        yield "copy_boxes", name, "fp32 to bf16", 6 * n, copy.prepare(list(bucket), floats)
        yield "quantize_boxes", name, "fp32", 5 * n, quantize.prepare(eights, scales, [[w] for w in floats])


def bench(gib: int) -> tuple[float, list[Result]]:
    """GB/s of the device's own copy, and of the operations."""
    source = torch.empty(gib << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    own = 2 * source.nbytes / measure(partial(target.copy_, source)) / 1e6
    print(f"{torch.cuda.get_device_name()}: copies {own:.0f} GB/s, read and written")
    results = []
    for operation, implementation, case, nbytes, run in cases((gib << 30) // (2 * EXPERT[0] * EXPERT[1])):
        ms = measure(run)
        speed = nbytes / ms / 1e6
        results.append(Result(operation, implementation, case, nbytes, ms, speed, speed / own))
        print(f"{operation:15} {implementation:7} {case:22} {ms:8.3f} ms  {speed:6.0f} GB/s  {speed / own:4.0%}")
    return own, results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument(
        "--gib", type=int, default=4, help="bf16 weights to work on; five times as much memory is taken"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("No GPU here: kernels are measured on one. Run this where torch.cuda.is_available().")
    torch.manual_seed(0)
    for name, copy, quantize in implementations():
        check_copy(name, copy)
        check_quantize(name, quantize)
    check_delta()
    check_checksum()
    own, results = bench(options.gib)
    if options.json:
        found = {"device": torch.cuda.get_device_name(), "copy_gb_per_s": own, "results": [asdict(r) for r in results]}
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
