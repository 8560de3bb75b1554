#include "driver/thread_pool.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <system_error>
#include <thread>

#include "driver/thread_name.h"

namespace dejax {
namespace {

int ChooseNumThreads() {
  if (const char* text = std::getenv("DEJAX_NUM_THREADS")) {
    const int wanted = std::atoi(text);
    if (wanted > 0) return std::min(wanted, 1024);
  }
  return std::max(1u, std::thread::hardware_concurrency());
}

}  // namespace

ThreadPool& ThreadPool::Get() {
  static ThreadPool* const pool = new ThreadPool(ChooseNumThreads());
  return *pool;
}

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads) {
  for (int i = 1; i < num_threads_; ++i) {
    try {
      std::thread([this] { Worker(); }).detach();
    } catch (const std::system_error&) {
      return;  // the process is at its limit of threads; the existing threads and the caller do the work
    }
  }
}

void ThreadPool::Worker() {
  NameThisThread("dejax-rows");
  while (true) {
    std::shared_ptr<Loop> loop;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      work_.wait(lock, [this] { return !loops_.empty(); });
      loop = loops_.front();
    }
    loop->Work();
    std::lock_guard<std::mutex> lock(mutex_);
    const auto at = std::find(loops_.begin(), loops_.end(), loop);
    if (at != loops_.end()) loops_.erase(at);  // every range is taken, but some may still run
  }
}

void ThreadPool::Loop::Work() {
  while (true) {
    const int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
    if (begin >= count) return;
    const int64_t end = std::min(count, begin + grain);
    (*body)(begin, end);
    if (done.fetch_add(end - begin, std::memory_order_acq_rel) + (end - begin) == count) {
      std::lock_guard<std::mutex> lock(mutex);
      finished.notify_all();
    }
  }
}

void ThreadPool::ParallelFor(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  if (count <= 0) return;
  if (num_threads_ == 1 || count <= grain) {
    body(0, count);
    return;
  }
  std::shared_ptr<Loop> loop;
  try {
    loop = std::make_shared<Loop>();
    loop->body = &body;
    loop->count = count;
    loop->grain = std::max<int64_t>(1, grain);
    std::lock_guard<std::mutex> lock(mutex_);
    loops_.push_back(loop);
  } catch (const std::bad_alloc&) {
    body(0, count);  // there is no memory to share the loop, so the caller runs all of it
    return;
  }
  work_.notify_all();
  loop->Work();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto at = std::find(loops_.begin(), loops_.end(), loop);
    if (at != loops_.end()) loops_.erase(at);
  }
  std::unique_lock<std::mutex> lock(loop->mutex);
  loop->finished.wait(lock, [&] { return loop->done.load(std::memory_order_acquire) == loop->count; });
}

}  // namespace dejax
