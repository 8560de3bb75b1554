// How functions of dejax become handlers of XLA's FFI: where a call runs, how it fails, and the list of all handlers, which
// dejax/_native.py registers.
#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "driver/cuda_driver.h"
#include "xla/ffi/api/ffi.h"

namespace dejax {

// Which execution of a program makes a call, and on which device of its platform.
struct Where {
  int64_t run = 0;
  int32_t device = 0;
  bool on_gpu = false;
  cuda::Stream stream = nullptr;  // on a GPU: the compute stream
};
template <bool gpu>
struct WhereOn {};  // to bind it

// What XLA reports with this code.
struct CallError : std::runtime_error {
  CallError(xla::ffi::ErrorCode code, const std::string& what) : std::runtime_error(what), code(code) {}
  xla::ffi::ErrorCode code;
};

// Turns an exception of `body` into XLA's error, of this code where the exception has none. `caller` begins its message.
template <typename Body>
xla::ffi::Error Reported(const std::string& caller, xla::ffi::ErrorCode code, const Body& body) {
  try {
    body();
  } catch (const CallError& error) {
    return xla::ffi::Error(error.code, caller + error.what());
  } catch (const std::exception& error) {
    return xla::ffi::Error(code, caller + error.what());
  }
  return xla::ffi::Error::Success();
}

struct Handler {
  const char* name;
  const char* platform;
  XLA_FFI_Handler* call;
};

inline std::vector<Handler>& Handlers() {
  static auto* const all = new std::vector<Handler>;
  return *all;
}

#define DEJAX_JOIN_(a, b) a##b
#define DEJAX_JOIN(a, b) DEJAX_JOIN_(a, b)

// Adds a handler of a platform to the list. The rest is an expression `Ffi::Bind()....To(function)`.
#define DEJAX_FFI_HANDLER(name, platform, ...)                                            \
  [[maybe_unused]] static const bool DEJAX_JOIN(added_handler_, __COUNTER__) = [] {       \
    dejax::Handlers().push_back({name, platform, +[](XLA_FFI_CallFrame* frame) {          \
                                   static auto* const handler = (__VA_ARGS__).release();  \
                                   return handler->Call(frame);                           \
                                 }});                                                     \
    return true;                                                                          \
  }()

// Adds handlers of both platforms. `function` gets a `Where`, then what the rest binds: `.Arg<...>().Ret<...>()`.
#define DEJAX_FFI_HANDLERS(name, function, ...)                                                             \
  DEJAX_FFI_HANDLER(name, "cpu", xla::ffi::Ffi::Bind().Ctx<dejax::WhereOn<false>>() __VA_ARGS__.To(function)); \
  DEJAX_FFI_HANDLER(name, "CUDA", xla::ffi::Ffi::Bind().Ctx<dejax::WhereOn<true>>() __VA_ARGS__.To(function))

}  // namespace dejax

namespace xla::ffi {

template <bool gpu>
struct CtxDecoding<dejax::WhereOn<gpu>> {
  using Type = dejax::Where;

  template <typename Context>  // jaxlib 0.10 and 0.12 have two names for it
  static std::optional<Type> Decode(const XLA_FFI_Api* api, Context* context, DiagnosticEngine& diagnostic) {
    const auto run = CtxDecoding<RunId>::Decode(api, context, diagnostic);
    const auto device = CtxDecoding<DeviceOrdinal>::Decode(api, context, diagnostic);
    if (!run || !device) return std::nullopt;
    Type where{run->run_id, *device, gpu};
    if constexpr (gpu) {
      const auto stream = CtxDecoding<PlatformStream<dejax::cuda::Stream>>::Decode(api, context, diagnostic);
      if (!stream) return std::nullopt;
      where.stream = *stream;
    }
    return where;
  }
};

}  // namespace xla::ffi
