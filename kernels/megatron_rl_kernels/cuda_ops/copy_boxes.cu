// copy_boxes: a block of threads for each tile of a rectangle. Columns of a row as copy_table.py writes them.
// Macros: THREADS, UNITS and CAST_UNITS of a tile, CAST_VECTOR the kind of row that casts eight elements at a time.
typedef long long i64;
typedef unsigned int u32;

struct Row {  // read once: the compiler must assume that a store changes what a pointer names
  i64 source, destination, count, middle, inner, source_steps[3], destination_steps[3], kind, first_tile;
};

struct Place {
  i64 source, destination;
};

__device__ __forceinline__ Place place(const Row& row, u32 unit) {
  const u32 rest = unit / (u32)row.inner;
  const i64 inner = unit % (u32)row.inner, middle = rest % (u32)row.middle, outer = rest / (u32)row.middle;
  const i64 *of = row.source_steps, *to = row.destination_steps;
  return {row.source + outer * of[0] + middle * of[1] + inner * of[2],
          row.destination + outer * to[0] + middle * to[1] + inner * to[2]};
}

// Units of T as they are.
template <typename T>
struct Same {
  T value;
  __device__ __forceinline__ void load(i64 at) { value = __ldcs((const T*)at); }
  __device__ __forceinline__ void store(i64 at) const { __stcs((T*)at, value); }
};

__device__ __forceinline__ u32 two_bfloat16(float low, float high) {
  u32 bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

struct CastEight {
  float4 low, high;
  __device__ __forceinline__ void load(i64 at) {
    low = __ldcs((const float4*)at);
    high = __ldcs((const float4*)at + 1);
  }
  __device__ __forceinline__ void store(i64 at) const {
    __stcs((uint4*)at, make_uint4(two_bfloat16(low.x, low.y), two_bfloat16(low.z, low.w),
                                  two_bfloat16(high.x, high.y), two_bfloat16(high.z, high.w)));
  }
};

struct CastOne {
  float value;
  __device__ __forceinline__ void load(i64 at) { value = __ldcs((const float*)at); }
  __device__ __forceinline__ void store(i64 at) const {
    __stcs((unsigned short*)at, (unsigned short)two_bfloat16(value, 0.0f));
  }
};

template <typename Unit, int SIZE>
__device__ __forceinline__ void move(const Row& row, u32 tile) {
  constexpr int EACH = SIZE / THREADS;
  const u32 count = (u32)row.count, first = tile * SIZE + threadIdx.x;
  Unit units[EACH];
  i64 destinations[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {  // all loads before the first store
    const u32 unit = first + i * THREADS;
    if (unit < count) {
      const Place at = place(row, unit);
      units[i].load(at.source);
      destinations[i] = at.destination;
    }
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i)
    if (first + i * THREADS < count) units[i].store(destinations[i]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    copy_boxes(const i64* __restrict__ rows, const int* __restrict__ row_of_tile) {
  const Row row = *(const Row*)(rows + (i64)row_of_tile[blockIdx.x] * 16);
  const u32 tile = blockIdx.x - (u32)row.first_tile;
  switch ((int)row.kind) {
    case 16: move<Same<uint4>, UNITS>(row, tile); break;
    case CAST_VECTOR: move<CastEight, CAST_UNITS>(row, tile); break;
    case 8: move<Same<unsigned long long>, UNITS>(row, tile); break;
    case 4: move<Same<u32>, UNITS>(row, tile); break;
    case 2: move<Same<unsigned short>, UNITS>(row, tile); break;
    case 1: move<Same<unsigned char>, UNITS>(row, tile); break;
    default: move<CastOne, UNITS>(row, tile);
  }
}
