#include "handlers.h"

#include <cstring>

#include "current.h"
#include "store.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace dejax::offload {
namespace {

using HandleBuffer = ffi::BufferR1<ffi::DataType::U32>;

// Turns an exception into XLA's error.
template <typename Body>
ffi::Error Run(Body body) {
  try {
    body();
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition, error.what());
  }
  return ffi::Error::Success();
}

DevicePointer Address(const void* data) { return reinterpret_cast<DevicePointer>(data); }

constexpr int kCpu = -1;

ffi::Error DoStoreCpu(ffi::RunId run, int32_t device, ffi::AnyBuffer x, ffi::Result<HandleBuffer> handle,
                      int64_t binding, int64_t site, int64_t, int64_t layout) {
  return Run([&] {
    const auto store = StoreOfRun(run.run_id, kCpu, binding);
    const uint64_t value =
        store->StoreOnCpu({run.run_id, site, {layout, device}}, x.untyped_data(), x.size_bytes());
    std::memcpy(handle->typed_data(), &value, sizeof(value));
  });
}

ffi::Error DoFetchCpu(ffi::RunId run, int32_t device, HandleBuffer handle, ffi::RemainingArgs,
                      ffi::Result<ffi::AnyBuffer> x, int64_t, int64_t site, int64_t layout) {
  return Run([&] {
    uint64_t value = 0;
    std::memcpy(&value, handle.typed_data(), sizeof(value));
    FindStore(StoreOf(value))
        ->FetchOnCpu({run.run_id, site, {layout, device}}, value, x->untyped_data(), x->size_bytes());
  });
}

ffi::Error DoStoreCuda(Stream stream, ffi::RunId run, int32_t device, ffi::AnyBuffer x,
                       ffi::Result<HandleBuffer> handle, int64_t binding, int64_t site, int64_t ring, int64_t layout) {
  return Run([&] {
    StoreOfRun(run.run_id, device, binding)
        ->StoreOnCuda({run.run_id, device, stream, site, layout}, ring, Address(x.untyped_data()), x.size_bytes(),
                      Address(handle->untyped_data()));
  });
}

ffi::Error DoFetchCuda(Stream stream, ffi::RunId run, int32_t device, HandleBuffer handle, ffi::RemainingArgs,
                       ffi::Result<ffi::AnyBuffer> x, int64_t binding, int64_t site, int64_t layout) {
  return Run([&] {
    FetchFromItsStore({run.run_id, device, stream, site, layout}, binding, Address(handle.untyped_data()),
                      Address(x->untyped_data()), x->size_bytes());
  });
}

// The CPU reads each handle before it fetches: there is no prediction to fail.
ffi::Error DoGuardCpu(ffi::AnyBuffer x, ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> out, int64_t) {
  if (out->untyped_data() != x.untyped_data()) std::memcpy(out->untyped_data(), x.untyped_data(), x.size_bytes());
  return ffi::Error::Success();
}

ffi::Error DoGuardCuda(Stream stream, ffi::RunId run, int32_t device, ffi::AnyBuffer x, ffi::RemainingArgs,
                       ffi::Result<ffi::AnyBuffer> out, int64_t binding) {
  return Run([&] {
    if (out->untyped_data() != x.untyped_data()) {
      Check(GetCalls().copy_device_to_device(Address(out->untyped_data()), Address(x.untyped_data()), x.size_bytes(),
                                             stream),
            "cuMemcpyDtoDAsync");
    }
    // A run that has stored nothing reads its handles: none was predicted.
    if (const auto store = StoreOfRunIfAny(run.run_id, device, binding)) {
      store->GuardOnCuda({run.run_id, device, stream, /*call=*/0}, Address(out->untyped_data()), out->size_bytes());
    }
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(GuardCpu, DoGuardCpu,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("store"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(GuardCuda, DoGuardCuda,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<Stream>>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("store"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(StoreCpu, DoStoreCpu,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<HandleBuffer>()
                                  .Attr<int64_t>("store")
                                  .Attr<int64_t>("site")
                                  .Attr<int64_t>("ring")
                                  .Attr<int64_t>("layout"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(FetchCpu, DoFetchCpu,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<HandleBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("store")
                                  .Attr<int64_t>("site")
                                  .Attr<int64_t>("layout"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(StoreCuda, DoStoreCuda,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<Stream>>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<HandleBuffer>()
                                  .Attr<int64_t>("store")
                                  .Attr<int64_t>("site")
                                  .Attr<int64_t>("ring")
                                  .Attr<int64_t>("layout"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(FetchCuda, DoFetchCuda,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<Stream>>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<HandleBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("store")
                                  .Attr<int64_t>("site")
                                  .Attr<int64_t>("layout"));

}  // namespace dejax::offload
