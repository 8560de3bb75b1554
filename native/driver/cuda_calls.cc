#include "driver/cuda_calls.h"

#include <atomic>

namespace dejax::offload {
namespace {

constexpr unsigned kDisableTiming = 2;  // CU_EVENT_DISABLE_TIMING

}  // namespace

EventPool::~EventPool() {
  for (cuda::Event event : free_) GetDriver().event_destroy(event);
}

Event EventPool::Record(Stream stream) {
  cuda::Event event = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!free_.empty()) {
      event = free_.back();
      free_.pop_back();
    }
  }
  if (event == nullptr) Check(GetDriver().event_create(&event, timed_ ? 0 : kDisableTiming), "cuEventCreate");
  Event owned(event, [pool = weak_from_this()](cuda::Event raw) {
    if (auto alive = pool.lock()) {
      std::lock_guard<std::mutex> lock(alive->mutex_);
      alive->free_.push_back(raw);
    } else {
      GetDriver().event_destroy(raw);
    }
  });
  Check(GetDriver().event_record(event, stream), "cuEventRecord");
  return owned;
}

void Copies::Add(DevicePointer to, DevicePointer from, size_t bytes) {
  to_.push_back(to);
  from_.push_back(from);
  bytes_.push_back(bytes);
}

void Copies::Run(Stream stream) {
  if (kind_ != Kind::kDeviceToDevice && to_.size() > 1 && RunTogether(stream)) return;
  const Driver& driver = GetDriver();
  for (size_t i = 0; i < to_.size(); ++i) {
    if (kind_ == Kind::kDeviceToDevice) {
      Check(driver.copy_device_to_device(to_[i], from_[i], bytes_[i], stream), "cuMemcpyDtoDAsync");
    } else if (kind_ == Kind::kDeviceToHost) {
      Check(driver.copy_device_to_host(reinterpret_cast<void*>(to_[i]), from_[i], bytes_[i], stream),
            "cuMemcpyDtoHAsync");
    } else {
      Check(driver.copy_host_to_device(to_[i], reinterpret_cast<const void*>(from_[i]), bytes_[i], stream),
            "cuMemcpyHtoDAsync");
    }
  }
}

// One after the other they do the same, so a driver that refuses this once is not asked again.
bool Copies::RunTogether(Stream stream) {
  static std::atomic<bool> refused{false};
  const Driver& driver = GetDriver();
  if (refused) return false;
  cuda::BatchAttributes attributes;
  size_t first = 0, failed = 0;
  Result result = -1;
  if (driver.copy_batch != nullptr) {
    result = driver.copy_batch(to_.data(), from_.data(), bytes_.data(), to_.size(), &attributes, &first, 1, stream);
  } else if (driver.copy_batch_old != nullptr) {
    result = driver.copy_batch_old(to_.data(), from_.data(), bytes_.data(), to_.size(), &attributes, &first, 1, &failed,
                                  stream);
  }
  if (result != 0) refused = true;
  return result == 0;
}

uint64_t ReadHandle(DevicePointer handle, Stream stream) {
  const Driver& driver = GetDriver();
  Context context = nullptr;
  Check(driver.stream_get_ctx(stream, &context), "cuStreamGetCtx");
  const ContextScope scope(context);
  uint64_t value = 0;
  Check(driver.copy_device_to_host(&value, handle, sizeof(value), stream), "cuMemcpyDtoHAsync");
  Check(driver.stream_synchronize(stream), "cuStreamSynchronize");
  return value;
}

void FillWithOnes(DevicePointer data, int64_t bytes, Stream stream) {
  static const uint32_t ones = 0xffffffff;
  Check(GetDriver().memset_d32(data, ones, bytes / 4, stream), "cuMemsetD32Async");
  if (const int64_t rest = bytes % 4) {
    Check(GetDriver().copy_host_to_device(data + bytes - rest, &ones, rest, stream), "cuMemcpyHtoDAsync");
  }
}

}  // namespace dejax::offload
