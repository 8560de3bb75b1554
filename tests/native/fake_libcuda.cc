// A fake CUDA driver for tests, which dlopen("libcuda.so.1") finds. It has two devices; FAKE_CUDA_INIT is an error code that
// cuInit returns.
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

extern "C" {
int cuInit(unsigned) {
  const char* text = std::getenv("FAKE_CUDA_INIT");
  return text ? std::atoi(text) : 0;
}
int cuDriverGetVersion(int* version) { return *version = 13020, 0; }
int cuDeviceGetCount(int* count) { return *count = 2, 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = 40 + ordinal, 0; }
int cuDeviceGetName(char* name, int length, int device) {
  return std::strncpy(name, device == 40 ? "Fake A" : "Fake B", static_cast<size_t>(length)), 0;
}
int cuDeviceTotalMem_v2(size_t* bytes, int device) { return *bytes = device == 40 ? 1ull << 36 : 1ull << 33, 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {
    case 16: return *value = 132, 0;      // multiprocessors
    case 19: return *value = 1, 0;        // can map host memory
    case 38: return *value = 60 << 20, 0;  // L2
    case 75: return *value = 9, 0;
    case 76: return *value = 0, 0;
    case 91: return *value = 1, 0;
    default: return 1;  // an attribute that this driver does not know
  }
}
#ifndef WITHOUT_STREAM_GET_CTX
int cuStreamGetCtx(void*, void**) { return 1; }
#endif
#ifndef WITH_CONTEXTS
int cuCtxPushCurrent_v2(void*) { return 1; }
int cuCtxPopCurrent_v2(void**) { return 1; }
#else
// Contexts, pinned memory and modules. Each call is printed with the device of the current context. A context is the address
// of its device's entry in `devices`. FAKE_CUDA_FAILS names a call that fails.
static bool active[2] = {};
static char devices[2] = {};
static std::vector<void*> current;
static int Call(const char* name, int device) {
  std::printf("%s %d\n", name, device);
  const char* fails = std::getenv("FAKE_CUDA_FAILS");
  return fails && std::strcmp(fails, name) == 0 ? 999 : 0;
}
static int Current() { return current.empty() ? -1 : static_cast<int>(static_cast<char*>(current.back()) - devices); }
int cuCtxPushCurrent_v2(void* context) { return current.push_back(context), 0; }
int cuCtxPopCurrent_v2(void** context) { return *context = current.back(), current.pop_back(), 0; }
int cuCtxGetCurrent(void** context) { return *context = current.empty() ? nullptr : current.back(), 0; }
int cuCtxGetDevice(int* device) { return *device = 40 + Current(), 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) {
  active[device - 40] = true;
  return *context = &devices[device - 40], Call("retain", device - 40);
}
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* is) { return *flags = 0, *is = active[device - 40], 0; }
int cuCtxSynchronize() { return Call("synchronize", Current()); }
int cuMemHostAlloc(void** out, size_t bytes, unsigned) { return *out = std::malloc(bytes), Call("alloc", Current()); }
int cuMemFreeHost(void* memory) {
  const int result = Call("free", Current());
  if (result == 0) std::free(memory);
  return result;
}
int cuMemHostRegister_v2(void*, size_t, unsigned) { return Call("register", Current()); }
int cuMemHostUnregister(void*) { return Call("unregister", Current()); }
int cuMemHostGetDevicePointer_v2(unsigned long long* out, void* host, unsigned) {
  return *out = reinterpret_cast<unsigned long long>(host), 0;
}
int cuModuleLoadData(void** out, const void* image) {
  return *out = nullptr, Call(static_cast<const char*>(image), Current());
}
int cuModuleGetFunction(void** out, void*, const char*) { return *out = devices, 0; }
#define UNUSED(name) int name() { return 1; }
UNUSED(cuPointerGetAttribute) UNUSED(cuFuncSetAttribute) UNUSED(cuThreadExchangeStreamCaptureMode)
UNUSED(cuLaunchKernel) UNUSED(cuMemsetD8Async) UNUSED(cuStreamCreateWithPriority) UNUSED(cuCtxGetStreamPriorityRange)
UNUSED(cuStreamWaitEvent) UNUSED(cuEventCreate) UNUSED(cuEventRecord) UNUSED(cuEventDestroy_v2)
UNUSED(cuMemcpyDtoDAsync_v2) UNUSED(cuMemAllocAsync) UNUSED(cuMemFreeAsync) UNUSED(cuMemAlloc_v2)
UNUSED(cuDeviceGetDefaultMemPool) UNUSED(cuMemPoolSetAttribute)
#endif
int cuGetErrorName(int result, const char** name) {
  *name = result == 100 ? "CUDA_ERROR_NO_DEVICE" : nullptr;
  return *name ? 0 : 1;
}
}
