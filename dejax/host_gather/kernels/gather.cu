// Rows of a table in mapped host memory to a dense result on the device. Compiled by NVRTC with -D:
//   ID            int or long long, the type of ids
//   UNIT          1, 2, 4, 8 or 16: bytes of a store; the largest power of two that divides the row's bytes
//   SORTED        ids ascend, `perm` says where each row goes, equal ids are read once
//   TICKET        warps take their work in strict order, by a counter, rather than each its own share
//   CACHED        `slots` says which rows lie on the device, in `cache`
//   SOURCE, RESULT  element types: -1 moves bytes
//   MEAN          a result row is the mean of the rows of `fan_out` ids
//   BESIDE        one warp on each multiprocessor, in what a matrix product leaves of its registers
//   WIDE          the chunks of all rows are 2^31 or more
//
// Reads go over the bus, so they decide the time: each lane reads an aligned 16-byte chunk, and neighbouring lanes
// neighbouring chunks, starting at a boundary of `align` bytes at or below the row. With align = 128 a line of the bus
// is read by one instruction, whatever the row's offset. Stores go to device memory, 80 times faster, as they come.

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

// Whether an id means a row of the table.
__device__ __forceinline__ bool IsRead(const GatherParams& p, ID id) {
  return p.rows > 0 && (p.clip || (id >= 0 && id < p.rows));
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
// Where work is counted: chunks of all rows. 32 bits where they suffice, since 64-bit divisions take registers.
#if WIDE
using Count = long long;
#else
using Count = unsigned;
#endif

#if BESIDE
// At most 32 registers, so that a warp finds room beside a matrix product that leaves 1,024 of a multiprocessor's.
#define BOUNDS 64, 32
#else
#define BOUNDS 1024, 1
#endif

constexpr int kNothing = -(1 << 30);

struct Item {
  uint4 value;
  int first;  // bytes of the row before the chunk; negative where the chunk begins before the row; or kNothing
#if SOURCE >= 0
  bool filled;  // a row of fill, which is not scaled
  float scale;
#endif
};

// A chunk's row, in ids, and its number within the row. The chunk that a lane takes next is 32 further.
struct Place {
  Count row;
  int chunk;

  __device__ __forceinline__ void Advance(const GatherParams& p) {
    row += p.lane_rows;
    chunk += p.lane_chunks;
    if (chunk >= p.chunks) {
      chunk -= p.chunks;
      ++row;
    }
  }
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

// Reads a chunk of the row that `id` means.
__device__ __forceinline__ void Read(const GatherParams& p, ID id, int c, Item* item) {
  const char *begin, *end;
  long long index;
  const char* row = Locate(p, id, &begin, &end, &index);
  if (row == nullptr) {
    item->value = reinterpret_cast<const uint4&>(p.fill);
    if (c * 16 < p.row_bytes) item->first = c * 16;
  } else {
    const int shift = static_cast<int>(reinterpret_cast<unsigned long long>(row) & (p.align - 1));
    const int first = c * 16 - shift;
    if (first > -16 && first < p.row_bytes) {
#if UNIT == 16
      item->value = LoadStream(row + first);
#else
      item->value = LoadChunk(row + first, row, row + p.row_bytes, begin, end);
#endif
      item->first = first;
    }
  }
#if SOURCE >= 0
  item->filled = row == nullptr;
  item->scale = row == nullptr || p.scale_count == 0 ? 1.0f : p.scale[p.scale_count == 1 ? 0 : index];
#endif
}

extern "C" __global__ void __launch_bounds__(BOUNDS) dejax_gather(const GatherParams p) {
  const ID* ids = static_cast<const ID*>(p.ids);
  const Count n = static_cast<Count>(p.n), total = n * p.chunks;
  const int lane = threadIdx.x % 32;
  const Count warps = static_cast<Count>(gridDim.x) * blockDim.x / 32;
  Count step = (blockIdx.x * static_cast<Count>(blockDim.x) + threadIdx.x) / 32;
  while (true) {
#if TICKET
    // For sorted ids it keeps the rows in flight close together, so that they share translations of few pages: 24 GiB,
    // 262,144 rows of 512 bytes: 30 GB/s, where warps that keep their own stride reach 20, and unsorted ids 15. Beside
    // compute a block may find its multiprocessor late: the others go on with what there is.
    unsigned long long next = 0;
    if (lane == 0) next = atomicAdd(p.ticket, 1ull);
    step = static_cast<Count>(__shfl_sync(~0u, next, 0));
#endif
    const Count base = step * (32 * kUnroll);
    if (base >= total) return;
    Place first;
    first.row = (base + lane) / p.chunks;
    first.chunk = static_cast<int>(base + lane - first.row * p.chunks);
    // Ids first, all at once: each waits for memory as long as a quarter of a row on the bus.
    ID id[kUnroll];
#if SORTED
    ID before[kUnroll];
#endif
    Place at = first;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u, at.Advance(p)) {
      id[u] = at.row < n ? ids[at.row] : -1;
#if SORTED
      before[u] = at.row < n && at.row % kRun != 0 ? ids[at.row - 1] : ~id[u];
#endif
    }
    Item items[kUnroll];
    at = first;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u, at.Advance(p)) {
      items[u].first = kNothing;
      if (at.row >= n) continue;
#if SORTED
      // A row of fill costs no read: each is written by its own lane.
      if (before[u] == id[u] && IsRead(p, id[u])) continue;
#endif
      Read(p, id[u], at.chunk, &items[u]);
    }
    at = first;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u, at.Advance(p)) {
      if (items[u].first == kNothing) continue;
#if SORTED
      Count r = at.row;
      const ID same = ids[r];
      do {
        Write(p, items[u], p.perm[r]);
        ++r;
      } while (r < n && r % kRun != 0 && ids[r] == same && IsRead(p, same));
#else
      Write(p, items[u], at.row);
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
