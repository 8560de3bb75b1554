// The offload service's calls of the CUDA driver: streams, events, copies, pinned memory and one small kernel. They are
// found at run time like those of cuda_driver.h, but apart from them: a driver that lacks one still serves the rest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "driver/cuda_driver.h"

struct CUevent_st;

namespace dejax::offload {

using cuda::Context;
using cuda::DevicePointer;
using cuda::Result;
using cuda::Stream;
using RawEvent = CUevent_st*;

// How the copies of a batch read their sources (CUmemcpyAttributes): of ours, in the order of the stream.
struct BatchAttributes {
  int source_order = 1;  // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
  int source_hint[2] = {}, target_hint[2] = {};
  unsigned flags = 0;
};

struct Calls {
  Result (*stream_get_ctx)(Stream, Context*);
  Result (*ctx_push)(Context);
  Result (*ctx_pop)(Context*);
  Result (*stream_create)(Stream*, unsigned flags);
  Result (*stream_destroy)(Stream);
  Result (*stream_synchronize)(Stream);
  Result (*stream_wait_event)(Stream, RawEvent, unsigned flags);
  Result (*event_create)(RawEvent*, unsigned flags);
  Result (*event_destroy)(RawEvent);
  Result (*event_record)(RawEvent, Stream);
  Result (*event_synchronize)(RawEvent);
  Result (*event_query)(RawEvent);
  Result (*event_elapsed_time)(float* milliseconds, RawEvent, RawEvent);
  Result (*mem_alloc)(DevicePointer*, size_t);
  Result (*mem_free)(DevicePointer);
  Result (*host_alloc)(void**, size_t, unsigned flags);
  Result (*host_free)(void*);
  Result (*copy_device_to_device)(DevicePointer, DevicePointer, size_t, Stream);
  Result (*copy_device_to_host)(void*, DevicePointer, size_t, Stream);
  Result (*copy_host_to_device)(DevicePointer, const void*, size_t, Stream);
  // Of newer drivers; null elsewhere. The first is of CUDA 13, the second of CUDA 12.8.
  Result (*copy_batch)(DevicePointer* to, DevicePointer* from, size_t* bytes, size_t count, BatchAttributes*,
                       size_t* first_of_attributes, size_t num_attributes, Stream);
  Result (*copy_batch_old)(DevicePointer* to, DevicePointer* from, size_t* bytes, size_t count, BatchAttributes*,
                           size_t* first_of_attributes, size_t num_attributes, size_t* failed, Stream);
  Result (*memset_d32)(DevicePointer, unsigned value, size_t count, Stream);
  Result (*get_error_name)(Result, const char**);
};

// Throws std::runtime_error where there is no driver or it lacks a call.
const Calls& GetCalls();

// Throws std::runtime_error with the call's name and the driver's name of the error, where there is one.
void Check(Result result, const char* call);

// Makes a context current on this thread while it lives.
class ContextScope {
 public:
  explicit ContextScope(Context context) : active_(context != nullptr) {
    if (active_) Check(GetCalls().ctx_push(context), "cuCtxPushCurrent");
  }
  ~ContextScope() {
    Context context = nullptr;
    if (active_) GetCalls().ctx_pop(&context);
  }
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  const bool active_;
};

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
  std::vector<RawEvent> free_;
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
  if (event) Check(GetCalls().stream_wait_event(stream, event.get(), 0), "cuStreamWaitEvent");
}

}  // namespace dejax::offload
