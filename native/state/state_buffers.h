// Host memory through which training state goes to files and comes back.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>

#include "driver/cuda_calls.h"

namespace dejax::offload {

// Host memory on its way to or from a file.
struct StateBuffer {
  char* data = nullptr;
  int64_t capacity = 0;  // whole pages
  bool pinned = false;
  Event busy;  // after it the GPU does not use the memory
};

// Page-aligned host memory that is used again. A buffer returns with its last owner.
class StateBuffers : public std::enable_shared_from_this<StateBuffers> {
 public:
  ~StateBuffers();
  // Waits while writes hold memory, and would hold more than `cap` bytes. Reads do not wait: nobody else would end them.
  std::shared_ptr<StateBuffer> Take(int64_t bytes, bool write, int64_t cap, bool pinned);
  int64_t peak_bytes() const;

 private:
  void GiveBack(const StateBuffer& buffer, int64_t written);
  static void Free(const StateBuffer& buffer);

  mutable std::mutex mutex_;
  std::condition_variable returned_;
  std::list<StateBuffer> free_;  // least recently used first
  int64_t held_ = 0, peak_ = 0, used_ = 0, most_used_ = 0;  // bytes; used: without those in free_
  int64_t writing_ = 0;  // bytes of buffers that writes have
};

}  // namespace dejax::offload
