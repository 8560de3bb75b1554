// Gathers rows of a table in mapped host memory into a dense result on the device. Compiled by NVRTC with -D:
//   ID            int or long long, the type of ids
//   UNIT          1, 2, 4, 8 or 16: bytes of a store; the largest power of two that divides the row's bytes
//   SORTED        ids ascend, `perm` has the result row of each id, equal ids are read once
//   TICKET        warps take their work in strict order from a counter, not by a fixed stride
//   CACHED        `slots` tells which rows lie on the device, in `cache`
//   SPLIT         (with CACHED) the table has only the other rows; `slots` tells where
//   PEERS         (with SPLIT) 0, or the number of devices over whose memory the cache is divided: row i of the cache is
//                 row i / PEERS of block i % PEERS, which is read at its address over the link between the devices
//   SOURCE, RESULT  element types: -1 moves bytes
//   SKIP          result rows of ids out of range stay as they are, instead of being filled; `clip` is not allowed
//   MEAN          a result row is the mean of the rows of `fan_out` ids
//   POSITION      int, or long long where a gather has 2^31 chunks: a division of 64 bits takes as many instructions as
//                 the conversion of a chunk
//
// Reads go over the bus and decide the time. Each lane reads an aligned 16-byte chunk; neighbouring lanes read
// neighbouring chunks, starting at a boundary of `align` bytes at or below the row. A line that two instructions read
// crosses the bus twice. With align = 128, the chunks of a line therefore always belong to one instruction: each row
// begins with the first lane of a line, an instruction reads as many short rows as fit, and lanes from `lanes` on are
// idle. This takes rows of 1,000 bytes from 0.93 to 0.96 of the rate of 1,024 bytes. Stores go to device memory, which is
// 80 times faster than the bus.

// One warp writes at most so many copies of one row. A row that a million ids name is thus read again after 64 copies, and
// many warps share the copies.
constexpr int kRun = 64;

__device__ __forceinline__ uint4 LoadStream(const char* p) {
#ifdef __CUDACC_RTC__
  uint4 v;
  // Lines of the table are read once, so they are not kept in L1.
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
#else  // tests/host_gather/kernels_on_cpu.h
  return *reinterpret_cast<const uint4*>(p);
#endif
}

// The 16 bytes at p, of which the caller needs [lo, hi): one load if the memory [begin, end) has them all, else by bytes.
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

// The address of an id's row, or null for a row of fill. `begin` and `end` bound the memory that the row lies in.
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
#if PEERS
    const char* block = reinterpret_cast<const char*>(p.peers[slot % PEERS]);
    *begin = block;
    *end = block + p.peer_bytes;
    return block + static_cast<long long>(slot / PEERS) * p.row_bytes;
#else
    *begin = p.cache;
    *end = p.cache_end;
    return p.cache + static_cast<long long>(slot) * p.row_bytes;
#endif
  }
#if SPLIT
  i = ~slot;
#endif
#endif
  *begin = p.table;
  *end = p.table_end;
  return p.table + i * p.row_bytes;
}

#if !MEAN
// A chunk that a lane has read and not yet written.
struct LoadedChunk {
  uint4 value;
  POSITION position;  // in ids; -1 for no chunk
  int first;          // offset of the chunk in the row; negative if the chunk begins before the row
  bool filled;        // of a row of fill, which is not scaled
  float scale;
};

#if SOURCE >= 0
struct Pair {
  float x, y;
};

// Two elements of a chunk. Eight multiprocessors have about 36 instructions for each fp8 element that the bus delivers.
// Integer operations would take most of them; the hardware converts two elements at once.
__device__ __forceinline__ Pair LoadPair(const char* p) {
  using From = Element<SOURCE>;
#if defined(__CUDACC_RTC__) && __CUDA_ARCH__ >= 890 && (SOURCE == 4 || SOURCE == 5)
  unsigned halves;
#if SOURCE == 4
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(*reinterpret_cast<const unsigned short*>(p)));
#else
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(*reinterpret_cast<const unsigned short*>(p)));
#endif
  Pair pair;
  asm("cvt.f32.f16 %0, %1;" : "=f"(pair.x) : "h"(static_cast<unsigned short>(halves)));
  asm("cvt.f32.f16 %0, %1;" : "=f"(pair.y) : "h"(static_cast<unsigned short>(halves >> 16)));
  return pair;
