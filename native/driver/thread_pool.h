// One thread pool for all CPU handlers of the process.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

namespace dejax {

class ThreadPool {
 public:
  // The process's pool, made on first use and never destroyed: handlers may still run while the process exits.
  static ThreadPool& Get();

  // Threads that work on one loop, the caller included: DEJAX_NUM_THREADS if it is set to a positive integer, otherwise
  // the number of cores.
  int num_threads() const { return num_threads_; }

  // Calls body(begin, end) on disjoint ranges that cover [0, count), each at most `grain` long, and returns when all calls
  // have returned. The caller works as well, so that a loop ends even if every other thread is busy or, after a fork,
  // gone. With count <= grain everything runs in the caller. `body` must not throw.
  void ParallelFor(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body);

 private:
  struct Loop {
    const std::function<void(int64_t, int64_t)>* body;  // valid while done < count: until then the caller waits
    int64_t count;
    int64_t grain;
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
    std::mutex mutex;
    std::condition_variable finished;

    void Work();  // runs ranges until none is left
  };

  explicit ThreadPool(int num_threads);
  void Worker();

  const int num_threads_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::deque<std::shared_ptr<Loop>> loops_;
};

}  // namespace dejax
