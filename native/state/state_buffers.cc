#include "state/state_buffers.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "blocks/disk.h"

namespace dejax::offload {

StateBuffers::~StateBuffers() {
  for (const StateBuffer& buffer : free_) Free(buffer);
}

std::shared_ptr<StateBuffer> StateBuffers::Take(int64_t bytes, bool write, int64_t cap, bool pinned) {
  bytes = std::max(kPage, WholePages(bytes));
  const auto fits = [&](const StateBuffer& b) {
    return b.pinned == pinned && b.capacity >= bytes && b.capacity <= bytes + bytes / 2;
  };
  std::list<StateBuffer> dropped;
  StateBuffer found;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (write) {
      returned_.wait(lock, [&] { return writing_ == 0 || writing_ + bytes <= cap; });
      writing_ += bytes;
    }
    const auto at = std::find_if(free_.begin(), free_.end(), fits);
    if (at != free_.end()) {
      found = *at;
      free_.erase(at);
      used_ += found.capacity;
    } else {
      // Free buffers of other sizes stay for later layers: pinned memory takes long to make.
      while (!free_.empty() && held_ + bytes > 2 * std::max(most_used_, used_ + bytes)) {
        held_ -= free_.front().capacity;
        dropped.splice(dropped.end(), free_, free_.begin());
      }
      held_ += bytes;
      used_ += bytes;
      peak_ = std::max(peak_, held_);
    }
    most_used_ = std::max(most_used_, used_);
  }
  for (const StateBuffer& buffer : dropped) Free(buffer);
  if (found.data == nullptr) {
    found.capacity = bytes;
    found.pinned = pinned;
    void* data = nullptr;
    const bool failed = pinned ? GetDriver().host_alloc(&data, static_cast<size_t>(bytes), /*portable | device map*/ 3) != 0
                               : posix_memalign(&data, kPage, static_cast<size_t>(bytes)) != 0;
    if (failed) {
      std::lock_guard<std::mutex> lock(mutex_);
      held_ -= bytes;
      used_ -= bytes;
      if (write) writing_ -= bytes;
      returned_.notify_all();
      throw std::runtime_error("offload: no host memory is left for " + std::to_string(bytes) +
                               " bytes of state on their way to or from the drive; give a smaller `ahead`");
    }
    found.data = static_cast<char*>(data);
  }
  auto self = shared_from_this();
  return std::shared_ptr<StateBuffer>(new StateBuffer(found), [self, written = write ? bytes : 0](StateBuffer* buffer) {
    self->GiveBack(*buffer, written);
    delete buffer;
  });
}

void StateBuffers::GiveBack(const StateBuffer& buffer, int64_t written) {
  std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(buffer);
  used_ -= buffer.capacity;
  writing_ -= written;
  returned_.notify_all();
}

void StateBuffers::Free(const StateBuffer& buffer) {
  if (!buffer.pinned) {
    std::free(buffer.data);
    return;
  }
  if (buffer.busy) GetDriver().event_synchronize(buffer.busy.get());
  GetDriver().host_free(buffer.data);
}

int64_t StateBuffers::peak_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return peak_;
}

}  // namespace dejax::offload
