// Neighbour sampling by hops on the CPU's threads, as libraries for graph learning do it: up to `fan_out` distinct
// neighbours of each new node (Floyd's algorithm), new nodes numbered in a table of all nodes. A peer for benchmarks.
//
//   g++ -O3 -march=native -std=c++17 -shared -fPIC -pthread neighbor_sampler.cc -o neighbor_sampler.so
#include <atomic>
#include <thread>
#include <vector>

#include "sampler.h"

namespace {

constexpr int32_t kUnknown = -1, kTaken = -2;
constexpr int64_t kChunk = 1024;

template <typename Body>
void Parallel(int threads, int64_t count, const Body& body) {
  std::atomic<int64_t> next{0};
  const auto work = [&](int thread) {
    for (int64_t begin; (begin = next.fetch_add(kChunk)) < count;) body(thread, begin, std::min(count, begin + kChunk));
  };
  std::vector<std::thread> others;
  for (int k = 1; k < threads; ++k) others.emplace_back(work, k);
  work(0);
  for (auto& other : others) other.join();
}

}  // namespace

// starts [nodes + 1], senders [edges]; seeds distinct. number [nodes] all -1, and left so. Results with room for all:
// node_ids, and local senders and receivers of each edge. Returns edges; *num_nodes says how many nodes.
extern "C" int64_t sample(const int32_t* starts, const int32_t* senders, const int32_t* seeds, int64_t num_seeds,
                          const int32_t* fan_outs, int hops, int threads, uint64_t seed, std::atomic<int32_t>* number,
                          int32_t* node_ids, int32_t* edge_senders, int32_t* edge_receivers, int64_t* num_nodes) {
  std::copy(seeds, seeds + num_seeds, node_ids);
  Parallel(threads, num_seeds, [&](int, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) number[seeds[i]].store(static_cast<int32_t>(i), std::memory_order_relaxed);
  });
  int64_t first = 0, known = num_seeds, edges = 0;
  for (int hop = 0; hop < hops; ++hop) {
    const int64_t count = known - first;
    const int32_t fan_out = fan_outs[hop];
    std::vector<int64_t> offset(count / kChunk + 2, 0);  // edges before each chunk
    Parallel(threads, count, [&](int, int64_t begin, int64_t end) {
      int64_t sum = 0;
      for (int64_t i = begin; i < end; ++i) {
        const int32_t node = node_ids[first + i];
        sum += std::min(fan_out, starts[node + 1] - starts[node]);
      }
      offset[begin / kChunk + 1] = sum;
    });
    for (size_t k = 1; k < offset.size(); ++k) offset[k] += offset[k - 1];
    std::vector<std::vector<int32_t>> fresh(threads);
    Parallel(threads, count, [&](int thread, int64_t begin, int64_t end) {
      Random random{(seed + 1) * 0x9E3779B97F4A7C15ull ^ static_cast<uint64_t>(first + begin + 1) * 0xD1B54A32D192ED03ull};
      int64_t at = edges + offset[begin / kChunk];
      for (int64_t i = begin; i < end; ++i) {
        const int32_t node = node_ids[first + i], start = starts[node], degree = starts[node + 1] - start;
        const int32_t drawn = std::min(fan_out, degree);
        int32_t chosen[64];
        for (int32_t k = 0; k < drawn; ++k) {
          const int32_t position = degree > fan_out ? NextPosition(random, degree, fan_out, k, chosen) : k;
          const int32_t sender = senders[start + position];
          edge_senders[at] = sender;
          edge_receivers[at++] = static_cast<int32_t>(first + i);
          int32_t expected = kUnknown;
          if (number[sender].load(std::memory_order_relaxed) == kUnknown &&
              number[sender].compare_exchange_strong(expected, kTaken, std::memory_order_relaxed)) {
            fresh[thread].push_back(sender);
          }
        }
      }
    });
    std::vector<int64_t> place(threads + 1, known);
    for (int k = 0; k < threads; ++k) place[k + 1] = place[k] + static_cast<int64_t>(fresh[k].size());
    std::vector<std::thread> others;
    const auto place_own = [&](int k) {
      for (size_t i = 0; i < fresh[k].size(); ++i) {
        node_ids[place[k] + i] = fresh[k][i];
        number[fresh[k][i]].store(static_cast<int32_t>(place[k] + i), std::memory_order_relaxed);
      }
    };
    for (int k = 0; k < threads; ++k) others.emplace_back(place_own, k);
    for (auto& other : others) other.join();
    const int64_t more = offset.back();
    Parallel(threads, more, [&](int, int64_t begin, int64_t end) {
      for (int64_t i = edges + begin; i < edges + end; ++i) {
        edge_senders[i] = number[edge_senders[i]].load(std::memory_order_relaxed);
      }
    });
    edges += more;
    first = known;
    known = place[threads];
  }
  Parallel(threads, known, [&](int, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) number[node_ids[i]].store(kUnknown, std::memory_order_relaxed);
  });
  *num_nodes = known;
  return edges;
}
