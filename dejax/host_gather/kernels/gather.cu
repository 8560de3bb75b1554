// Rows of a table in mapped host memory to a dense result on the device. Compiled by NVRTC with -D:
//   ID            int or long long, the type of ids
//   UNIT          1, 2, 4, 8 or 16: bytes of a store; the largest power of two that divides the row's bytes
//   SORTED        ids ascend, `perm` says where each row goes, equal ids are read once
//   TICKET        warps take their work in strict order, by a counter, rather than each its own share
//   CACHED        `slots` says which rows lie on the device, in `cache`
//   SOURCE, RESULT  element types: -1 moves bytes
//   MEAN          a result row is the mean of the rows of `fan_out` ids
//
// Reads go over the bus, so they decide the time: each lane reads an aligned 16-byte chunk, and neighbouring lanes
// neighbouring chunks, starting at a boundary of `align` bytes at or below the row. A line of the bus that two
// instructions ask for crosses it twice, so with align = 128 each row begins with the first lane of a line, and of
// short rows an instruction reads as many as it has room for, while lanes from `lanes` on rest (1,000 bytes: 0.96 of
// the rate of 1,024, was 0.93; 100 bytes: 34.1 GB/s, was 32.7). Stores go to device memory, 80 times faster, as they
// come.

// Equal ids in a row are written by one warp, at most so many: a hub's row is read again after 64 copies rather than
// copied a million times by one warp.
constexpr int kRun = 64;

__device__ __forceinline__ uint4 LoadStream(const char* p) {
#ifdef __CUDACC_RTC__
  uint4 v;
  // No line of the table is kept in L1: it is read once.
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
#else  // tests/host_gather/kernels_on_cpu.h
  return *reinterpret_cast<const uint4*>(p);
#endif
}

// 16 bytes at p of which [lo, hi) are wanted: whole where the table has them all, else byte by byte.
__device__ __forceinline__ uint4 LoadChunk(const char* p, const char* lo, const char* hi, const char* begin,
                                           const char* end) {
  if (p >= begin && p + 16 <= end) return LoadStream(p);
  Chunk u;
  u.v = make_uint4(0, 0, 0, 0);
  for (int i = 0; i < 16; ++i) {
    if (p + i >= lo && p + i < hi) u.bytes[i] = p[i];
  }
  return u.v;
}

// The row that an id means: its address, or null for a row of fill. `begin` and `end` bound the memory it lies in.
__device__ __forceinline__ const char* Locate(const GatherParams& p, ID id, const char** begin, const char** end,
                                              long long* row) {
  long long i = id;
  const bool inside = i >= 0 && i < p.rows;
  if (!inside && p.error) {
    p.error[1] = i;
    __threadfence_system();
    p.error[0] = 1;
  }
  if (p.clip) i = i < 0 ? 0 : i >= p.rows ? p.rows - 1 : i;
  *row = i;
  if ((!inside && !p.clip) || p.rows == 0) return nullptr;
#if CACHED
  const int slot = p.slots[i];
  if (slot >= 0) {
    *begin = p.cache;
    *end = p.cache_end;
    return p.cache + static_cast<long long>(slot) * p.row_bytes;
  }
#endif
  *begin = p.table;
  *end = p.table_end;
  return p.table + i * p.row_bytes;
}

#if !MEAN
struct Item {
  uint4 value;
  long long position;  // in ids; -1 for nothing to do
  int first;           // bytes of the row before the chunk; negative where the chunk begins before the row
  bool filled;         // a row of fill, which is not scaled
  float scale;
};

__device__ __forceinline__ void Write(const GatherParams& p, const Item& item, long long to) {
  Chunk u;
  u.v = item.value;
#if SOURCE < 0
  char* out = p.out + to * p.row_bytes + item.first;
#if UNIT == 16
  if (item.first >= 0 && item.first < p.row_bytes) *reinterpret_cast<uint4*>(out) = u.v;
#else
  using T = Word<UNIT>::Type;
#pragma unroll
  for (int i = 0; i < 16; i += UNIT) {
    const int at = item.first + i;
    if (at >= 0 && at < p.row_bytes) *reinterpret_cast<T*>(out + i) = *reinterpret_cast<T*>(u.bytes + i);
  }
#endif
#else
  using From = Element<SOURCE>;
  using To = Element<RESULT>;
  constexpr int kSize = sizeof(From::Storage);
  To::Storage* out = reinterpret_cast<To::Storage*>(p.out) + to * (p.row_bytes / kSize);
#pragma unroll
  for (int i = 0; i < 16; i += kSize) {
    const int at = item.first + i;
    if (at >= 0 && at < p.row_bytes) {
      const float x = From::Load(*reinterpret_cast<From::Storage*>(u.bytes + i));
      out[at / kSize] = To::Store(item.filled ? p.fill_value : x * item.scale);
    }
  }
#endif
}

