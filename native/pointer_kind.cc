#include "pointer_kind.h"

#include <string>

#include "cuda_driver.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace dejax {
namespace {

ffi::Error OnCpu(ffi::AnyBuffer operand, ffi::Result<ffi::BufferR0<ffi::DataType::S32>> kind) {
  *kind->typed_data() = operand.element_count() == 0 ? kEmpty : kPageableHost;
  return ffi::Error::Success();
}

int Kind(const cuda::Api& api, cuda::DevicePointer pointer) {
  unsigned managed = 0;
  if (api.pointer_get_attribute(&managed, cuda::kIsManaged, pointer) == 0 && managed) return kManaged;
  unsigned type = 0;
  // The driver returns an error for memory that it does not know: ordinary, pageable host memory.
  if (api.pointer_get_attribute(&type, cuda::kMemoryType, pointer) != 0) return kPageableHost;
  return type == cuda::kHost ? kPinnedHost : kDeviceMemory;
}

ffi::Error OnCuda(cuda::Stream stream, ffi::AnyBuffer operand, ffi::Result<ffi::BufferR0<ffi::DataType::S32>> kind) {
  std::string why;
  const cuda::Api* api = cuda::GetApi(&why);
  if (api == nullptr) return ffi::Error(ffi::ErrorCode::kUnavailable, "dejax_pointer_kind: " + why);
  const auto failed = [&](const char* call, cuda::Result result) {
    return ffi::Error(ffi::ErrorCode::kInternal,
                      std::string("dejax_pointer_kind: ") + call + " failed: " + cuda::ErrorName(*api, result));
  };
  const int value = operand.element_count() == 0
                        ? kEmpty
                        : Kind(*api, reinterpret_cast<cuda::DevicePointer>(operand.untyped_data()));
  // XLA guarantees the stream, not that its context is current on this thread.
  cuda::Context context = nullptr;
  if (auto result = api->stream_get_ctx(stream, &context)) return failed("cuStreamGetCtx", result);
  if (auto result = api->ctx_push_current(context)) return failed("cuCtxPushCurrent", result);
  const auto result = api->memset_d32_async(reinterpret_cast<cuda::DevicePointer>(kind->untyped_data()),
                                            static_cast<unsigned>(value), 1, stream);
  api->ctx_pop_current(&context);
  if (result) return failed("cuMemsetD32Async", result);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    PointerKindCpu, OnCpu,
    ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Ret<ffi::BufferR0<ffi::DataType::S32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(PointerKindCuda, OnCuda,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cuda::Stream>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::BufferR0<ffi::DataType::S32>>());

}  // namespace dejax
