#include "driver/cuda_driver.h"

#include <dlfcn.h>

#include <stdexcept>
#include <utility>

namespace dejax::cuda {
namespace {

// Values of the driver's enumeration CUdevice_attribute, which is part of its binary interface.
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

constexpr Part kParts[] = {kCore, kTables, kOffload};

struct Loaded {
  Driver driver;
  std::string why[std::size(kParts)];  // why a part cannot use it; empty: it can

  void Refuse(unsigned parts, const std::string& reason) {
    for (size_t i = 0; i < std::size(kParts); ++i) {
      if ((parts & (kParts[i] | kCore)) != 0 && why[i].empty()) why[i] = reason;
    }
  }
};

Loaded Load() {
  Loaded loaded;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* error = dlerror();
    loaded.Refuse(kCore, std::string("no CUDA driver: ") + (error ? error : "libcuda.so.1 could not be opened"));
    return loaded;
  }
#define DEJAX_FIND(parts, name, symbol, ...)                                                                 \
  loaded.driver.name = reinterpret_cast<decltype(loaded.driver.name)>(dlsym(library, symbol));               \
  if (loaded.driver.name == nullptr) {                                                                       \
    loaded.Refuse(parts, "libcuda.so.1 has no " symbol "; the driver is too old for dejax");                 \
  }
  DEJAX_CUDA_FUNCTIONS(DEJAX_FIND)
#undef DEJAX_FIND
  if (!loaded.why[0].empty()) return loaded;
  if (const Result result = loaded.driver.init(0)) {
    const char* name = nullptr;
    const bool known = loaded.driver.get_error_name(result, &name) == 0 && name != nullptr;
    loaded.Refuse(kCore, "cuInit failed: " + (known ? name : "CUDA error " + std::to_string(result)));
  }
  return loaded;
}

const Loaded& Get() {
  static const Loaded* const loaded = new Loaded(Load());  // never destroyed: the driver is never closed
  return *loaded;
}

}  // namespace

const Driver* FindDriver(Part part, std::string* why) {
  const Loaded& loaded = Get();
  for (size_t i = 0; i < std::size(kParts); ++i) {
    if (kParts[i] != part || loaded.why[i].empty()) continue;
    *why = loaded.why[i];
    return nullptr;
  }
  return &loaded.driver;
}

const Driver& GetDriver(Part part) {
  std::string why;
  if (const Driver* driver = FindDriver(part, &why)) return *driver;
  throw std::runtime_error(part == kOffload ? "no CUDA driver to offload with: " + why : why);
}

std::string ErrorName(Result result) {
  const char* name = nullptr;
  const auto get = Get().driver.get_error_name;
  if (get != nullptr && get(result, &name) == 0 && name != nullptr) return name;
  return "CUDA error " + std::to_string(result);
}

void Check(Result result, const char* call) {
  if (result != 0) throw std::runtime_error(std::string(call) + " failed: " + ErrorName(result));
}

ContextScope::ContextScope(Context context) : active_(context != nullptr) {
  if (active_) Check(GetDriver(kCore).ctx_push(context), "cuCtxPushCurrent");
}

ContextScope::~ContextScope() {
  Context context = nullptr;
  if (active_) Get().driver.ctx_pop(&context);
}

DriverInfo Probe() {
  DriverInfo info;
  const Driver* driver = FindDriver(kCore, &info.unavailable);
  if (driver == nullptr) return info;
  try {
    int count = 0;
    Check(driver->driver_get_version(&info.version), "cuDriverGetVersion");
    Check(driver->device_get_count(&count), "cuDeviceGetCount");
    for (int ordinal = 0; ordinal < count; ++ordinal) {
      DeviceInfo found;
      Device device = 0;
      Check(driver->device_get(&device, ordinal), "cuDeviceGet");
      char name[256] = {};
      if (driver->device_get_name(name, sizeof(name) - 1, device) == 0) found.name = name;
      driver->device_total_mem(&found.total_memory, device);
      // An attribute that this driver does not know is 0.
      const auto attribute = [&](int which) {
        int value = 0;
        return driver->device_get_attribute(&value, which, device) == 0 ? value : 0;
      };
      found.compute_capability_major = attribute(kComputeCapabilityMajor);
      found.compute_capability_minor = attribute(kComputeCapabilityMinor);
      found.multiprocessors = attribute(kMultiprocessorCount);
      found.l2_cache = attribute(kL2CacheSize);
      found.can_map_host_memory = attribute(kCanMapHostMemory) != 0;
      found.can_use_registered_host_pointer = attribute(kCanUseHostPointerForRegisteredMemory) != 0;
      found.pageable_memory_access = attribute(kPageableMemoryAccess) != 0;
      found.integrated = attribute(kIntegrated) != 0;
      info.devices.push_back(std::move(found));
    }
  } catch (const std::runtime_error& error) {
    info.unavailable = error.what();
  }
  return info;
}

}  // namespace dejax::cuda
