// The calls of the CUDA driver API that describe devices and memory. They are found at run time: building needs no CUDA
// toolkit, and running needs no driver.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

struct CUstream_st;
struct CUctx_st;

namespace dejax::cuda {

using Result = int;  // CUresult; 0 is success
using Device = int;
using Stream = CUstream_st*;
using Context = CUctx_st*;
using DevicePointer = unsigned long long;

// Values of the driver's enumerations, which are part of its binary interface.
enum DeviceAttribute : int {
  kMultiprocessorCount = 16,
  kIntegrated = 18,
  kCanMapHostMemory = 19,
  kL2CacheSize = 38,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
  kPageableMemoryAccess = 88,
  kCanUseHostPointerForRegisteredMemory = 91,
};

struct Api {
  Result (*init)(unsigned flags);
  Result (*driver_get_version)(int* version);
  Result (*device_get_count)(int* count);
  Result (*device_get)(Device* device, int ordinal);
  Result (*device_get_name)(char* name, int length, Device device);
  Result (*device_total_mem)(size_t* bytes, Device device);
  Result (*device_get_attribute)(int* value, int attribute, Device device);
  Result (*stream_get_ctx)(Stream stream, Context* context);
  Result (*ctx_push_current)(Context context);
  Result (*ctx_pop_current)(Context* context);
  Result (*get_error_name)(Result result, const char** name);
};

// The driver's functions after a successful cuInit; null with a reason in `*why` if there is no driver. The first answer
// is kept for the life of the process.
const Api* GetApi(std::string* why);

// Stores the library's function of that name, or says in `*why` that the driver is too old.
template <typename Function>
bool Find(void* library, const char* symbol, Function* function, std::string* why) {
  *function = reinterpret_cast<Function>(dlsym(library, symbol));
  if (*function == nullptr) *why = std::string("libcuda.so.1 has no ") + symbol + "; the driver is too old for dejax";
  return *function != nullptr;
}

// "CUDA_ERROR_...", or the number if the driver does not know it.
std::string ErrorName(const Api& api, Result result);

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
