"""Runs the CUDA kernels of this project on a CPU, each CUDA thread a thread of its own: their logic, without a GPU."""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from megatron_rl_kernels import cuda_ops
from megatron_rl_kernels.cuda_ops.nvrtc import THREADS

PRELUDE = r"""
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(n)
#define __restrict__
#define __shared__ static
using std::max;
struct uint4 { unsigned x, y, z, w; };
struct float4 { float x, y, z, w; };
struct dim3 { unsigned x; };
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static thread_local dim3 threadIdx, blockIdx;
static std::barrier everyone(THREADS);
static unsigned of_threads[THREADS];
static void __syncthreads() { everyone.arrive_and_wait(); }
static unsigned __reduce_max_sync(unsigned, unsigned mine) {
  of_threads[threadIdx.x] = mine;
  __syncthreads();
  const unsigned* warp = of_threads + threadIdx.x / 32 * 32;
  return *std::max_element(warp, warp + 32);
}
template <typename T> static T __ldcs(const T* p) {
  if ((uintptr_t)p % sizeof(T)) abort();
  return *p;
}
template <typename T> static void __stcs(T* p, T value) {
  if ((uintptr_t)p % sizeof(T)) abort();
  *p = value;
}
template <typename To, typename From> static To as(From value) { To to; memcpy(&to, &value, sizeof to); return to; }
static float __uint_as_float(unsigned v) { return as<float>(v); }
static unsigned __float_as_uint(float v) { return as<unsigned>(v); }
static float __fdiv_rn(float a, float b) { return a / b; }
static unsigned bf16(float v) {  // cvt.rn.bf16.f32, whose NaN is 0x7fff
  unsigned b = as<unsigned>(v);
  return v != v ? 0x7fff : (b + 0x7fff + (b >> 16 & 1)) >> 16;
}
static unsigned e4m3(float v) {  // cvt.rn.satfinite.e4m3.f32, whose NaN is 0x7f
  if (v != v) return 0x7f;
  const float size = std::min(std::fabs(v), 448.0f);
  const int exponent = std::max(size ? std::ilogb(size) : -9, -6);
  const unsigned eighths = std::nearbyint(std::ldexp(size, 3 - exponent));  // 8 to 16; below 8 where subnormal
  return (as<unsigned>(v) >> 31 << 7) | ((exponent + 6) * 8 + eighths);
}
"""
CASTS = {
    "cvt.rn.bf16x2.f32": "bf16({1}) | bf16({0}) << 16",
    "cvt.rn.satfinite.e4m3x2.f32": "e4m3({1}) | e4m3({0}) << 8",
    "cvt.f32.f16": "as<_Float16>({0})",
}
LAUNCH = """
extern "C" void run_{0}(unsigned blocks, {1}) {{
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < THREADS; ++i) threads.emplace_back([=] {{
    threadIdx.x = i;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {{
      {0}({2});
      everyone.arrive_and_wait();
    }}
  }});
  for (auto& thread : threads) thread.join();
}}
"""
Run = Callable[..., None]
PARAMETERS = ["const i64* rows", "const int* row_of_tile", "const i64* lines", "int power_of_two"]


def build(name: str, kernels: Iterable[str], folder: Path, **macros: int) -> Run:
    """`name`.cu as a function of a kernel's name, of the number of blocks, and of the kernel's arguments."""
    if shutil.which("g++") is None:
        pytest.skip("no g++, which compiles CUDA sources for a CPU here: apt-get install g++")
    source = (Path(cuda_ops.__file__).parent / f"{name}.cu").read_text()

    def cast(found: re.Match[str]) -> str:
        return f"{found[2]} = {CASTS[found[1]].format(*re.findall(r'"." *[(](\w+)[)]', found[3]))};"

    source = re.sub(r'asm[(]"([\w.]+) [^"]*" : "=\w"[(](\w+)[)] : ([^;]*)[)];', cast, source)
    assert "asm" not in source, "an instruction that CASTS does not know"
    parameters = PARAMETERS[: 2 if name == "copy_boxes" else 4]
    passed = ", ".join(parameter.split()[-1] for parameter in parameters)
    launches = "".join(LAUNCH.format(kernel, ", ".join(parameters), passed) for kernel in kernels)
    (folder / f"{name}.cpp").write_text(PRELUDE + source + launches)
    defined = [f"-D{macro}={value}" for macro, value in {"THREADS": THREADS, **macros}.items()]
    command = [
        "g++",
        "-std=c++20",
        "-O1",
        "-w",
        "-shared",
        "-fPIC",
        "-pthread",
        *defined,
        f"{name}.cpp",
        "-o",
        f"{name}.so",
    ]
    compiled = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr[-3000:]
    library = ctypes.CDLL(str(folder / f"{name}.so"))

    def run(kernel: str, blocks: int, *arguments: int) -> None:
        library[f"run_{kernel}"](ctypes.c_uint(blocks), *map(ctypes.c_longlong, arguments))

    return run
