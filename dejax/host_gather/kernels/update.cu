// Updates rows of a table in mapped host memory in place. Compiled by NVRTC with -D:
//   ID            int or long long, the type of ids, which ascend; `perm` has the row of `values` of each id
//   UNIT          1, 2, 4, 8 or 16: bytes of an access; the largest power of two that divides the rows' bytes
//   OP            0 set, 1 add, 2 SGD, 3 Adagrad, 4 Adam
//   TABLE, VALUES element types; -1 (set only) moves bytes
//
// A lane's unit of work is 16 bytes of the row of an id's first occurrence. It adds the values of equal ids in the order
// given, so the result does not depend on the schedule. Over the bus it reads the unit and the state of its elements in
// words of UNIT bytes, all of them before it writes any: neighbouring lanes then make requests of 128 bytes.

__device__ __forceinline__ Chunk Read(const char* row, int at, int row_bytes) {
  Chunk chunk;
  chunk.v = make_uint4(0, 0, 0, 0);
  using T = Word<UNIT>::Type;
#pragma unroll
  for (int i = 0; i < 16; i += UNIT) {
    if (at + i < row_bytes) *reinterpret_cast<T*>(chunk.bytes + i) = *reinterpret_cast<const T*>(row + at + i);
  }
  return chunk;
}

__device__ __forceinline__ void Put(char* row, int at, int row_bytes, const Chunk& chunk) {
  using T = Word<UNIT>::Type;
#pragma unroll
  for (int i = 0; i < 16; i += UNIT) {
    if (at + i < row_bytes) *reinterpret_cast<T*>(row + at + i) = *reinterpret_cast<const T*>(chunk.bytes + i);
  }
}

#if OP != 0
using T = Element<TABLE>;
using V = Element<VALUES>;
constexpr int kSize = sizeof(T::Storage), kPer = 16 / kSize;
// The largest power of two, up to 16, that divides the bytes of a row of state: UNIT divides those of a row.
constexpr int kStateUnit = UNIT * 4 / kSize < 16 ? UNIT * 4 / kSize : 16;

// The float32 state of the elements of a unit.
union State {
  uint4 v[kPer / 4];
  float x[kPer];
  char bytes[4 * kPer];
};

__device__ __forceinline__ State ReadState(const float* from, int elements) {
  State state;
  using W = Word<kStateUnit>::Type;
#pragma unroll
  for (int i = 0; i < 4 * kPer; i += kStateUnit) {
    if (i < 4 * elements) {
      *reinterpret_cast<W*>(state.bytes + i) = *reinterpret_cast<const W*>(reinterpret_cast<const char*>(from) + i);
    }
  }
  return state;
}

__device__ __forceinline__ void PutState(float* to, int elements, const State& state) {
  using W = Word<kStateUnit>::Type;
#pragma unroll
  for (int i = 0; i < 4 * kPer; i += kStateUnit) {
    if (i < 4 * elements) {
      *reinterpret_cast<W*>(reinterpret_cast<char*>(to) + i) = *reinterpret_cast<const W*>(state.bytes + i);
    }
  }
}
#endif

// Units that a lane has in flight, so that registers suffice for 1,024 threads.
constexpr int kInFlight = OP >= 3 ? 1 : kUnroll;
static_assert(kUnroll % kInFlight == 0);

