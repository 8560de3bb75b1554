// One launch of a gather kernel, for the synchronous handler and for the one with a stream of its own.
#pragma once

#include <cstdint>
#include <string>

#include "driver/cuda_launch.h"
#include "kernel_params.h"
#include "tables/table_gather.h"
#include "xla/ffi/api/ffi.h"

namespace dejax {

// Operands and attributes of table_gather.h.
struct GatherCall {
  xla::ffi::AnyBuffer table, ids, perm, slots, cache;
  xla::ffi::Buffer<xla::ffi::F32> scale;
  int64_t source, result, row_bytes, fan_out;
  bool mean, clip, raises, split;
  float fill_value;
  xla::ffi::Span<const uint8_t> fill;
  int64_t kernel, grid, align;

  int64_t rows() const {
    return split ? static_cast<int64_t>(slots.element_count()) : static_cast<int64_t>(table.dimensions()[0]);
  }
};

inline xla::ffi::Error GatherError(xla::ffi::ErrorCode code, const std::string& what) {
  return xla::ffi::Error(code, "dejax.host_gather.gather: " + what);
}

// Launches on `stream`, whose context is current. `ticket` is eight bytes of device memory that are zero when the kernel
// runs, for kernels that take their work by ticket; null for others.
xla::ffi::Error LaunchGather(const GatherCall& call, void* out, int64_t out_bytes, void* ticket, cuda::Context context,
                             cuda::Stream stream);

xla::ffi::Error ZeroTicket(void* ticket, cuda::Stream stream);

// The context of a stream. Fails if the driver lacks a function that launches need.
xla::ffi::Error StreamContext(cuda::Stream stream, cuda::Context* context);

}  // namespace dejax