#elif defined(__CUDACC_RTC__) && SOURCE == 3
  const unsigned short* at = reinterpret_cast<const unsigned short*>(p);
  Pair pair;
  asm("cvt.f32.f16 %0, %1;" : "=f"(pair.x) : "h"(at[0]));
  asm("cvt.f32.f16 %0, %1;" : "=f"(pair.y) : "h"(at[1]));
  return pair;
#else
  const From::Storage* at = reinterpret_cast<const From::Storage*>(p);
  return {From::Load(at[0]), From::Load(at[1])};
#endif
}

__device__ __forceinline__ void StorePair(Element<RESULT>::Storage* out, Pair pair) {
  using To = Element<RESULT>;
#if defined(__CUDACC_RTC__) && __CUDA_ARCH__ >= 800 && (RESULT == 2 || RESULT == 3)
#if RESULT == 2
  asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(*reinterpret_cast<unsigned*>(out)) : "f"(pair.x), "f"(pair.y));
#else
  asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(*reinterpret_cast<unsigned*>(out)) : "f"(pair.x), "f"(pair.y));
#endif
#else
  out[0] = To::Store(pair.x);
  out[1] = To::Store(pair.y);
#endif
}
#endif

__device__ __forceinline__ void Write(const GatherParams& p, const LoadedChunk& chunk, POSITION to) {
  Chunk u;
  u.v = chunk.value;
#if SOURCE < 0
  char* out = p.out + static_cast<long long>(to) * p.row_bytes + chunk.first;
#if UNIT == 16
  if (chunk.first >= 0 && chunk.first < p.row_bytes) *reinterpret_cast<uint4*>(out) = u.v;
#else
  using T = Word<UNIT>::Type;
#pragma unroll
  for (int i = 0; i < 16; i += UNIT) {
    const int at = chunk.first + i;
    if (at >= 0 && at < p.row_bytes) *reinterpret_cast<T*>(out + i) = *reinterpret_cast<T*>(u.bytes + i);
  }
#endif
#else
  using From = Element<SOURCE>;
  using To = Element<RESULT>;
  constexpr int kSize = sizeof(From::Storage);
  To::Storage* out = reinterpret_cast<To::Storage*>(p.out) + static_cast<long long>(to) * (p.row_bytes / kSize);
#if UNIT == 16
  // Chunks begin at multiples of 16 bytes of the row, so their results begin at multiples of their size.
  constexpr int kBytes = 16 / kSize * sizeof(To::Storage), kStore = kBytes < 16 ? kBytes : 16;
  using Stored = Word<kStore>::Type;
  if (chunk.first < 0 || chunk.first >= p.row_bytes) return;
  union {
    To::Storage elements[16 / kSize];
    Stored words[kBytes / kStore];
  } converted;
  if (chunk.filled) {
#pragma unroll
    for (int i = 0; i < 16 / kSize; i += 2) StorePair(converted.elements + i, {p.fill_value, p.fill_value});
  } else {
#pragma unroll
    for (int i = 0; i < 16 / kSize; i += 2) {
      const Pair pair = LoadPair(u.bytes + i * kSize);
      StorePair(converted.elements + i, {pair.x * chunk.scale, pair.y * chunk.scale});
    }
  }
#pragma unroll
  for (int i = 0; i < kBytes / kStore; ++i) {
    reinterpret_cast<Stored*>(out + chunk.first / kSize)[i] = converted.words[i];
  }
#else
#pragma unroll
  for (int i = 0; i < 16; i += kSize) {
    const int at = chunk.first + i;
    if (at >= 0 && at < p.row_bytes) {
      const float x = From::Load(*reinterpret_cast<From::Storage*>(u.bytes + i));
      out[at / kSize] = To::Store(chunk.filled ? p.fill_value : x * chunk.scale);
    }
  }
#endif
#endif
}

