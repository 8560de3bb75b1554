// The calls of the CUDA driver API that use devices: contexts, memory, streams, and kernels that Python has compiled with
// NVRTC. They are separate from cuda_driver.h, since probing a driver needs none of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "driver/cuda_driver.h"

struct CUfunc_st;
struct CUmod_st;
struct CUevent_st;
struct CUmemPoolHandle_st;

namespace dejax::cuda {

using Function = CUfunc_st*;
using Module = CUmod_st*;
using Event = CUevent_st*;
using MemoryPool = CUmemPoolHandle_st*;

struct LaunchApi {
  Result (*primary_ctx_retain)(Context* context, Device device);
  Result (*primary_ctx_get_state)(Device device, unsigned* flags, int* active);
  Result (*ctx_get_current)(Context* context);
  Result (*ctx_synchronize)();
  Result (*mem_host_alloc)(void** pointer, size_t bytes, unsigned flags);
  Result (*mem_free_host)(void* pointer);
  Result (*mem_host_register)(void* pointer, size_t bytes, unsigned flags);
  Result (*mem_host_unregister)(void* pointer);
  Result (*mem_host_get_device_pointer)(DevicePointer* device, void* host, unsigned flags);
  Result (*module_load_data)(Module* module, const void* image);
  Result (*module_get_function)(Function* function, Module module, const char* name);
  Result (*launch_kernel)(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                          unsigned block_y, unsigned block_z, unsigned shared_bytes, Stream stream, void** parameters,
                          void** extra);
  Result (*memset_d8_async)(DevicePointer pointer, unsigned char value, size_t count, Stream stream);
  Result (*stream_create_with_priority)(Stream* stream, unsigned flags, int priority);
  Result (*ctx_get_stream_priority_range)(int* least, int* greatest);
  Result (*stream_wait_event)(Stream stream, Event event, unsigned flags);
  Result (*event_create)(Event* event, unsigned flags);
  Result (*event_record)(Event event, Stream stream);
  Result (*event_destroy)(Event event);
  Result (*memcpy_dtod_async)(DevicePointer to, DevicePointer from, size_t bytes, Stream stream);
  Result (*mem_alloc_async)(DevicePointer* pointer, size_t bytes, Stream stream);
  Result (*mem_free_async)(DevicePointer pointer, Stream stream);
  Result (*mem_alloc)(DevicePointer* pointer, size_t bytes);
  Result (*ctx_get_device)(Device* device);
  Result (*device_get_default_mem_pool)(MemoryPool* pool, Device device);
  Result (*mem_pool_set_attribute)(MemoryPool pool, int attribute, void* value);
};

// The functions above; null with a reason if the driver is missing or lacks one of them.
const LaunchApi* GetLaunchApi(std::string* why);

// The context that jax uses on a device, kept for the life of the process; null with a reason. Only for devices that jax
// uses: a new context takes some hundred MiB of device memory.
Context PrimaryContext(int ordinal, std::string* why);

// The contexts of all devices that this process, including its other libraries, already uses.
std::vector<Context> ActiveContexts();

// Makes a context current on this thread during its lifetime.
class CurrentContext {
 public:
  explicit CurrentContext(Context context);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;
  bool ok() const { return pushed_; }

 private:
  bool pushed_ = false;
};

// Loads a kernel that was compiled for these devices, and keeps it under `key`. Returns an empty string or the error.
std::string AddKernel(int64_t key, std::string image, const std::string& name, const std::vector<int>& ordinals);
bool HasKernel(int64_t key, const std::vector<int>& ordinals);

// The kernel of `key` in a context; null with a reason.
Function FindKernel(int64_t key, Context context, std::string* why);

// Eight bytes of device memory of the current context for a kernel's work counter. They come from a ring of 1,024, so that
// calls on several streams do not share one. 0 if there is no memory.
DevicePointer NextCounter(Context context);

}  // namespace dejax::cuda
