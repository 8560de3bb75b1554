// A store's mutex, and the calls that are inside of the store. store.h says when the mutex is held.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace dejax::offload {

using Lock = std::unique_lock<std::mutex>;

// A run or an owner of memory that did nothing for so long is taken for ended: another thread's step may be slow.
constexpr double kIdleSeconds = 2;

inline double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Monitor {
  std::mutex mutex;
  std::condition_variable changed;  // memory or data may have become available
  bool closing = false;
  int active = 0;   // calls that released the mutex and will go on without help
  int waiting = 0;  // calls that wait for others to make room

  // Waits for `changed`. Such a call is not active: two that wait for room must not take each other for progress.
  void WaitForOthers(Lock& lock, std::chrono::milliseconds most) {
    ++waiting;
    changed.wait_for(lock, most);
    --waiting;
    if (closing) changed.notify_all();
  }
};

// Releases the mutex while it lives. A store that closes waits until then.
class Unlocked {
 public:
  Unlocked(Monitor* monitor, Lock& lock) : monitor_(monitor), lock_(lock) {
    ++monitor_->active;
    lock_.unlock();
  }
  ~Unlocked() {
    lock_.lock();
    --monitor_->active;
    monitor_->changed.notify_all();
  }
  Unlocked(const Unlocked&) = delete;

 private:
  Monitor* const monitor_;
  Lock& lock_;
};

// Adds its lifetime to a counter. The mutex is held when it begins and when it ends.
class Stopwatch {
 public:
  explicit Stopwatch(double* total) : total_(total), begin_(Seconds()) {}
  ~Stopwatch() { *total_ += Seconds() - begin_; }

 private:
  double* const total_;
  const double begin_;
};

}  // namespace dejax::offload
