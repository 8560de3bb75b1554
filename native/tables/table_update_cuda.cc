// The CUDA handler of table_update.h. It launches the kernel of dejax/host_gather/kernels/update.cu.
#include <algorithm>
#include <string>

#include "driver/cuda_launch.h"
#include "kernel_params.h"
#include "tables/table_gather.h"
#include "tables/table_update.h"

namespace ffi = xla::ffi;

namespace dejax {
namespace {

ffi::Error Failed(ffi::ErrorCode code, const std::string& what) {
  return ffi::Error(code, "dejax.host_gather: " + what);
}

ffi::Error OnCuda(cuda::Stream stream, ffi::AnyBuffer ids, ffi::AnyBuffer perm, ffi::AnyBuffer values,
                  ffi::AnyBuffer hyper, ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t op,
                  int64_t table_type, int64_t values_type, int64_t row_bytes, int64_t kernel_key, int64_t grid) {
  std::string why;
  const cuda::LaunchApi* launch = cuda::GetLaunchApi(&why);
  if (launch == nullptr) return Failed(ffi::ErrorCode::kUnavailable, why);
  const cuda::Api& api = *cuda::GetApi(nullptr);
  UpdateTables tables;
  const int64_t n = static_cast<int64_t>(ids.element_count());
  if (!tables.Read(args, rets, op, row_bytes, table_type) ||
      !ValuesFit(values, n, op, row_bytes, table_type, values_type) ||
      static_cast<int64_t>(perm.element_count()) != n || hyper.element_count() < 7 || grid < 1) {
    return Failed(ffi::ErrorCode::kInvalidArgument, "table, ids, values and state do not fit together");
  }
  for (int k = 0; k < 3; ++k) {
    // No copy: a table in host memory may be larger than the device.
    if (tables.bytes[k] && tables.before[k] != tables.after[k]) {
      return Failed(ffi::ErrorCode::kFailedPrecondition,
                    "the table is used after it is written, or was not donated: donate it to the jitted function "
                    "(donate_argnums) and use only the result of scatter or update");
    }
  }
  if (n == 0 || row_bytes == 0) return ffi::Error::Success();
  cuda::Context context = nullptr;
  if (auto result = api.stream_get_ctx(stream, &context)) {
    return Failed(ffi::ErrorCode::kInternal, "cuStreamGetCtx failed: " + cuda::ErrorName(api, result));
  }
  cuda::CurrentContext current(context);
  cuda::Function kernel = cuda::FindKernel(kernel_key, context, &why);
  if (kernel == nullptr) return Failed(ffi::ErrorCode::kInternal, why);
  // A gather in flight may still read the rows that are written here.
  if (auto result = WaitForStarted(context, stream)) {
    return Failed(ffi::ErrorCode::kInternal, "cuStreamWaitEvent failed: " + cuda::ErrorName(api, result));
  }
  const cuda::DevicePointer counter = cuda::NextCounter(context);
  if (counter == 0) return Failed(ffi::ErrorCode::kResourceExhausted, "no device memory for a work counter");
  UpdateParams p = {static_cast<char*>(tables.after[0]),
                    static_cast<float*>(tables.after[1]),
                    static_cast<float*>(tables.after[2]),
                    ids.untyped_data(),
                    static_cast<const int*>(perm.untyped_data()),
                    static_cast<const char*>(values.untyped_data()),
                    static_cast<const float*>(hyper.untyped_data()),
                    reinterpret_cast<unsigned long long*>(counter),
                    n,
                    tables.rows,
                    static_cast<int>(row_bytes)};
  if (auto result = launch->memset_d8_async(counter, 0, 8, stream)) {
    return Failed(ffi::ErrorCode::kInternal, "cuMemsetD8Async failed: " + cuda::ErrorName(api, result));
  }
  const int64_t steps = (n * ((row_bytes + 15) / 16) + 32 * kUnroll - 1) / (32 * kUnroll);
  const unsigned blocks = static_cast<unsigned>(std::min<int64_t>(grid, steps));
  const unsigned threads = static_cast<unsigned>(std::clamp<int64_t>((steps + grid - 1) / grid * 32, 32, 1024));
  void* arguments[] = {&p};
  if (auto result = launch->launch_kernel(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, nullptr)) {
    return Failed(ffi::ErrorCode::kInternal, "cuLaunchKernel failed: " + cuda::ErrorName(api, result));
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TableUpdateCuda, OnCuda,
                              ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cuda::Stream>>() DEJAX_UPDATE_SIGNATURE);

}  // namespace dejax
