// What the parts of the store share: store.cc, runs.cc, slots.cc, io.cc and steps.cc.
#pragma once

#include <chrono>
#include <cstdint>
#include <limits>
#include <string>

#include "store.h"

namespace dejax::offload {

constexpr uint64_t kSerialBits = 48;
constexpr uint64_t kAnySerial = std::numeric_limits<uint64_t>::max();
// Who was not heard of for so long is taken for ended: another thread's step may be slow.
constexpr double kIdleSeconds = 2;

inline int64_t RoundUp(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

inline double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline std::string Megabytes(int64_t bytes) {
  return bytes < 10000000 ? std::to_string(bytes) + " bytes" : std::to_string(bytes / 1000000) + " MB";
}

// Adds the time that it lives to a counter. The store's mutex is held when it begins and when it ends.
class Stopwatch {
 public:
  explicit Stopwatch(double* total) : total_(total), begin_(Seconds()) {}
  ~Stopwatch() { *total_ += Seconds() - begin_; }

 private:
  double* const total_;
  const double begin_;
};

// Lets go of the store's mutex while it lives. A store that closes waits until it is over.
class Store::Unlocked {
 public:
  Unlocked(Store* store, Lock& lock) : store_(store), lock_(lock) {
    ++store_->active_;
    lock_.unlock();
  }
  ~Unlocked() {
    lock_.lock();
    --store_->active_;
    store_->changed_.notify_all();
  }
  Unlocked(const Unlocked&) = delete;

 private:
  Store* const store_;
  Lock& lock_;
};

}  // namespace dejax::offload
