// One launch of a gather kernel, for the synchronous handler and for the one with a stream of its own.
#pragma once

#include <cstdint>

#include "driver/cuda_launch.h"
#include "kernel_params.h"
#include "tables/table_gather.h"

namespace dejax {

// Launches on `stream`, whose context is current. `ticket` is eight bytes of device memory that are zero when the kernel
// runs, for kernels that take their work by ticket; null for others.
void LaunchGather(const GatherCall& call, void* out, int64_t out_bytes, void* ticket, cuda::Context context,
                  cuda::Stream stream);

void ZeroTicket(void* ticket, cuda::Stream stream);

// The context of a stream. Throws if the driver lacks a function that launches need.
cuda::Context StreamContext(cuda::Stream stream);

}  // namespace dejax
