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

// The kernel of `key` in the current context, loaded by its first caller, which may be capturing a graph. `image` gives the
// binary. Throws std::runtime_error.
Function LoadKernel(int64_t key, Context context, const std::function<std::string()>& image, const std::string& name,
                    int64_t shared_bytes);

// Eight bytes of device memory of the current context for a kernel's work counter. They come from a ring of 1,024, so that
// calls on several streams do not share one. 0 if there is no memory.
DevicePointer NextCounter(Context context);

}  // namespace dejax::cuda
