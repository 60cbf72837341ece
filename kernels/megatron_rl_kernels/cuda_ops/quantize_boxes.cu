// quantize_boxes: a block of threads for each block of 128 x 128. Columns of a row as quantize_table.py writes them.
// Macro: THREADS, 256: each thread holds 16 neighbours of four lines.
typedef long long i64;
typedef unsigned int u32;
typedef unsigned short u16;

struct BFloat16 {
  u16 bits;
  __device__ __forceinline__ operator float() const { return __uint_as_float((u32)bits << 16); }
};

struct Float16 {
  u16 bits;
  __device__ __forceinline__ operator float() const {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
};

// To nearest, ties to even; a NaN becomes 0x7f.
__device__ __forceinline__ u32 two_e4m3(float low, float high) {
  u16 bits;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
  return bits;
}

__device__ __forceinline__ float scale_of(u32 largest, bool power_of_two) {  // largest: bits of a float without sign
  if (largest > 0x7f800000u) return __uint_as_float(0x7fc00000u);
  if (largest == 0) return 1.0f;
  const float scale = fmaxf(__fdiv_rn(__uint_as_float(largest), 448.0f), __uint_as_float(0x00800000u));
  return power_of_two ? __uint_as_float((__float_as_uint(scale) + 0x7fffffu) & 0x7f800000u) : scale;
}

__device__ __forceinline__ u32 largest_of_block(u32 mine) {
  __shared__ u32 of_warps[THREADS / 32];
  mine = __reduce_max_sync(~0u, mine);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = mine;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < THREADS / 32; ++i) mine = max(mine, of_warps[i]);
  return mine;
}

struct Row {  // read once: the compiler must assume that a store changes what a pointer names
  i64 first_line, high, wide, source_step, to, to_line, to_column, scale, scale_line, scale_column, blocks_wide, first_tile;
};

template <typename Source, typename Bits, bool ALIGNED>
__device__ __forceinline__ void quantize(const i64* rows, const int* row_of_tile, const i64* lines, bool power_of_two) {
  constexpr int LANES = 16, STEP = THREADS / 8, EACH = 128 / STEP;
  const Row row = *(const Row*)(rows + (i64)row_of_tile[blockIdx.x] * 16);
  const u32 tile = blockIdx.x - (u32)row.first_tile;
  const i64 block_line = tile / (u32)row.blocks_wide, block_column = tile % (u32)row.blocks_wide;
  const i64 line = block_line * 128 + threadIdx.x / 8, column = block_column * 128 + threadIdx.x % 8 * LANES;
  const i64 columns = row.wide - column;  // left from here
  i64 from[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) from[i] = line + i * STEP < row.high ? lines[row.first_line + line + i * STEP] : 0;
  alignas(16) Source values[EACH][LANES] = {};
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const i64 at = from[i] + column * row.source_step;
    if constexpr (ALIGNED) {
      if (from[i] && columns > 0)
#pragma unroll
        for (int j = 0; j < (int)sizeof(Source); ++j) ((uint4*)values[i])[j] = __ldcs((const uint4*)at + j);
    } else {
#pragma unroll
      for (int j = 0; j < LANES; ++j)
        if (from[i] && j < columns) values[i][j] = Source{__ldcs((const Bits*)(at + j * row.source_step))};
    }
  }
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i)
#pragma unroll
    for (int j = 0; j < LANES; ++j) largest = max(largest, __float_as_uint((float)values[i][j]) & 0x7fffffffu);
  const float scale = scale_of(largest_of_block(largest), power_of_two);
  if (threadIdx.x == 0) __stcs((float*)row.scale + block_line * row.scale_line + block_column * row.scale_column, scale);
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    if (line + i * STEP >= row.high) continue;
    const i64 to = row.to + (line + i * STEP) * row.to_line + column * row.to_column;
    u32 packed[LANES / 4];
#pragma unroll
    for (int j = 0; j < LANES; j += 4)
      packed[j / 4] = two_e4m3(__fdiv_rn(values[i][j], scale), __fdiv_rn(values[i][j + 1], scale)) |
                      two_e4m3(__fdiv_rn(values[i][j + 2], scale), __fdiv_rn(values[i][j + 3], scale)) << 16;
    if constexpr (ALIGNED) {
      if (columns > 0) __stcs((uint4*)to, make_uint4(packed[0], packed[1], packed[2], packed[3]));
    } else {
#pragma unroll
      for (int j = 0; j < LANES; ++j)
        if (j < columns) __stcs((unsigned char*)(to + j * row.to_column), (unsigned char)(packed[j / 4] >> j % 4 * 8));
    }
  }
}

#define KERNEL(NAME, SOURCE, BITS, ALIGNED)                                                                         \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                        \
      NAME(const i64* __restrict__ rows, const int* __restrict__ row_of_tile, const i64* __restrict__ lines,   \
           int power_of_two) {                                                                                 \
    quantize<SOURCE, BITS, ALIGNED>(rows, row_of_tile, lines, power_of_two);                                         \
  }
KERNEL(bfloat16_aligned, BFloat16, u16, true)
KERNEL(bfloat16_any, BFloat16, u16, false)
KERNEL(float16_aligned, Float16, u16, true)
KERNEL(float16_any, Float16, u16, false)
KERNEL(float32_aligned, float, float, true)
KERNEL(float32_any, float, float, false)
