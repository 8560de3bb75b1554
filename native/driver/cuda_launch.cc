#include "driver/cuda_launch.h"

#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace dejax::cuda {
namespace {

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

// While it lives, this thread may load modules although it is capturing a graph.
class RelaxedCapture {
 public:
  RelaxedCapture() { Exchange(); }
  ~RelaxedCapture() { Exchange(); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  void Exchange() { GetDriver(kTables).thread_exchange_capture_mode(&mode_); }

  int mode_ = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED, then the thread's own
};

Function LoadInto(Kernel& kernel, Context context, std::string* why) {
  const auto found = kernel.loaded.find(context);
  if (found != kernel.loaded.end()) return found->second;
  const Driver& driver = GetDriver(kTables);
  const ContextScope scope(context);
  Module module = nullptr;
  Function function = nullptr;
  Device device = 0;
  Result result = driver.ctx_get_device(&device);
  const auto image = kernel.images.find(device);
  if (result == 0 && image == kernel.images.end()) {
    *why = "the kernel " + kernel.name + " was not compiled for this device: trace the function again";
    return nullptr;
  }
  // The image stays in `by_key`; the module stays loaded for the life of the process.
  if (result == 0) result = driver.module_load_data(&module, image->second.data());
  if (result == 0) result = driver.module_get_function(&function, module, kernel.name.c_str());
  if (result != 0) {
    *why = "loading the kernel " + kernel.name + " failed: " + ErrorName(result);
    return nullptr;
  }
  kernel.loaded[context] = function;
  return function;
}

}  // namespace

Context PrimaryContext(int ordinal, std::string* why) {
  const Driver* driver = FindDriver(kTables, why);
  if (driver == nullptr) return nullptr;
  static std::mutex* const mutex = new std::mutex;
  static auto* const contexts = new std::map<int, Context>;
  std::lock_guard<std::mutex> lock(*mutex);
  const auto found = contexts->find(ordinal);
  if (found != contexts->end()) return found->second;
  Device device = 0;
  Context context = nullptr;
  Result result = driver->device_get(&device, ordinal);
  if (result == 0) result = driver->primary_ctx_retain(&context, device);
  if (result != 0) {
    *why = "the context of CUDA device " + std::to_string(ordinal) + " could not be retained: " + ErrorName(result);
    return nullptr;
  }
  return (*contexts)[ordinal] = context;
}

std::vector<Context> ActiveContexts() {
  std::vector<Context> contexts;
  std::string why;
  const Driver* driver = FindDriver(kTables, &why);
  int count = 0;
  if (driver == nullptr || driver->device_get_count(&count) != 0) return contexts;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    Device device = 0;
    unsigned flags = 0;
    int active = 0;
    if (driver->device_get(&device, ordinal) != 0) continue;
    if (driver->primary_ctx_get_state(device, &flags, &active) != 0 || active == 0) continue;
    if (Context context = PrimaryContext(ordinal, &why)) contexts.push_back(context);
  }
  return contexts;
}

std::string EnablePeers(const std::vector<int>& ordinals) {
  constexpr Result kAlreadyEnabled = 704;  // CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
  std::string why;
  const Driver* driver = FindDriver(kTables, &why);
  if (driver == nullptr) return why;
  if (driver->ctx_enable_peer_access == nullptr) return "libcuda.so.1 has no cuCtxEnablePeerAccess";
  for (int reader : ordinals) {
    for (int owner : ordinals) {
      if (reader == owner) continue;
      Context own = PrimaryContext(reader, &why), other = PrimaryContext(owner, &why);
      if (own == nullptr || other == nullptr) return why;
      const ContextScope scope(own);
      const Result result = driver->ctx_enable_peer_access(other, 0);
      if (result != 0 && result != kAlreadyEnabled) {
        return "device " + std::to_string(reader) + " cannot read the memory of device " + std::to_string(owner) + ": " +
               ErrorName(result);
      }
    }
  }
  return "";
}

