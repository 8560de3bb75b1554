// Sorting, sums and numbering of some hundred thousand integers, each by one kernel.
//
// A cluster of kParts blocks works on one row. Its blocks run at the same time on neighbouring multiprocessors and wait for
// each other at barriers in hardware, so that what takes many kernels elsewhere takes one here. Its blocks exchange
// numbers through device memory, which they read past the first-level cache. `sizes` are numbers in device memory, too.

#ifdef __CUDACC__
#define DEJAX_SHARED(type, name, at) __shared__ type name
#define DEJAX_MEET_CLUSTER() \
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory")
#endif

constexpr int kParts = PARTS;  // blocks of a cluster
constexpr int kThreads = THREADS;
constexpr int kWarps = kThreads / 32;
constexpr int kBins = 256;
constexpr unsigned kAll = ~0u;

struct Shared {
  unsigned counts[kWarps][kBins];
  unsigned base[kBins];
  int warps[kWarps];
};

struct OfTypes {
  static constexpr int kMost = 64;
  int numbers[3 * kMost];
};

// Waits for all blocks of the cluster; each then sees what the others have written.
__device__ inline void MeetCluster() { DEJAX_MEET_CLUSTER(); }

struct Sum {
  static constexpr int kNone = 0;
  __device__ static int Of(int a, int b) { return a + b; }
};
struct Largest {
  static constexpr int kNone = -1;
  __device__ static int Of(int a, int b) { return a > b ? a : b; }
};

// Of the values of the threads before this one, and of all threads of the block.
struct Scanned {
  int before, all;
};

template <typename Op>
__device__ Scanned ScanBlock(int value, Shared& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int up_to = value;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(kAll, up_to, step);
    if (lane >= step) up_to = Op::Of(up_to, other);
  }
  int before = __shfl_up_sync(kAll, up_to, 1);
  if (lane == 0) before = Op::kNone;
  __syncthreads();  // `warps` may still be read
  if (lane == 31) shared.warps[warp] = up_to;
  __syncthreads();
  Scanned found{before, Op::kNone};
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) found.before = Op::Of(found.all, before);
    found.all = Op::Of(found.all, shared.warps[w]);
  }
  return found;
}

// The same among all threads of the cluster. `totals` has a number of each block.
template <typename Op>
__device__ int ScanCluster(int value, int* totals, Shared& shared) {
  const int part = blockIdx.x % kParts;
  const Scanned own = ScanBlock<Op>(value, shared);
  if (threadIdx.x == 0) totals[part] = own.all;
  MeetCluster();
  int before = Op::kNone;
  for (int p = 0; p < part; ++p) before = Op::Of(before, __ldcg(&totals[p]));
  return Op::Of(before, own.before);
}

// A key in the upper half, its value in the lower: one store of the two is half the traffic of two stores at random.
using Pair = unsigned long long;

__device__ inline Pair Paired(unsigned key, int value) { return static_cast<Pair>(key) << 32 | static_cast<unsigned>(value); }
__device__ inline unsigned KeyOf(Pair pair) { return static_cast<unsigned>(pair >> 32); }
__device__ inline int ValueOf(Pair pair) { return static_cast<int>(static_cast<unsigned>(pair)); }

struct Keys {
  const unsigned* keys;
  const int* values;  // null: positions
};

// The lanes of this warp that have the same digit of so many bits. `__match_any_sync` takes a step for each digit.
__device__ inline unsigned LanesOf(unsigned digit, bool there, int width) {
  const unsigned lanes = __ballot_sync(kAll, there);
  unsigned same = there ? lanes : ~lanes;
#pragma unroll
  for (int bit = 0; bit < 8; ++bit) {
    if (bit < width) {
      const bool one = digit >> bit & 1;
      const unsigned ones = __ballot_sync(kAll, one);
      same &= one ? ones : ~ones;
    }
  }
  return same;
}

