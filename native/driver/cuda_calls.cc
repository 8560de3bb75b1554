#include "driver/cuda_calls.h"

#include <dlfcn.h>

#include <atomic>

namespace dejax::offload {
namespace {

struct Loaded {
  Calls calls;
  std::string why;
};

Loaded Load() {
  Loaded loaded{};
  if (cuda::GetApi(&loaded.why) == nullptr) return loaded;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  const auto find = [&](auto* function, const char* symbol) {
    *function = reinterpret_cast<std::decay_t<decltype(*function)>>(dlsym(library, symbol));
    if (*function == nullptr && loaded.why.empty()) loaded.why = std::string("libcuda.so.1 has no ") + symbol;
  };
  Calls& c = loaded.calls;
  find(&c.stream_get_ctx, "cuStreamGetCtx");
  find(&c.ctx_push, "cuCtxPushCurrent_v2");
  find(&c.ctx_pop, "cuCtxPopCurrent_v2");
  find(&c.stream_create, "cuStreamCreate");
  find(&c.stream_destroy, "cuStreamDestroy_v2");
  find(&c.stream_synchronize, "cuStreamSynchronize");
  find(&c.stream_wait_event, "cuStreamWaitEvent");
  find(&c.event_create, "cuEventCreate");
  find(&c.event_destroy, "cuEventDestroy_v2");
  find(&c.event_record, "cuEventRecord");
  find(&c.event_synchronize, "cuEventSynchronize");
  find(&c.event_query, "cuEventQuery");
  find(&c.event_elapsed_time, "cuEventElapsedTime");
  find(&c.mem_alloc, "cuMemAlloc_v2");
  find(&c.mem_free, "cuMemFree_v2");
  find(&c.host_alloc, "cuMemHostAlloc");
  find(&c.host_free, "cuMemFreeHost");
  find(&c.copy_device_to_device, "cuMemcpyDtoDAsync_v2");
  find(&c.copy_device_to_host, "cuMemcpyDtoHAsync_v2");
  find(&c.copy_host_to_device, "cuMemcpyHtoDAsync_v2");
  const auto find_optional = [&](auto* function, const char* symbol) {
    *function = reinterpret_cast<std::decay_t<decltype(*function)>>(dlsym(library, symbol));
  };
  find_optional(&c.copy_batch, "cuMemcpyBatchAsync_v2");
  find_optional(&c.copy_batch_old, "cuMemcpyBatchAsync");
  find(&c.memset_d32, "cuMemsetD32Async");
  find(&c.get_error_name, "cuGetErrorName");
  return loaded;
}

constexpr unsigned kDisableTiming = 2;  // CU_EVENT_DISABLE_TIMING

}  // namespace

const Calls& GetCalls() {
  static const Loaded* const loaded = new Loaded(Load());  // never destroyed, like the driver
  if (!loaded->why.empty()) throw std::runtime_error("no CUDA driver to offload with: " + loaded->why);
  return loaded->calls;
}

void Check(Result result, const char* call) {
  if (result == 0) return;
  const char* name = nullptr;
  const bool known = GetCalls().get_error_name(result, &name) == 0 && name != nullptr;
  throw std::runtime_error(std::string(call) + " failed: " + (known ? name : std::to_string(result)));
}

EventPool::~EventPool() {
  for (RawEvent event : free_) GetCalls().event_destroy(event);
}

Event EventPool::Record(Stream stream) {
  RawEvent event = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!free_.empty()) {
      event = free_.back();
      free_.pop_back();
    }
  }
  if (event == nullptr) Check(GetCalls().event_create(&event, timed_ ? 0 : kDisableTiming), "cuEventCreate");
  Event owned(event, [pool = weak_from_this()](RawEvent raw) {
    if (auto alive = pool.lock()) {
      std::lock_guard<std::mutex> lock(alive->mutex_);
      alive->free_.push_back(raw);
    } else {
      GetCalls().event_destroy(raw);
    }
  });
  Check(GetCalls().event_record(event, stream), "cuEventRecord");
  return owned;
}

void Copies::Add(DevicePointer to, DevicePointer from, size_t bytes) {
  to_.push_back(to);
  from_.push_back(from);
  bytes_.push_back(bytes);
}

void Copies::Run(Stream stream) {
  if (kind_ != Kind::kDeviceToDevice && to_.size() > 1 && RunTogether(stream)) return;
  const Calls& calls = GetCalls();
  for (size_t i = 0; i < to_.size(); ++i) {
    if (kind_ == Kind::kDeviceToDevice) {
      Check(calls.copy_device_to_device(to_[i], from_[i], bytes_[i], stream), "cuMemcpyDtoDAsync");
    } else if (kind_ == Kind::kDeviceToHost) {
      Check(calls.copy_device_to_host(reinterpret_cast<void*>(to_[i]), from_[i], bytes_[i], stream),
            "cuMemcpyDtoHAsync");
    } else {
      Check(calls.copy_host_to_device(to_[i], reinterpret_cast<const void*>(from_[i]), bytes_[i], stream),
            "cuMemcpyHtoDAsync");
    }
  }
}

// One after the other they do the same, so a driver that refuses this once is not asked again.
bool Copies::RunTogether(Stream stream) {
  static std::atomic<bool> refused{false};
  const Calls& calls = GetCalls();
  if (refused) return false;
  BatchAttributes attributes;
  size_t first = 0, failed = 0;
  Result result = -1;
  if (calls.copy_batch != nullptr) {
    result = calls.copy_batch(to_.data(), from_.data(), bytes_.data(), to_.size(), &attributes, &first, 1, stream);
  } else if (calls.copy_batch_old != nullptr) {
    result = calls.copy_batch_old(to_.data(), from_.data(), bytes_.data(), to_.size(), &attributes, &first, 1, &failed,
                                  stream);
  }
  if (result != 0) refused = true;
  return result == 0;
}

uint64_t ReadHandle(DevicePointer handle, Stream stream) {
  const Calls& calls = GetCalls();
  Context context = nullptr;
  Check(calls.stream_get_ctx(stream, &context), "cuStreamGetCtx");
  const ContextScope scope(context);
  uint64_t value = 0;
  Check(calls.copy_device_to_host(&value, handle, sizeof(value), stream), "cuMemcpyDtoHAsync");
  Check(calls.stream_synchronize(stream), "cuStreamSynchronize");
  return value;
}

void FillWithOnes(DevicePointer data, int64_t bytes, Stream stream) {
  static const uint32_t ones = 0xffffffff;
  Check(GetCalls().memset_d32(data, ones, bytes / 4, stream), "cuMemsetD32Async");
  if (const int64_t rest = bytes % 4) {
    Check(GetCalls().copy_host_to_device(data + bytes - rest, &ones, rest, stream), "cuMemcpyHtoDAsync");
  }
}

}  // namespace dejax::offload
