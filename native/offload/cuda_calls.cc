#include "cuda_calls.h"

#include <dlfcn.h>

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
  find(&c.memset_d32, "cuMemsetD32Async");
  find(&c.module_load, "cuModuleLoadData");
  find(&c.module_unload, "cuModuleUnload");
  find(&c.module_get_function, "cuModuleGetFunction");
  find(&c.launch_kernel, "cuLaunchKernel");
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

void FillWithOnes(DevicePointer data, int64_t bytes, Stream stream) {
  static const uint32_t ones = 0xffffffff;
  Check(GetCalls().memset_d32(data, ones, bytes / 4, stream), "cuMemsetD32Async");
  if (const int64_t rest = bytes % 4) {
    Check(GetCalls().copy_host_to_device(data + bytes - rest, &ones, rest, stream), "cuMemcpyHtoDAsync");
  }
}

}  // namespace dejax::offload
