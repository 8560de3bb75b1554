// Launches the kernels of dejax's own lowering (dejax/pallas/lowering). A call has its kernel's binary with it, or the key by
// which this process finds it: that one may still be compiled while XLA compiles the program.
#include <string>
#include <string_view>
#include <vector>

#include "driver/cuda_launch.h"
#include "driver/ffi_handlers.h"

namespace dejax {
namespace {

namespace ffi = xla::ffi;

std::string FromBase64(std::string_view text) {
  std::string bytes;
  bytes.reserve(text.size() / 4 * 3);
  unsigned bits = 0;
  int count = 0;
  for (const char c : text) {
    if (c == '=') break;
    const int value = c >= 'a' ? c - 'a' + 26 : c >= 'A' ? c - 'A' : c >= '0' ? c - '0' + 52 : c == '+' ? 62 : 63;
    bits = bits << 6 | static_cast<unsigned>(value);
    count += 6;
    if (count >= 8) {
      count -= 8;
      bytes.push_back(static_cast<char>(bits >> count & 0xff));
    }
  }
  return bytes;
}

cuda::Context CurrentContext(cuda::Stream stream) {
  const cuda::Driver& driver = cuda::GetDriver(cuda::kTables);
  // A stream that is being captured into a graph has no context to ask for. XLA makes the context current before.
  cuda::Context context = nullptr;
  if (driver.ctx_get_current(&context) != 0 || context == nullptr) {
    cuda::Check(driver.stream_get_ctx(stream, &context), "cuStreamGetCtx");
  }
  return context;
}

struct KernelCall {
  int64_t key;              // of the binary
  std::string_view image;   // the binary in base64; empty where the process finds it by its key
  std::string_view name;    // of the function in it
  int64_t programs, threads, shared_bytes;
};

ffi::Error OnCuda(cuda::Stream stream, ffi::RemainingArgs operands, ffi::RemainingRets results, KernelCall call) {
  const std::string name(call.name);
  return Reported("the kernel " + name + ": ", ffi::ErrorCode::kInternal, [&] {
    if (call.programs == 0) return;
    std::vector<void*> pointers;
    for (size_t i = 0; i < operands.size(); ++i) pointers.push_back(operands.get<ffi::AnyBuffer>(i)->untyped_data());
    for (size_t i = 0; i < results.size(); ++i) pointers.push_back((*results.get<ffi::AnyBuffer>(i))->untyped_data());
    // Triton's own parameters come last: memory for all programs, and for its profiler. No kernel of dejax has either.
    pointers.resize(pointers.size() + 2, nullptr);
    std::vector<void*> parameters;
    for (void*& pointer : pointers) parameters.push_back(&pointer);
    const cuda::Context context = CurrentContext(stream);
    const cuda::ContextScope scope(context);
    const auto binary = [&]() -> cuda::KernelBinary {
      if (call.image.empty()) return cuda::FindBinary(call.key);
      return {FromBase64(call.image), call.shared_bytes};
    };
    const cuda::LoadedKernel kernel = cuda::LoadKernel(call.key, context, binary, name);
    cuda::Check(cuda::GetDriver(cuda::kTables)
                    .launch_kernel(kernel.function, static_cast<unsigned>(call.programs), 1, 1,
                                   static_cast<unsigned>(call.threads), 1, 1, static_cast<unsigned>(kernel.shared_bytes),
                                   stream, parameters.data(), nullptr),
                "cuLaunchKernel");
  });
}

}  // namespace
}  // namespace dejax

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(dejax::KernelCall, xla::ffi::StructMember<int64_t>("key"),
                                      xla::ffi::StructMember<std::string_view>("image"),
                                      xla::ffi::StructMember<std::string_view>("name"),
                                      xla::ffi::StructMember<int64_t>("programs"),
                                      xla::ffi::StructMember<int64_t>("threads"),
                                      xla::ffi::StructMember<int64_t>("shared_bytes"));

namespace dejax {

DEJAX_FFI_HANDLER("dejax_kernel", "CUDA",
                  ffi::Ffi::Bind()
                      .Ctx<ffi::PlatformStream<cuda::Stream>>()
                      .RemainingArgs()
                      .RemainingRets()
                      .Attrs<KernelCall>()
                      .To(OnCuda, {ffi::Traits::kCmdBufferCompatible}));

}  // namespace dejax
