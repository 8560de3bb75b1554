// Enough of CUDA to run the text of a kernel on one CPU thread, lane after lane. Lanes of a warp communicate only when they
// take work by ticket: lane 0 runs first and draws tickets, and the other lanes replay them.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct Index {
  int x;
};
static Index threadIdx, blockIdx, blockDim, gridDim;

static std::vector<unsigned long long> drawn;  // tickets, by lane 0 of this warp
static size_t followed;                        // how many of them this lane has replayed

inline unsigned long long atomicAdd(unsigned long long* counter, unsigned long long by) {
  const unsigned long long old = *counter;
  *counter += by;
  drawn.push_back(old);
  return old;
}
inline unsigned long long __shfl_sync(unsigned, unsigned long long value, int) {
  return threadIdx.x % 32 == 0 ? value : drawn[followed++];
}
inline void __threadfence_system() {}
template <typename T>
inline T __ldg(const T* p) {
  return *p;
}

// Runs every thread of a grid, one after the other. Blocks have one warp, whose tickets are in `drawn`.
template <typename Kernel, typename Params>
void RunGrid(const Kernel& kernel, const Params& params, int grid) {
  gridDim.x = grid;
  blockDim.x = 32;
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
    drawn.clear();
    for (threadIdx.x = 0; threadIdx.x < 32; ++threadIdx.x) {
      followed = 0;
      kernel(params);
    }
  }
}