void SynchronizeAll() {
  for (Context context : ActiveContexts()) {
    const ContextScope scope(context);
    Check(GetDriver(kTables).ctx_synchronize(), "cuCtxSynchronize");
  }
}

std::string AddKernel(int64_t key, std::string image, const std::string& name, const std::vector<int>& ordinals) {
  std::string why;
  const Driver* driver = FindDriver(kTables, &why);
  if (driver == nullptr) return why;
  Kernels& kernels = AllKernels();
  std::lock_guard<std::mutex> lock(kernels.mutex);
  Kernel& kernel = kernels.by_key.try_emplace(key, Kernel{name, {}, {}}).first->second;
  // Loaded now, not by the first call: that one may be captured into a graph, where loading is not allowed.
  for (int ordinal : ordinals) {
    Device device = 0;
    if (Result result = driver->device_get(&device, ordinal)) return ErrorName(result);
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
    if (GetDriver(kCore).device_get(&device, ordinal) != 0 || found->second.images.count(device) == 0) return false;
  }
  return true;
}

namespace {

std::mutex& FinderMutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

BinaryFinder& Finder() {
  static auto* const finder = new BinaryFinder;
  return *finder;
}

}  // namespace

void SetBinaryFinder(BinaryFinder finder) {
  std::lock_guard<std::mutex> lock(FinderMutex());
  Finder() = std::move(finder);
}

KernelBinary FindBinary(int64_t key) {
  BinaryFinder finder;
  {
    std::lock_guard<std::mutex> lock(FinderMutex());
    finder = Finder();
  }
  if (!finder) throw std::runtime_error("it was compiled by another process: trace the function again");
  return finder(key);
}

LoadedKernel LoadKernel(int64_t key, Context context, const std::function<KernelBinary()>& binary,
                        const std::string& name) {
  constexpr int kMaxDynamicSharedBytes = 8;      // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
  constexpr int kLargeClusters = 14;             // CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
  constexpr int64_t kSharedBytesWithoutAsking = 48 * 1024;
  static auto* const mutex = new std::mutex;
  static auto* const loaded = new std::map<std::pair<int64_t, Context>, LoadedKernel>;
  {
    std::lock_guard<std::mutex> lock(*mutex);
    const auto found = loaded->find({key, context});
    if (found != loaded->end()) return found->second;
  }
  const KernelBinary made = binary();  // may wait, and for a thread of Python: not while others wait for the mutex
  std::lock_guard<std::mutex> lock(*mutex);
  LoadedKernel& kernel = (*loaded)[{key, context}];
  if (kernel.function != nullptr) return kernel;
  const Driver& driver = GetDriver(kTables);
  const RelaxedCapture relaxed;
  Module module = nullptr;
  Function found = nullptr;
  Check(driver.module_load_data(&module, made.image.data()), "cuModuleLoadData");
  Check(driver.module_get_function(&found, module, name.c_str()), "cuModuleGetFunction");
  if (made.shared_bytes > kSharedBytesWithoutAsking) {
    Check(driver.func_set_attribute(found, kMaxDynamicSharedBytes, static_cast<int>(made.shared_bytes)),
          "cuFuncSetAttribute");
  }
  driver.func_set_attribute(found, kLargeClusters, 1);  // refused where blocks form no clusters
  return kernel = {found, made.shared_bytes};
}

DevicePointer NextCounter(Context context) {
  constexpr unsigned kCounters = 1024;
  struct CounterRing {
    DevicePointer base = 0;
    unsigned next = 0;
  };
  static auto* const mutex = new std::mutex;
  static auto* const rings = new std::map<Context, CounterRing>;
  std::lock_guard<std::mutex> lock(*mutex);
  CounterRing& ring = (*rings)[context];
  if (ring.base == 0 && GetDriver(kTables).mem_alloc(&ring.base, 8 * kCounters) != 0) return ring.base = 0;
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
