// Enough of CUDA to run clusters of threads that wait for each other: each thread is a fiber, and they take turns where they
// wait.
#include <ucontext.h>

#include <algorithm>
#include <functional>
#include <vector>

#define __device__
#define __global__
#define __cluster_dims__(x)
#define __launch_bounds__(x)

using std::min;

struct Index {
  int x;
};
static Index threadIdx, blockIdx;

namespace fibers {

struct Barrier {
  int count = 0, passed = 0;
};
struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 15);
  bool done = false;
  unsigned shown = 0;  // to the other lanes
};
static ucontext_t scheduler;
static std::vector<Fiber> all;
static std::vector<Barrier> warps, blocks;
static Barrier cluster;
static std::vector<std::vector<char>> memory;  // shared, of each block
static int now;
static std::function<void()> body;

static void Wait(Barrier& barrier, int size) {
  const int passed = barrier.passed;
  if (++barrier.count == size) {
    barrier.count = 0;
    ++barrier.passed;
    return;
  }
  while (barrier.passed == passed) swapcontext(&all[now].context, &scheduler);
}

static void Begin() {
  body();
  all[now].done = true;
  swapcontext(&all[now].context, &scheduler);
}

// Runs the clusters of a grid one after the other.
static void Run(int programs, const std::function<void()>& kernel) {
  body = kernel;
  for (int first = 0; first < programs; first += PARTS) {
    const int count = PARTS * THREADS;
    all = std::vector<Fiber>(count);
    warps.assign(count / 32, {}), blocks.assign(PARTS, {}), cluster = {};
    memory.assign(PARTS, std::vector<char>(1 << 17, 0x77));
    for (Fiber& fiber : all) {
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data();
      fiber.context.uc_stack.ss_size = fiber.stack.size();
      makecontext(&fiber.context, Begin, 0);
    }
    for (int left = count; left > 0;) {
      left = 0;
      for (now = 0; now < count; ++now) {
        if (all[now].done) continue;
        threadIdx.x = now % THREADS, blockIdx.x = first + now / THREADS;
        swapcontext(&scheduler, &all[now].context);
        left += !all[now].done;
      }
    }
  }
}

}  // namespace fibers

static void __syncthreads() { fibers::Wait(fibers::blocks[fibers::now / THREADS], THREADS); }
static void __syncwarp() { fibers::Wait(fibers::warps[fibers::now / 32], 32); }
static unsigned __ballot_sync(unsigned, bool vote) {
  fibers::all[fibers::now].shown = vote;
  __syncwarp();
  unsigned votes = 0;
  for (int lane = 0; lane < 32; ++lane) votes |= fibers::all[fibers::now / 32 * 32 + lane].shown << lane;
  __syncwarp();
  return votes;
}
static int __shfl_up_sync(unsigned, int value, int step) {
  fibers::all[fibers::now].shown = value;
  __syncwarp();
  const int found = fibers::now % 32 >= step ? static_cast<int>(fibers::all[fibers::now - step].shown) : value;
  __syncwarp();
  return found;
}
static int __popc(unsigned x) { return __builtin_popcount(x); }
static void atomicAdd(unsigned* sum, unsigned by) { *sum += by; }
template <typename T>
static T __ldcg(const T* p) {
  return *p;
}
#define DEJAX_MEET_CLUSTER() fibers::Wait(fibers::cluster, PARTS* THREADS)
// Of a block; `at` keeps two variables apart.
#define DEJAX_SHARED(type, name, at) \
  type& name = *reinterpret_cast<type*>(fibers::memory[fibers::now / THREADS].data() + (at))

#include "ordering.cu"

extern "C" void sort_pairs(int programs, void** p) {
  fibers::Run(programs, [&] {
    dejax_sort_pairs((unsigned*)p[0], (int*)p[1], (int*)p[2], (unsigned*)p[3], (int*)p[4], (Pair*)p[5], (Pair*)p[6],
                     (unsigned*)p[7]);
  });
}
extern "C" void sums(int programs, void** p) {
  fibers::Run(programs, [&] { dejax_sums((int*)p[0], (int*)p[1], (int*)p[2], (int*)p[3]); });
}
extern "C" void number(int programs, void** p) {
  fibers::Run(programs, [&] {
    dejax_number((unsigned*)p[0], (int*)p[1], (int*)p[2], (int*)p[3], (int*)p[4], (Pair*)p[5], (Pair*)p[6], (int*)p[7],
                 (unsigned*)p[8]);
  });
}
