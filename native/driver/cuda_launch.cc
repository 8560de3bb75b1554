#include "driver/cuda_launch.h"

#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace dejax::cuda {
namespace {

std::pair<std::unique_ptr<LaunchApi>, std::string> Load() {
  std::string why;
  if (GetApi(&why) == nullptr) return {nullptr, why};
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);  // a second reference to an open library
  auto api = std::make_unique<LaunchApi>();
  const bool complete = Find(library, "cuDevicePrimaryCtxRetain", &api->primary_ctx_retain, &why) &&
                        Find(library, "cuDevicePrimaryCtxGetState", &api->primary_ctx_get_state, &why) &&
                        Find(library, "cuCtxGetCurrent", &api->ctx_get_current, &why) &&
                        Find(library, "cuCtxSynchronize", &api->ctx_synchronize, &why) &&
                        Find(library, "cuMemHostAlloc", &api->mem_host_alloc, &why) &&
                        Find(library, "cuMemFreeHost", &api->mem_free_host, &why) &&
                        Find(library, "cuMemHostRegister_v2", &api->mem_host_register, &why) &&
                        Find(library, "cuMemHostUnregister", &api->mem_host_unregister, &why) &&
                        Find(library, "cuMemHostGetDevicePointer_v2", &api->mem_host_get_device_pointer, &why) &&
                        Find(library, "cuModuleLoadData", &api->module_load_data, &why) &&
                        Find(library, "cuModuleGetFunction", &api->module_get_function, &why) &&
                        Find(library, "cuLaunchKernel", &api->launch_kernel, &why) &&
                        Find(library, "cuMemsetD8Async", &api->memset_d8_async, &why) &&
                        Find(library, "cuStreamCreateWithPriority", &api->stream_create_with_priority, &why) &&
                        Find(library, "cuCtxGetStreamPriorityRange", &api->ctx_get_stream_priority_range, &why) &&
                        Find(library, "cuStreamWaitEvent", &api->stream_wait_event, &why) &&
                        Find(library, "cuEventCreate", &api->event_create, &why) &&
                        Find(library, "cuEventRecord", &api->event_record, &why) &&
                        Find(library, "cuEventDestroy_v2", &api->event_destroy, &why) &&
                        Find(library, "cuMemcpyDtoDAsync_v2", &api->memcpy_dtod_async, &why) &&
                        Find(library, "cuMemAllocAsync", &api->mem_alloc_async, &why) &&
                        Find(library, "cuMemFreeAsync", &api->mem_free_async, &why) &&
                        Find(library, "cuMemAlloc_v2", &api->mem_alloc, &why) &&
                        Find(library, "cuCtxGetDevice", &api->ctx_get_device, &why) &&
                        Find(library, "cuDeviceGetDefaultMemPool", &api->device_get_default_mem_pool, &why) &&
                        Find(library, "cuMemPoolSetAttribute", &api->mem_pool_set_attribute, &why);
  if (!complete) return {nullptr, why};
  return {std::move(api), ""};
}

struct Kernel {
  std::string name;
  std::map<Device, std::string> images;  // by device, since one process may have devices of several kinds
  std::map<Context, Function> loaded;
};

// Never destroyed: handlers may still run while the process exits.
struct Kernels {
  std::mutex mutex;
  std::map<int64_t, Kernel> by_key;
};

Kernels& AllKernels() {
  static Kernels* const kernels = new Kernels;
  return *kernels;
}

Function LoadInto(Kernel& kernel, Context context, std::string* why) {
  const auto found = kernel.loaded.find(context);
  if (found != kernel.loaded.end()) return found->second;
  const Api& api = *GetApi(nullptr);
  const LaunchApi& launch = *GetLaunchApi(nullptr);
  CurrentContext current(context);
  Module module = nullptr;
  Function function = nullptr;
  Device device = 0;
  Result result = launch.ctx_get_device(&device);
  const auto image = kernel.images.find(device);
  if (result == 0 && image == kernel.images.end()) {
    *why = "the kernel " + kernel.name + " was not compiled for this device: trace the function again";
    return nullptr;
  }
  // The image stays in `by_key`; the module stays loaded for the life of the process.
  if (result == 0) result = launch.module_load_data(&module, image->second.data());
  if (result == 0) result = launch.module_get_function(&function, module, kernel.name.c_str());
  if (result != 0) {
    *why = "loading the kernel " + kernel.name + " failed: " + ErrorName(api, result);
    return nullptr;
  }
  kernel.loaded[context] = function;
  return function;
}

}  // namespace

