#include "driver/cuda_driver.h"

#include <memory>
#include <utility>

namespace dejax::cuda {
namespace {

std::pair<std::unique_ptr<Api>, std::string> Load() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* error = dlerror();
    return {nullptr, std::string("no CUDA driver: ") + (error ? error : "libcuda.so.1 could not be opened")};
  }
  auto api = std::make_unique<Api>();
  std::string why;
  const bool complete = Find(library, "cuInit", &api->init, &why) &&
                        Find(library, "cuDriverGetVersion", &api->driver_get_version, &why) &&
                        Find(library, "cuDeviceGetCount", &api->device_get_count, &why) &&
                        Find(library, "cuDeviceGet", &api->device_get, &why) &&
                        Find(library, "cuDeviceGetName", &api->device_get_name, &why) &&
                        Find(library, "cuDeviceTotalMem_v2", &api->device_total_mem, &why) &&
                        Find(library, "cuDeviceGetAttribute", &api->device_get_attribute, &why) &&
                        Find(library, "cuStreamGetCtx", &api->stream_get_ctx, &why) &&
                        Find(library, "cuCtxPushCurrent_v2", &api->ctx_push_current, &why) &&
                        Find(library, "cuCtxPopCurrent_v2", &api->ctx_pop_current, &why) &&
                        Find(library, "cuGetErrorName", &api->get_error_name, &why);
  if (!complete) return {nullptr, why};
  if (const Result result = api->init(0)) return {nullptr, "cuInit failed: " + ErrorName(*api, result)};
  return {std::move(api), ""};
}

}  // namespace

std::string ErrorName(const Api& api, Result result) {
  const char* name = nullptr;
  if (api.get_error_name(result, &name) == 0 && name != nullptr) return name;
  return "CUDA error " + std::to_string(result);
}

const Api* GetApi(std::string* why) {
  // Never destroyed: the driver is never closed.
  static const auto* const loaded = new std::pair<std::unique_ptr<Api>, std::string>(Load());
  if (why != nullptr) *why = loaded->second;
  return loaded->first.get();
}

DriverInfo Probe() {
  DriverInfo info;
  const Api* api = GetApi(&info.unavailable);
  if (api == nullptr) return info;
  int count = 0;
  if (Result result = api->driver_get_version(&info.version)) {
    info.unavailable = "cuDriverGetVersion failed: " + ErrorName(*api, result);
    return info;
  }
  if (Result result = api->device_get_count(&count)) {
    info.unavailable = "cuDeviceGetCount failed: " + ErrorName(*api, result);
    return info;
  }
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    DeviceInfo device_info;
    Device device = 0;
    if (Result result = api->device_get(&device, ordinal)) {
      info.unavailable = "cuDeviceGet failed: " + ErrorName(*api, result);
      return info;
    }
    char name[256] = {};
    if (api->device_get_name(name, sizeof(name) - 1, device) == 0) device_info.name = name;
    api->device_total_mem(&device_info.total_memory, device);
    // An attribute that this driver does not know is 0.
    const auto attribute = [&](int which) {
      int value = 0;
      return api->device_get_attribute(&value, which, device) == 0 ? value : 0;
    };
    device_info.compute_capability_major = attribute(kComputeCapabilityMajor);
    device_info.compute_capability_minor = attribute(kComputeCapabilityMinor);
    device_info.multiprocessors = attribute(kMultiprocessorCount);
    device_info.l2_cache = attribute(kL2CacheSize);
    device_info.can_map_host_memory = attribute(kCanMapHostMemory) != 0;
    device_info.can_use_registered_host_pointer = attribute(kCanUseHostPointerForRegisteredMemory) != 0;
    device_info.pageable_memory_access = attribute(kPageableMemoryAccess) != 0;
    device_info.integrated = attribute(kIntegrated) != 0;
    info.devices.push_back(std::move(device_info));
  }
  return info;
}

}  // namespace dejax::cuda
