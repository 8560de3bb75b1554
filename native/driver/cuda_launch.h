// Kernels that Python has compiled, and the contexts of devices.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "driver/cuda_driver.h"

namespace dejax::cuda {

// The context that jax uses on a device, kept for the life of the process; null with a reason. Only for devices that jax
// uses: a new context takes some hundred MiB of device memory.
Context PrimaryContext(int ordinal, std::string* why);

// The contexts of all devices that this process, including its other libraries, already uses.
std::vector<Context> ActiveContexts();

// Lets kernels of each of these devices read the memory of the others. Returns an empty string or the error.
std::string EnablePeers(const std::vector<int>& ordinals);

// Waits until all devices that this process uses are idle.
void SynchronizeAll();

// Loads a kernel that was compiled for these devices, and keeps it under `key`. Returns an empty string or the error.
std::string AddKernel(int64_t key, std::string image, const std::string& name, const std::vector<int>& ordinals);
bool HasKernel(int64_t key, const std::vector<int>& ordinals);

// The kernel of `key` in a context; null with a reason.
Function FindKernel(int64_t key, Context context, std::string* why);

// What the driver loads, and the dynamic shared memory of each program.
struct KernelBinary {
  std::string image;
  int64_t shared_bytes = 0;
};

// Gives the binary of a key, for which it may wait; throws where there is none. Python sets it (dejax/pallas/lowering).
using BinaryFinder = std::function<KernelBinary(int64_t key)>;
void SetBinaryFinder(BinaryFinder finder);

// The binary of a key from the finder. Throws std::runtime_error.
KernelBinary FindBinary(int64_t key);

struct LoadedKernel {
  Function function = nullptr;
  int64_t shared_bytes = 0;
};

// The kernel of `key` in the current context, loaded by its first caller, which may be capturing a graph. `binary` gives what
// is loaded. Throws std::runtime_error.
LoadedKernel LoadKernel(int64_t key, Context context, const std::function<KernelBinary()>& binary,
                        const std::string& name);

// Eight bytes of device memory of the current context for a kernel's work counter. They come from a ring of 1,024, so that
// calls on several streams do not share one. 0 if there is no memory.
DevicePointer NextCounter(Context context);

}  // namespace dejax::cuda