extern "C" __global__ void __launch_bounds__(1024, 1) dejax_gather(const GatherParams p) {
  const ID* ids = static_cast<const ID*>(p.ids);
  const long long total = p.n * p.chunks;
  const POSITION end_of_ids = static_cast<POSITION>(p.n);
  const int lane = threadIdx.x % 32;
  const long long warps = static_cast<long long>(gridDim.x) * blockDim.x / 32;
  long long step = (blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x) / 32, first = 0;
#if SKIP && SORTED
  // Ids below 0, which may be most of them, come first. Work begins behind them.
  for (long long end = p.n; first < end;) {
    const long long middle = (first + end) / 2;
    if (ids[middle] < 0) {
      first = middle + 1;
    } else {
      end = middle;
    }
  }
#endif
  while (true) {
#if TICKET
    // Strict order keeps the rows of sorted ids in flight close together, so that they share the address translations of
    // few pages: 30 GB/s instead of 20 GB/s by fixed strides (24 GiB, 262,144 rows of 512 bytes). When the gather overlaps
    // with compute, a block may start late; the other blocks then take its work.
    unsigned long long next = 0;
    if (lane == 0) next = atomicAdd(p.ticket, 1ull);
    step = __shfl_sync(~0u, next, 0);
#endif
    const long long base = first * p.chunks + step * p.lanes * kUnroll;
    if (base >= total) return;
    LoadedChunk loaded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      LoadedChunk& chunk = loaded[u];
      chunk.position = -1;
      const long long at_chunk = base + u * p.lanes + lane;
      if (lane >= p.lanes || at_chunk >= total) continue;
      const POSITION i = static_cast<POSITION>(at_chunk);
      const POSITION r = i / p.chunks;
      const int c = static_cast<int>(i - r * p.chunks);
      const ID id = ids[r];
#if SORTED
      // A row of fill costs no read, so each lane writes its own.
      const bool read = p.rows > 0 && (p.clip || (id >= 0 && id < p.rows));
      if (read && r % kRun != 0 && ids[r - 1] == id) continue;
#endif
      const char *begin, *end;
      long long index;
      const char* row = Locate(p, id, &begin, &end, &index);
      if (row == nullptr) {
#if SKIP
        continue;
#endif
        chunk.value = reinterpret_cast<const uint4&>(p.fill);
        chunk.first = c * 16;
        chunk.filled = true;
        if (chunk.first >= p.row_bytes) continue;
      } else {
        const unsigned long long address = reinterpret_cast<unsigned long long>(row);
        const char* at = row - (address & (p.align - 1)) + c * 16;
        const char* row_end = row + p.row_bytes;
        if (at + 16 <= row || at >= row_end) continue;
        chunk.value = LoadChunk(at, row, row_end, begin, end);
        chunk.first = static_cast<int>(at - row);
        chunk.filled = false;
        chunk.scale = p.scale_count == 0 ? 1.0f : p.scale[p.scale_count == 1 ? 0 : index];
      }
      chunk.position = r;
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      POSITION r = loaded[u].position;
      if (r < 0) continue;
#if SORTED
      const ID id = ids[r];
      do {
        Write(p, loaded[u], p.perm[r]);
        ++r;
      } while (r < end_of_ids && r % kRun != 0 && ids[r] == id && !loaded[u].filled);
#else
      Write(p, loaded[u], r);
#endif
    }
    step += warps;
  }
}

#else  // MEAN

// One lane computes `16 / size` elements of a result row, from the same 16 bytes of each of its `fan_out` rows.
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