extern "C" __global__ void __launch_bounds__(1024, 1) dejax_gather(const GatherParams p) {
  const ID* ids = static_cast<const ID*>(p.ids);
  const long long total = p.n * p.chunks;
  const int lane = threadIdx.x % 32;
  const long long warps = static_cast<long long>(gridDim.x) * blockDim.x / 32;
  long long step = (blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x) / 32;
  while (true) {
#if TICKET
    // For sorted ids it keeps the rows in flight close together, so that they share translations of few pages: 24 GiB,
    // 262,144 rows of 512 bytes: 30 GB/s, where warps that keep their own stride reach 20, and unsorted ids 15. Beside
    // compute a block may find its multiprocessor late: the others go on with what there is.
    unsigned long long next = 0;
    if (lane == 0) next = atomicAdd(p.ticket, 1ull);
    step = __shfl_sync(~0u, next, 0);
#endif
    const long long base = step * p.lanes * kUnroll;
    if (base >= total) return;
    Item items[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      Item& item = items[u];
      item.position = -1;
      const long long i = base + u * p.lanes + lane;
      if (lane >= p.lanes || i >= total) continue;
      const long long r = i / p.chunks;
      const int c = static_cast<int>(i - r * p.chunks);
      const ID id = ids[r];
#if SORTED
      // A row of fill costs no read: each is written by its own lane.
      const bool read = p.rows > 0 && (p.clip || (id >= 0 && id < p.rows));
      if (read && r % kRun != 0 && ids[r - 1] == id) continue;
#endif
      const char *begin, *end;
      long long index;
      const char* row = Locate(p, id, &begin, &end, &index);
      if (row == nullptr) {
        item.value = reinterpret_cast<const uint4&>(p.fill);
        item.first = c * 16;
        item.filled = true;
        if (item.first >= p.row_bytes) continue;
      } else {
        const unsigned long long address = reinterpret_cast<unsigned long long>(row);
        const char* chunk = row - (address & (p.align - 1)) + c * 16;
        const char* row_end = row + p.row_bytes;
        if (chunk + 16 <= row || chunk >= row_end) continue;
        item.value = LoadChunk(chunk, row, row_end, begin, end);
        item.first = static_cast<int>(chunk - row);
        item.filled = false;
        item.scale = p.scale_count == 0 ? 1.0f : p.scale[p.scale_count == 1 ? 0 : index];
      }
      item.position = r;
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      long long r = items[u].position;
      if (r < 0) continue;
#if SORTED
      const ID id = ids[r];
      do {
        Write(p, items[u], p.perm[r]);
        ++r;
      } while (r < p.n && r % kRun != 0 && ids[r] == id && !items[u].filled);
#else
      Write(p, items[u], r);
#endif
    }
    step += warps;
  }
}

#else  // MEAN

// One lane computes `16 / size` elements of a result row from the same bytes of each of its rows.
extern "C" __global__ void __launch_bounds__(1024, 1) dejax_gather(const GatherParams p) {
  using From = Element<SOURCE>;
  using To = Element<RESULT>;
  constexpr int kSize = sizeof(From::Storage), kPer = 16 / kSize;
  const ID* ids = static_cast<const ID*>(p.ids);
  const int chunks = (p.row_bytes + 15) / 16, width = p.row_bytes / kSize;
  const long long total = p.n * chunks, stride = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i < total; i += stride) {
    const long long r = i / chunks;
    const int c = static_cast<int>(i - r * chunks);
    float sum[kPer];
#pragma unroll
    for (int e = 0; e < kPer; ++e) sum[e] = 0;
    int count = 0;
    for (int k = 0; k < p.fan_out; k += kUnroll) {
      Chunk u[kUnroll];
      float scale[kUnroll];
      bool there[kUnroll];
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        there[j] = false;
        u[j].v = make_uint4(0, 0, 0, 0);
        if (k + j >= p.fan_out) continue;
        const char *begin, *end;
        long long index;
        const char* row = Locate(p, ids[r * p.fan_out + k + j], &begin, &end, &index);
        if (row == nullptr) continue;
        ++count;
        there[j] = true;
        scale[j] = p.scale_count == 0 ? 1.0f : p.scale[p.scale_count == 1 ? 0 : index];
#if UNIT == 16
        u[j].v = LoadStream(row + c * 16);
#else
        using T = Word<UNIT>::Type;
#pragma unroll
        for (int at = 0; at < 16; at += UNIT) {
          if (c * 16 + at < p.row_bytes) {
            *reinterpret_cast<T*>(u[j].bytes + at) = __ldg(reinterpret_cast<const T*>(row + c * 16 + at));
          }
        }
#endif
      }
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        if (!there[j]) continue;
#pragma unroll
        for (int e = 0; e < kPer; ++e) {
          sum[e] += scale[j] * From::Load(*reinterpret_cast<From::Storage*>(u[j].bytes + e * kSize));
        }
      }
    }
    To::Storage* out = reinterpret_cast<To::Storage*>(p.out) + r * width;
#pragma unroll
    for (int e = 0; e < kPer; ++e) {
      if (c * kPer + e < width) out[c * kPer + e] = To::Store(count ? sum[e] / count : p.fill_value);
    }
  }
}
#endif
