// Neighbour sampling of a graph with node types and relations, one batch per call, and a gather of rows. A peer for
// benchmarks: several threads of the caller each make a batch, as the worker processes of loaders do.
//
//   g++ -O3 -march=native -std=c++17 -shared -fPIC hetero_sampler.cc -o hetero_sampler.so
#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr int kMostFanOut = 64;

// Xorshift with 64 bits of state, which must not be 0.
struct Random {
  uint64_t state;

  // A number in [0, n).
  uint32_t Below(uint32_t n) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return static_cast<uint32_t>((state >> 32) * n >> 32);
  }
};

// Floyd's algorithm: the k-th of `count` distinct positions in [0, degree), degree > count. `chosen` has those before.
int32_t NextPosition(Random& random, int32_t degree, int32_t count, int32_t k, int32_t* chosen) {
  const int32_t top = degree - count + k;
  int32_t position = static_cast<int32_t>(random.Below(top + 1));
  if (std::find(chosen, chosen + k, position) != chosen + k) position = top;
  return chosen[k] = position;
}

}  // namespace

// Hop by hop, for each relation up to fan_outs[hop * relations + relation] distinct incoming edges of each node that the
// hop before found (Floyd's algorithm). number[type] has -1 for all nodes of the type, and is left so. Results, in
// arrays: node_ids by type, with room for all nodes, and by relation the local senders and receivers. node_counts
// [hops + 1, types] and edge_counts [hops, relations] say how many there are after each hop. Returns 0, or -1 if the edges
// of a relation have no room.
extern "C" int sample_hetero(int types, int relations, int hops, const int32_t* const* starts,
                             const int32_t* const* senders, const int32_t* source, const int32_t* target,
                             const int32_t* fan_outs, int seed_type, const int32_t* seeds, int64_t num_seeds,
                             int32_t* const* number, int32_t* const* node_ids, int64_t* const* edge_senders, int64_t* const* edge_receivers, const int64_t* edge_room,
                             int64_t* node_counts, int64_t* edge_counts, uint64_t seed) {
  Random random{(seed + 1) * 0x9E3779B97F4A7C15ull};
  int64_t known[256] = {}, first[256] = {}, last[256] = {}, edges[1024] = {};
  int result = 0;
  for (int64_t i = 0; i < num_seeds; ++i) {
    int32_t& own = number[seed_type][seeds[i]];
    if (own < 0) {
      own = static_cast<int32_t>(known[seed_type]);
      node_ids[seed_type][known[seed_type]++] = seeds[i];
    }
  }
  std::copy(known, known + types, node_counts);
  for (int hop = 0; hop < hops && result == 0; ++hop) {
    std::copy(known, known + types, last);
    for (int r = 0; r < relations && result == 0; ++r) {
      const int s = source[r], t = target[r];
      const int32_t fan_out = std::min(fan_outs[hop * relations + r], kMostFanOut);
      int32_t* const numbers = number[s];
      int64_t at = edges[r], count = known[s];
      if (edge_room[r] - at < (last[t] - first[t]) * fan_out) result = -1;
      for (int64_t i = first[t]; i < last[t] && result == 0; ++i) {
        const int32_t node = node_ids[t][i], start = starts[r][node], degree = starts[r][node + 1] - start;
        const int32_t drawn = std::min(fan_out, degree);
        int32_t chosen[kMostFanOut];
        for (int32_t k = 0; k < drawn; ++k) {
          const int32_t position = degree > fan_out ? NextPosition(random, degree, fan_out, k, chosen) : k;
          const int32_t sender = senders[r][start + position];
          int32_t& own = numbers[sender];
          if (own < 0) {
            own = static_cast<int32_t>(count);
            node_ids[s][count++] = sender;
          }
          edge_senders[r][at] = own;
          edge_receivers[r][at++] = i;
        }
      }
      known[s] = count;
      edges[r] = at;
    }
    std::copy(last, last + types, first);
    std::copy(known, known + types, node_counts + (hop + 1) * types);
    std::copy(edges, edges + relations, edge_counts + hop * relations);
  }
  for (int t = 0; t < types; ++t) {
    for (int64_t i = 0; i < known[t]; ++i) number[t][node_ids[t][i]] = -1;
  }
  return result;
}

// Rows of a table by ids, into memory of the caller.
extern "C" void gather_rows(const char* table, int64_t row_bytes, const int32_t* ids, int64_t count, char* out) {
  constexpr int64_t kAhead = 8;
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) {
      const char* next = table + ids[i + kAhead] * row_bytes;
      for (int64_t b = 0; b < row_bytes; b += 64) __builtin_prefetch(next + b);
    }
    std::memcpy(out + i * row_bytes, table + ids[i] * row_bytes, row_bytes);
  }
}