const LaunchApi* GetLaunchApi(std::string* why) {
  static const auto* const loaded = new std::pair<std::unique_ptr<LaunchApi>, std::string>(Load());
  if (why != nullptr) *why = loaded->second;
  return loaded->first.get();
}

Context PrimaryContext(int ordinal, std::string* why) {
  const LaunchApi* launch = GetLaunchApi(why);
  if (launch == nullptr) return nullptr;
  const Api& api = *GetApi(nullptr);
  static std::mutex* const mutex = new std::mutex;
  static auto* const contexts = new std::map<int, Context>;
  std::lock_guard<std::mutex> lock(*mutex);
  const auto found = contexts->find(ordinal);
  if (found != contexts->end()) return found->second;
  Device device = 0;
  Context context = nullptr;
  Result result = api.device_get(&device, ordinal);
  if (result == 0) result = launch->primary_ctx_retain(&context, device);
  if (result != 0) {
    *why = "the context of CUDA device " + std::to_string(ordinal) + " could not be retained: " + ErrorName(api, result);
    return nullptr;
  }
  return (*contexts)[ordinal] = context;
}

CurrentContext::CurrentContext(Context context) { pushed_ = GetApi(nullptr)->ctx_push_current(context) == 0; }

CurrentContext::~CurrentContext() {
  Context context = nullptr;
  if (pushed_) GetApi(nullptr)->ctx_pop_current(&context);
}

std::vector<Context> ActiveContexts() {
  std::vector<Context> contexts;
  std::string why;
  const LaunchApi* launch = GetLaunchApi(&why);
  int count = 0;
  if (launch == nullptr || GetApi(nullptr)->device_get_count(&count) != 0) return contexts;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    Device device = 0;
    unsigned flags = 0;
    int active = 0;
    if (GetApi(nullptr)->device_get(&device, ordinal) != 0) continue;
    if (launch->primary_ctx_get_state(device, &flags, &active) != 0 || active == 0) continue;
    if (Context context = PrimaryContext(ordinal, &why)) contexts.push_back(context);
  }
  return contexts;
}

std::string AddKernel(int64_t key, std::string image, const std::string& name, const std::vector<int>& ordinals) {
  std::string why;
  if (GetLaunchApi(&why) == nullptr) return why;
  Kernels& kernels = AllKernels();
  std::lock_guard<std::mutex> lock(kernels.mutex);
  Kernel& kernel = kernels.by_key.try_emplace(key, Kernel{name, {}, {}}).first->second;
  // Loaded now, not by the first call: that one may be captured into a graph, where loading is not allowed.
  for (int ordinal : ordinals) {
    Device device = 0;
    if (Result result = GetApi(nullptr)->device_get(&device, ordinal)) return ErrorName(*GetApi(nullptr), result);
    kernel.images.try_emplace(device, image);
    Context context = PrimaryContext(ordinal, &why);
    if (context == nullptr || LoadInto(kernel, context, &why) == nullptr) {
      kernel.images.erase(device);
      return why;
    }
  }
  return "";
}

bool HasKernel(int64_t key, const std::vector<int>& ordinals) {
  Kernels& kernels = AllKernels();
  std::lock_guard<std::mutex> lock(kernels.mutex);
  const auto found = kernels.by_key.find(key);
  if (found == kernels.by_key.end()) return false;
  for (int ordinal : ordinals) {
    Device device = 0;
    if (GetApi(nullptr)->device_get(&device, ordinal) != 0 || found->second.images.count(device) == 0) return false;
  }
  return true;
}

DevicePointer NextCounter(Context context) {
  constexpr unsigned kCounters = 1024;
  struct Ring {
    DevicePointer base = 0;
    unsigned next = 0;
  };
  static auto* const mutex = new std::mutex;
  static auto* const rings = new std::map<Context, Ring>;
  std::lock_guard<std::mutex> lock(*mutex);
  Ring& ring = (*rings)[context];
  if (ring.base == 0 && GetLaunchApi(nullptr)->mem_alloc(&ring.base, 8 * kCounters) != 0) return ring.base = 0;
  return ring.base + 8 * (ring.next++ % kCounters);
}

Function FindKernel(int64_t key, Context context, std::string* why) {
  Kernels& kernels = AllKernels();
  std::lock_guard<std::mutex> lock(kernels.mutex);
  const auto found = kernels.by_key.find(key);
  if (found == kernels.by_key.end()) {
    *why = "its kernel is not loaded in this process: trace the function again instead of running an exported program";
    return nullptr;
  }
  return LoadInto(found->second, context, why);
}

}  // namespace dejax::cuda
