// A driver for tests on machines without one: two devices, or, with FAKE_CUDA_INIT set, a cuInit that fails with it.
// It writes the calls it gets to no one; it exists to be found by dlopen("libcuda.so.1").
#include <cstddef>
#include <cstdlib>
#include <cstring>

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
int cuPointerGetAttribute(void*, int, unsigned long long) { return 1; }
int cuStreamGetCtx(void*, void**) { return 1; }
int cuCtxPushCurrent_v2(void*) { return 1; }
int cuCtxPopCurrent_v2(void**) { return 1; }
#ifndef WITHOUT_MEMSET
int cuMemsetD32Async(unsigned long long, unsigned, size_t, void*) { return 1; }
#endif
int cuGetErrorName(int result, const char** name) {
  *name = result == 100 ? "CUDA_ERROR_NO_DEVICE" : nullptr;
  return *name ? 0 : 1;
}
}