// Sorts keys of so many bits with their values, stably, by the lowest digit first, into pairs: the result lies in `even` or
// in `odd`, whichever is returned. With `keys`, the last pass writes there and to `values` instead. `bins` has
// kParts * kBins elements.
__device__ Pair* SortPairs(Keys from, Pair* even, Pair* odd, unsigned* keys, int* values, unsigned* bins, int size, int bits,
                           Shared& shared) {
  constexpr int kAtOnce = 4;  // entries that a lane reads before it writes any
  const int part = blockIdx.x % kParts, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int passes = bits > 0 ? (bits + 7) / 8 : 1, width = (bits + passes - 1) / passes, digits = 1 << width;
  const int of_warp = (size + kParts * kWarps * 32 - 1) / (kParts * kWarps * 32) * 32;
  const int first = min(size, (part * kWarps + warp) * of_warp), last = min(size, first + of_warp);
  unsigned* const counts = shared.counts[warp];
  Pair *source = nullptr, *to = even;
  for (int pass = 0; pass < passes; ++pass) {
    const int shift = pass * width;
    const unsigned mask = digits - 1;
    const bool split = keys != nullptr && pass == passes - 1;
    to = pass % 2 == 0 ? even : odd;
    for (int i = threadIdx.x; i < kWarps * digits; i += kThreads) shared.counts[i >> width][i & mask] = 0;
    __syncthreads();
    for (int i = first + lane; i < last; i += 32 * kAtOnce) {
      unsigned own[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int at = i + 32 * n;
        if (at < last) own[n] = source == nullptr ? __ldcg(&from.keys[at]) : KeyOf(__ldcg(&source[at]));
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (i + 32 * n < last) atomicAdd(&counts[own[n] >> shift & mask], 1u);
      }
    }
    __syncthreads();
    for (int bin = threadIdx.x; bin < digits; bin += kThreads) {
      unsigned sum = 0;
#pragma unroll 8
      for (int w = 0; w < kWarps; ++w) {
        const unsigned own = shared.counts[w][bin];
        shared.counts[w][bin] = sum;
        sum += own;
      }
      bins[part * kBins + bin] = sum;
    }
    MeetCluster();
    unsigned before = 0, all = 0;
    if (threadIdx.x < digits) {
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        const unsigned own = __ldcg(&bins[p * kBins + threadIdx.x]);
        if (p < part) before += own;
        all += own;
      }
    }
    const Scanned of_bins = ScanBlock<Sum>(static_cast<int>(all), shared);
    if (threadIdx.x < digits) shared.base[threadIdx.x] = static_cast<unsigned>(of_bins.before) + before;
    __syncthreads();
    for (int begin = first; begin < last; begin += 32 * kAtOnce) {
      Pair own[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int i = begin + 32 * n + lane;
        if (i >= last) continue;
        if (source != nullptr) {
          own[n] = __ldcg(&source[i]);
        } else {
          own[n] = Paired(__ldcg(&from.keys[i]), from.values == nullptr ? i : __ldcg(&from.values[i]));
        }
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const bool there = begin + 32 * n + lane < last;
        const unsigned digit = there ? KeyOf(own[n]) >> shift & mask : 0;
        const unsigned same = LanesOf(digit, there, width);
        const unsigned rank = __popc(same & ((1u << lane) - 1));
        const unsigned in_part = there ? counts[digit] + rank : 0;
        __syncwarp();
        if (there && rank == 0) counts[digit] += __popc(same);
        __syncwarp();
        if (!there) continue;
        const unsigned at = shared.base[digit] + in_part;
        if (split) {
          keys[at] = KeyOf(own[n]);
          values[at] = ValueOf(own[n]);
        } else {
          to[at] = own[n];
        }
      }
    }
    MeetCluster();
    source = to;
  }
  return to;
}

#ifdef SORT_PAIRS
// Rows of keys and values in the stable order by key. sizes: entries of a row, bits of a key, whether there are values; else
// they are the positions in the row, and `values` is not read.
extern "C" __global__ void __cluster_dims__(kParts) __launch_bounds__(kThreads)
    dejax_sort_pairs(const unsigned* keys, const int* values, const int* sizes, unsigned* sorted_keys, int* sorted_values,
                     Pair* even, Pair* odd, unsigned* bins) {
  DEJAX_SHARED(Shared, shared, 0);
  const int row = blockIdx.x / kParts, size = sizes[0];
  const long long begin = static_cast<long long>(row) * size;
  SortPairs({keys + begin, sizes[2] ? values + begin : nullptr}, even + begin, odd + begin, sorted_keys + begin,
            sorted_values + begin, bins + row * kParts * kBins, size, sizes[1], shared);
}
#endif

#ifdef SUMS
// Sums along rows, up to each entry and with it. sizes: entries of a row.
extern "C" __global__ void __cluster_dims__(kParts) __launch_bounds__(kThreads)
    dejax_sums(const int* x, const int* sizes, int* sums, int* totals) {
  constexpr int kOfThread = 4;
  DEJAX_SHARED(Shared, shared, 0);
  const int row = blockIdx.x / kParts, part = blockIdx.x % kParts, size = sizes[0];
  const int of_part = (size + kParts - 1) / kParts;
  const int first = min(size, part * of_part), last = min(size, first + of_part);
  x += static_cast<long long>(row) * size;
  sums += static_cast<long long>(row) * size;
  int own = 0;
#pragma unroll 8
  for (int i = first + threadIdx.x; i < last; i += kThreads) own += x[i];
  const int own_part = ScanBlock<Sum>(own, shared).all;
  if (threadIdx.x == 0) totals[blockIdx.x] = own_part;
  MeetCluster();
  int before = 0;
  for (int p = 0; p < part; ++p) before += __ldcg(&totals[row * kParts + p]);
  for (int begin = first; begin < last; begin += kThreads * kOfThread) {
    const int i = begin + threadIdx.x * kOfThread;
    int entries[kOfThread];
    int sum = 0;
#pragma unroll
    for (int n = 0; n < kOfThread; ++n) {
      if (i + n < last) sum += x[i + n];
      entries[n] = sum;
    }
    const Scanned found = ScanBlock<Sum>(sum, shared);
#pragma unroll
    for (int n = 0; n < kOfThread; ++n) {
      if (i + n < last) sums[i + n] = before + found.before + entries[n];
    }
    before += found.all;
  }
}
#endif

