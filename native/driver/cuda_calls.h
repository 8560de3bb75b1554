// What offload needs of the CUDA driver beyond single calls: events that are used again, copies that are submitted
// together, handles.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "driver/cuda_driver.h"

namespace dejax::offload {

using cuda::Check;
using cuda::Context;
using cuda::ContextScope;
using cuda::DevicePointer;
using cuda::Driver;
using cuda::GetDriver;
using cuda::Result;
using cuda::Stream;

// Reuses events: making one costs as much as a small launch.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  explicit EventPool(bool timed = false) : timed_(timed) {}
  ~EventPool();
  // An event recorded on `stream`. It returns to the pool with its last owner; waits that were submitted before keep
  // their meaning.
  std::shared_ptr<CUevent_st> Record(Stream stream);

 private:
  const bool timed_;
  std::mutex mutex_;
  std::vector<cuda::Event> free_;
};
using Event = std::shared_ptr<CUevent_st>;

// Copies of one kind that do not depend on each other.
class Copies {
 public:
  enum class Kind { kDeviceToDevice, kDeviceToHost, kHostToDevice };

  explicit Copies(Kind kind) : kind_(kind) {}
  void Add(DevicePointer to, DevicePointer from, size_t bytes);
  // The launching thread makes one call of the driver for all copies over the bus, where the driver can.
  void Run(Stream stream);

 private:
  bool RunTogether(Stream stream);

  const Kind kind_;
  std::vector<DevicePointer> to_, from_;
  std::vector<size_t> bytes_;
};

// Waits for the work that was submitted to the stream, then reads the handle.
uint64_t ReadHandle(DevicePointer handle, Stream stream);

// Ones in every bit: NaN.
void FillWithOnes(DevicePointer data, int64_t bytes, Stream stream);

inline void Wait(Stream stream, const Event& event) {
  if (event) Check(GetDriver().stream_wait_event(stream, event.get(), 0), "cuStreamWaitEvent");
}

}  // namespace dejax::offload