// Updates the units begin, begin + 32, ...
__device__ __forceinline__ void UpdateUnits(const UpdateParams& p, const ID* ids, int chunks, long long total,
                                            long long begin) {
  Chunk old[kInFlight];
  long long position[kInFlight];
#if OP >= 3
  State moment[kInFlight];
#endif
#if OP == 4
  State second[kInFlight];
#endif
#pragma unroll
  for (int u = 0; u < kInFlight; ++u) {
    const long long i = begin + u * 32;
    position[u] = -1;
    if (i >= total) continue;
    const long long r = i / chunks;
    const ID id = ids[r];
    if (id < 0 || id >= p.rows || (r > 0 && ids[r - 1] == id)) continue;
    position[u] = r;
#if OP != 0
    const int at = static_cast<int>(i - r * chunks) * 16;
    old[u] = Read(p.table + static_cast<long long>(id) * p.row_bytes, at, p.row_bytes);
#endif
#if OP >= 3
    const int elements = (p.row_bytes - at) / kSize;
    const long long state = (static_cast<long long>(id) * p.row_bytes + at) / kSize;
    moment[u] = ReadState(p.first + state, elements);
#endif
#if OP == 4
    second[u] = ReadState(p.second + state, elements);
#endif
  }
#pragma unroll
  for (int u = 0; u < kInFlight; ++u) {
    long long r = position[u];
    if (r < 0) continue;
    const int at = static_cast<int>(begin + u * 32 - r * chunks) * 16;
    const ID id = ids[r];
    char* row = p.table + static_cast<long long>(id) * p.row_bytes;
#if OP == 0
    while (r + 1 < p.n && ids[r + 1] == id) ++r;  // the last one counts
#if TABLE < 0
    old[u] = Read(p.values + static_cast<long long>(p.perm[r]) * p.row_bytes, at, p.row_bytes);
#endif
    Put(row, at, p.row_bytes, old[u]);
#else
    const int width = p.row_bytes / kSize, column = at / kSize;
    float sum[kPer];
#pragma unroll
    for (int e = 0; e < kPer; ++e) sum[e] = 0;
    do {
      const V::Storage* values =
          reinterpret_cast<const V::Storage*>(p.values) + p.perm[r] * (long long)width + column;
#pragma unroll
      for (int e = 0; e < kPer; ++e) {
        if (column + e < width) sum[e] += V::Load(values[e]);
      }
      ++r;
    } while (r < p.n && ids[r] == id);
#pragma unroll
    for (int e = 0; e < kPer; ++e) {
      if (column + e >= width) break;
      T::Storage* element = reinterpret_cast<T::Storage*>(old[u].bytes) + e;
      const float x = T::Load(*element);
      float y = x;
#if OP == 1
      y = x + sum[e];
#elif OP == 2
      y = x - p.hyper[0] * (sum[e] + p.hyper[6] * x);
#elif OP == 3
      const float g = sum[e] + p.hyper[6] * x;
      const float a = moment[u].x[e] + g * g;
      moment[u].x[e] = a;
      y = x - p.hyper[0] * g / (sqrtf(a) + p.hyper[3]);
#elif OP == 4
      const float g = sum[e];
      const float m = p.hyper[1] * moment[u].x[e] + (1.0f - p.hyper[1]) * g;
      const float v = p.hyper[2] * second[u].x[e] + (1.0f - p.hyper[2]) * g * g;
      moment[u].x[e] = m;
      second[u].x[e] = v;
      y = x - p.hyper[0] * (m / p.hyper[4] / (sqrtf(v / p.hyper[5]) + p.hyper[3]) + p.hyper[6] * x);
#endif
      *element = T::Store(y);
    }
    Put(row, at, p.row_bytes, old[u]);
#if OP >= 3
    PutState(p.first + static_cast<long long>(id) * width + column, width - column, moment[u]);
#endif
#if OP == 4
    PutState(p.second + static_cast<long long>(id) * width + column, width - column, second[u]);
#endif
#endif
  }
}

extern "C" __global__ void __launch_bounds__(1024, 1) dejax_update(const UpdateParams p) {
  const ID* ids = static_cast<const ID*>(p.ids);
  const int chunks = (p.row_bytes + 15) / 16;
  const long long total = p.n * chunks;
  const int lane = threadIdx.x % 32;
  while (true) {
    unsigned long long next = 0;
    if (lane == 0) next = atomicAdd(p.ticket, 1ull);
    const long long begin = static_cast<long long>(__shfl_sync(~0u, next, 0)) * 32 * kUnroll;
    if (begin >= total) return;
    for (long long base = begin; base < begin + 32 * kUnroll; base += 32 * kInFlight) {
      UpdateUnits(p, ids, chunks, total, base + lane);
    }
  }
}