#ifdef NUMBER
// The numbers of nodes of several types, as `number_found` of dejax/minibatch/sampling/_numbering.py gives them; a row each.
//
// keys: of the known nodes, then of the found ones: the first key of the type plus the node; `none` for no node.
// sizes: keys, bits of a key, known nodes, `none`, places for nodes, types; of each type its first key, then the first
//   number of new nodes, then the number after the last.
// nodes: of each place. numbers: of each found node. added: new nodes of each type.
// The rest are results that nobody reads: a pair of each key twice, a number of each key, and the bins.
extern "C" __global__ void __cluster_dims__(kParts) __launch_bounds__(kThreads)
    dejax_number(const unsigned* keys, const int* sizes, int* nodes, int* numbers, int* added, Pair* even, Pair* odd,
                 int* codes, unsigned* bins) {
  DEJAX_SHARED(Shared, shared, 0);
  DEJAX_SHARED(OfTypes, types_of, sizeof(Shared));
  int* const of_types = types_of.numbers;
  const int size = sizes[0], bits = sizes[1], known = sizes[2], none = sizes[3], places = sizes[4], types = sizes[5];
  const int row = blockIdx.x / kParts, part = blockIdx.x % kParts, thread = part * kThreads + threadIdx.x;
  const long long begin_of_keys = static_cast<long long>(row) * size;
  keys += begin_of_keys, even += begin_of_keys, odd += begin_of_keys, codes += begin_of_keys;
  bins += row * kParts * kBins;
  nodes += static_cast<long long>(row) * places, numbers += begin_of_keys - static_cast<long long>(row) * known;
  added += row * types;
  for (int i = threadIdx.x; i < 3 * types; i += kThreads) of_types[i] = sizes[6 + i];
  __syncthreads();
  const int *first_keys = of_types, *first_numbers = of_types + types, *ends = of_types + 2 * types;
  const auto type_of = [&](int key) {  // `types` for `none`
    if (key >= none) return types;
    int type = 0;
    while (type + 1 < types && first_keys[type + 1] <= key) ++type;
    return type;
  };
  for (int i = thread; i < places; i += kParts * kThreads) {
    const int key = i < known ? static_cast<int>(keys[i]) : none;
    nodes[i] = key < none ? key - first_keys[type_of(key)] : -1;
  }
  const Pair* const sorted = SortPairs({keys, nullptr}, even, odd, nullptr, nullptr, bins, size, bits, shared);
  // Each thread has consecutive entries. The first of a run of equal keys is a known node, or else makes a new one.
  const int of_thread = (size + kParts * kThreads - 1) / (kParts * kThreads);
  const int begin = min(size, thread * of_thread), end = min(size, begin + of_thread);
  const int key_before = begin > 0 ? static_cast<int>(KeyOf(sorted[begin - 1])) : -1;
  int made = 0, last_first = -1;
  for (int i = begin, before = key_before; i < end; ++i) {
    const int key = static_cast<int>(KeyOf(sorted[i]));
    if (key != before) {
      last_first = i;
      made += key < none && ValueOf(sorted[i]) >= known;
    }
    before = key;
  }
  int* const totals = reinterpret_cast<int*>(bins);
  int* const made_before = totals + 2 * kParts;  // new nodes before each type, and at the end all
  int rank = ScanCluster<Sum>(made, totals, shared);
  const int first_before = ScanCluster<Largest>(last_first, totals + kParts, shared);
  for (int i = begin, before = key_before; i < end; ++i) {
    const int key = static_cast<int>(KeyOf(sorted[i])), type = type_of(key);
    for (int t = before < 0 ? 0 : type_of(before) + 1; t <= type; ++t) made_before[t] = rank;
    if (key != before) {
      const int at = ValueOf(sorted[i]);
      codes[i] = key < none && at >= known ? rank++ : ~at;  // a new node's rank, or a known one's number
    }
    if (i == size - 1) {
      for (int t = type + 1; t <= types; ++t) made_before[t] = rank;
    }
    before = key;
  }
  MeetCluster();
  int code = first_before >= 0 ? __ldcg(&codes[first_before]) : 0;
  for (int i = begin, before = key_before; i < end; ++i) {
    const int key = static_cast<int>(KeyOf(sorted[i])), at = ValueOf(sorted[i]), type = type_of(key);
    const bool begins = key != before;
    if (begins) code = codes[i];
    before = key;
    int number = -1;
    if (type < types) {
      number = code < 0 ? ~code : first_numbers[type] + code - __ldcg(&made_before[type]);
      if (number >= ends[type]) number = -1;
    }
    if (begins && code >= 0 && number >= 0) nodes[number] = key - first_keys[type];
    if (at >= known) numbers[at - known] = number;
  }
  for (int t = thread; t < types; t += kParts * kThreads) {
    added[t] = __ldcg(&made_before[t + 1]) - __ldcg(&made_before[t]);
  }
}
#endif
