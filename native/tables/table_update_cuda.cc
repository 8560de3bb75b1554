// The CUDA handler of table_update.h. It launches the kernel of dejax/host_gather/kernels/update.cu.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "driver/cuda_launch.h"
#include "kernel_params.h"
#include "tables/table_update.h"

namespace ffi = xla::ffi;

namespace dejax {
namespace {

void Update(const UpdateCall& call, cuda::Stream stream) {
  std::string why;
  const cuda::Driver* driver = cuda::FindDriver(cuda::kTables, &why);
  if (driver == nullptr) throw CallError(ffi::ErrorCode::kUnavailable, why);
  for (int k = 0; k < 3; ++k) {
    // No copy: a table in host memory may be larger than the device.
    if (call.bytes[k] && call.before[k] != call.after[k]) {
      throw CallError(ffi::ErrorCode::kFailedPrecondition,
                      "the table is used after it is written, or was not donated: donate it to the jitted function "
                      "(donate_argnums) and use only the result of scatter or update");
    }
  }
  if (call.is_empty()) return;
  cuda::Context context = nullptr;
  cuda::Check(driver->stream_get_ctx(stream, &context), "cuStreamGetCtx");
  const cuda::ContextScope scope(context);
  cuda::Function kernel = cuda::FindKernel(call.how.kernel, context, &why);
  if (kernel == nullptr) throw std::runtime_error(why);
  // A gather in flight may still read the rows that are written here.
  WaitForStarted(context, stream);
  const cuda::DevicePointer counter = cuda::NextCounter(context);
  if (counter == 0) throw CallError(ffi::ErrorCode::kResourceExhausted, "no device memory for a work counter");
  const int64_t n = call.num_ids(), grid = call.how.grid;
  UpdateParams p = {static_cast<char*>(call.after[0]),
                    static_cast<float*>(call.after[1]),
                    static_cast<float*>(call.after[2]),
                    call.ids.untyped_data(),
                    static_cast<const int*>(call.perm.untyped_data()),
                    static_cast<const char*>(call.values.untyped_data()),
                    static_cast<const float*>(call.hyper.untyped_data()),
                    reinterpret_cast<unsigned long long*>(counter),
                    n,
                    call.rows,
                    static_cast<int>(call.how.row_bytes)};
  cuda::Check(driver->memset_d8(counter, 0, 8, stream), "cuMemsetD8Async");
  const int64_t steps = (n * ((call.how.row_bytes + 15) / 16) + 32 * kUnroll - 1) / (32 * kUnroll);
  const unsigned blocks = static_cast<unsigned>(std::min<int64_t>(grid, steps));
  const unsigned threads = static_cast<unsigned>(std::clamp<int64_t>((steps + grid - 1) / grid * 32, 32, 1024));
  void* arguments[] = {&p};
  cuda::Check(driver->launch_kernel(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, nullptr), "cuLaunchKernel");
}

ffi::Error OnCuda(cuda::Stream stream, ffi::AnyBuffer ids, ffi::AnyBuffer perm, ffi::AnyBuffer values,
                  ffi::AnyBuffer hyper, ffi::RemainingArgs args, ffi::RemainingRets rets, UpdateAttributes how) {
  return ReportedUpdate({ids, perm, values, hyper, how}, args, rets, [&](const UpdateCall& call) {
    if (how.grid < 1) throw CallError(ffi::ErrorCode::kInvalidArgument, "the grid must have blocks");
    Update(call, stream);
  });
}

DEJAX_FFI_HANDLER("dejax_table_update", "CUDA",
                  ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cuda::Stream>>() DEJAX_UPDATE_SIGNATURE.To(OnCuda));

}  // namespace
}  // namespace dejax
