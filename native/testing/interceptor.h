// The interceptor of tests: operations fail or slow down as a test asks.
#pragma once

#include <chrono>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "blocks/interceptor.h"

namespace dejax::offload {

class TestInterceptor : public Interceptor {
 public:
  // The next `count` operations of a kind ("write", "read", "corrupt", "store", "fetch") fail. "corrupt": what is read
  // back has another checksum.
  void Inject(const std::string& kind, int count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    left_[kind] = count;
  }
  // Each read and write takes so much longer.
  void Slow(double seconds) {
    const std::lock_guard<std::mutex> lock(mutex_);
    seconds_ = seconds;
  }
  void Before(Operation operation) override {
    static constexpr const char* kKinds[] = {"store", "fetch", "write", "read"};
    const char* const kind = kKinds[static_cast<int>(operation)];
    if (operation == Operation::kWrite || operation == Operation::kRead) Sleep();
    if (Take(kind)) throw std::runtime_error(std::string("offload: a ") + kind + " failed: injected fault");
  }
  void Written(Chunk* chunk) override {
    if (Take("corrupt")) chunk->checksum ^= 1;
  }

 private:
  bool Take(const std::string& kind) {
    const std::lock_guard<std::mutex> lock(mutex_);
    int& left = left_[kind];
    return left > 0 && left-- > 0;
  }
  void Sleep() {
    double seconds = 0;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      seconds = seconds_;
    }
    if (seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  }

  std::mutex mutex_;
  std::map<std::string, int> left_;
  double seconds_ = 0;
};

}  // namespace dejax::offload
