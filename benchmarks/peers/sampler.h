// Random draws, for hetero_sampler.cc and neighbor_sampler.cc.
#pragma once

#include <algorithm>
#include <cstdint>

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
inline int32_t NextPosition(Random& random, int32_t degree, int32_t count, int32_t k, int32_t* chosen) {
  const int32_t top = degree - count + k;
  int32_t position = static_cast<int32_t>(random.Below(top + 1));
  if (std::find(chosen, chosen + k, position) != chosen + k) position = top;
  return chosen[k] = position;
}
