// The functions of the CUDA driver that dejax calls, and what the driver says of its devices. The functions are found at
// run time: building needs no CUDA toolkit, and running needs no driver.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

struct CUstream_st;
struct CUctx_st;
struct CUevent_st;
struct CUfunc_st;
struct CUmod_st;
struct CUmemPoolHandle_st;

namespace dejax::cuda {

using Result = int;  // CUresult; 0 is success
using Device = int;
using Stream = CUstream_st*;
using Context = CUctx_st*;
using Event = CUevent_st*;
using Function = CUfunc_st*;
using Module = CUmod_st*;
using MemoryPool = CUmemPoolHandle_st*;
using DevicePointer = unsigned long long;

// How the copies of a batch read their sources (CUmemcpyAttributes): ours, in the order of the stream.
struct BatchAttributes {
  int source_order = 1;  // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
  int source_hint[2] = {}, target_hint[2] = {};
  unsigned flags = 0;
};

// The parts of dejax. A driver that lacks a function of one part still serves the others; no part can do without kCore.
enum Part : unsigned { kOptional = 0, kCore = 1, kTables = 2, kOffload = 4 };

// Each function: the parts that need it, its name here, the driver's symbol, its parameters.
#define DEJAX_CUDA_FUNCTIONS(X)                                                                                        \
  X(kCore, init, "cuInit", unsigned flags)                                                                             \
  X(kCore, driver_get_version, "cuDriverGetVersion", int* version)                                                     \
  X(kCore, device_get_count, "cuDeviceGetCount", int* count)                                                           \
  X(kCore, device_get, "cuDeviceGet", Device*, int ordinal)                                                            \
  X(kCore, device_get_name, "cuDeviceGetName", char* name, int length, Device)                                         \
  X(kCore, device_total_mem, "cuDeviceTotalMem_v2", size_t* bytes, Device)                                             \
  X(kCore, device_get_attribute, "cuDeviceGetAttribute", int* value, int attribute, Device)                            \
  X(kCore, stream_get_ctx, "cuStreamGetCtx", Stream, Context*)                                                         \
  X(kCore, ctx_push, "cuCtxPushCurrent_v2", Context)                                                                   \
  X(kCore, ctx_pop, "cuCtxPopCurrent_v2", Context*)                                                                    \
  X(kCore, get_error_name, "cuGetErrorName", Result, const char** name)                                                \
  X(kTables | kOffload, host_alloc, "cuMemHostAlloc", void**, size_t bytes, unsigned flags)                            \
  X(kTables | kOffload, host_free, "cuMemFreeHost", void*)                                                             \
  X(kTables | kOffload, mem_alloc, "cuMemAlloc_v2", DevicePointer*, size_t bytes)                                      \
  X(kTables | kOffload, stream_wait_event, "cuStreamWaitEvent", Stream, Event, unsigned flags)                         \
  X(kTables | kOffload, event_create, "cuEventCreate", Event*, unsigned flags)                                         \
  X(kTables | kOffload, event_record, "cuEventRecord", Event, Stream)                                                  \
  X(kTables | kOffload, event_destroy, "cuEventDestroy_v2", Event)                                                     \
  X(kTables | kOffload, copy_device_to_device, "cuMemcpyDtoDAsync_v2", DevicePointer to, DevicePointer from,           \
    size_t bytes, Stream)                                                                                              \
  X(kTables, primary_ctx_retain, "cuDevicePrimaryCtxRetain", Context*, Device)                                         \
  X(kTables, primary_ctx_get_state, "cuDevicePrimaryCtxGetState", Device, unsigned* flags, int* active)                \
  X(kTables, ctx_get_current, "cuCtxGetCurrent", Context*)                                                             \
  X(kTables, ctx_get_device, "cuCtxGetDevice", Device*)                                                                \
  X(kTables, ctx_synchronize, "cuCtxSynchronize")                                                                      \
  X(kTables, host_register, "cuMemHostRegister_v2", void*, size_t bytes, unsigned flags)                               \
  X(kTables, host_unregister, "cuMemHostUnregister", void*)                                                            \
  X(kTables, host_get_device_pointer, "cuMemHostGetDevicePointer_v2", DevicePointer*, void* host, unsigned flags)      \
  X(kTables, pointer_get_attribute, "cuPointerGetAttribute", void* value, int attribute, DevicePointer)                 \
  X(kTables, module_load_data, "cuModuleLoadData", Module*, const void* image)                                         \
  X(kTables, module_get_function, "cuModuleGetFunction", Function*, Module, const char* name)                          \
  X(kTables, func_set_attribute, "cuFuncSetAttribute", Function, int attribute, int value)                             \
  X(kTables, thread_exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", int* mode)                             \
  X(kTables, launch_kernel, "cuLaunchKernel", Function, unsigned grid_x, unsigned grid_y, unsigned grid_z,             \
    unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes, Stream, void** parameters,            \
    void** extra)                                                                                                      \
  X(kTables, memset_d8, "cuMemsetD8Async", DevicePointer, unsigned char value, size_t count, Stream)                   \
  X(kTables, stream_create_with_priority, "cuStreamCreateWithPriority", Stream*, unsigned flags, int priority)         \
  X(kTables, ctx_get_stream_priority_range, "cuCtxGetStreamPriorityRange", int* least, int* greatest)                  \
  X(kTables, mem_alloc_async, "cuMemAllocAsync", DevicePointer*, size_t bytes, Stream)                                 \
  X(kTables, mem_free_async, "cuMemFreeAsync", DevicePointer, Stream)                                                  \
  X(kTables, device_get_default_mem_pool, "cuDeviceGetDefaultMemPool", MemoryPool*, Device)                            \
  X(kTables, mem_pool_set_attribute, "cuMemPoolSetAttribute", MemoryPool, int attribute, void* value)                  \
  X(kOffload, stream_create, "cuStreamCreate", Stream*, unsigned flags)                                                \
  X(kOffload, stream_destroy, "cuStreamDestroy_v2", Stream)                                                            \
  X(kOffload, stream_synchronize, "cuStreamSynchronize", Stream)                                                       \
  X(kOffload, event_synchronize, "cuEventSynchronize", Event)                                                          \
  X(kOffload, event_query, "cuEventQuery", Event)                                                                      \
  X(kOffload, event_elapsed_time, "cuEventElapsedTime", float* milliseconds, Event, Event)                             \
  X(kOffload, mem_free, "cuMemFree_v2", DevicePointer)                                                                 \
  X(kOffload, copy_device_to_host, "cuMemcpyDtoHAsync_v2", void* to, DevicePointer from, size_t bytes, Stream)         \
  X(kOffload, copy_host_to_device, "cuMemcpyHtoDAsync_v2", DevicePointer to, const void* from, size_t bytes, Stream)   \
  X(kOptional, ctx_enable_peer_access, "cuCtxEnablePeerAccess", Context, unsigned flags)                               \
  X(kOptional, launch_host_func, "cuLaunchHostFunc", Stream, void (*function)(void*), void* argument)                  \
  X(kOffload, memset_d32, "cuMemsetD32Async", DevicePointer, unsigned value, size_t count, Stream)                     \
  /* The first is of CUDA 13, the second of CUDA 12.8. */                                                              \
  X(kOptional, copy_batch, "cuMemcpyBatchAsync_v2", DevicePointer* to, DevicePointer* from, size_t* bytes,             \
    size_t count, BatchAttributes*, size_t* first_of_attributes, size_t num_attributes, Stream)                        \
  X(kOptional, copy_batch_old, "cuMemcpyBatchAsync", DevicePointer* to, DevicePointer* from, size_t* bytes,            \
    size_t count, BatchAttributes*, size_t* first_of_attributes, size_t num_attributes, size_t* failed, Stream)

struct Driver {
#define DEJAX_MEMBER(parts, name, symbol, ...) Result (*name)(__VA_ARGS__) = nullptr;
  DEJAX_CUDA_FUNCTIONS(DEJAX_MEMBER)
#undef DEJAX_MEMBER
};

// The driver after a successful cuInit; null with a reason in `*why` where there is none, or it lacks what a part needs.
// The first answer is kept for the life of the process.
const Driver* FindDriver(Part part, std::string* why);

// The same. Throws std::runtime_error where there is none.
const Driver& GetDriver(Part part = kOffload);

// "CUDA_ERROR_...", or the number if the driver does not know it.
std::string ErrorName(Result result);

// Throws std::runtime_error with the call's name and the driver's name of the error, where there is one.
void Check(Result result, const char* call);

// Makes a context current on this thread while it lives; null: none. Throws std::runtime_error.
class ContextScope {
 public:
  explicit ContextScope(Context context);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  const bool active_;
};

struct DeviceInfo {
  std::string name;
  int compute_capability_major = 0;
  int compute_capability_minor = 0;
  size_t total_memory = 0;  // bytes
  int multiprocessors = 0;
  int l2_cache = 0;  // bytes
  bool can_map_host_memory = false;
  bool can_use_registered_host_pointer = false;
  bool pageable_memory_access = false;
  bool integrated = false;
};

struct DriverInfo {
  std::string unavailable;  // why there is no usable driver; empty if there is one
  int version = 0;          // 1000 * major + 10 * minor of the newest CUDA that the driver supports
  std::vector<DeviceInfo> devices;
};

DriverInfo Probe();

}  // namespace dejax::cuda
