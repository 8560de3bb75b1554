#include "activations/handlers.h"

#include <cstring>

#include "activations/current.h"
#include "activations/store.h"
#include "driver/together.h"
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

// The same for a call on a shard, which fails together with those of the other devices: see together.h.
template <typename Body, typename Fill>
ffi::Error RunOnShard(int64_t run, int device, int64_t layout, int64_t bytes, Body body, Fill fill) {
  if (layout == 0) return Run(body);
  return Run([&] {
    BeginTogether(run);
    CountTogether(run, device, bytes);
    if (!HasFailedTogether(run)) {
      try {
        body();
        return;
      } catch (const FailsEverywhere&) {
        throw;
      } catch (const std::exception& error) {
        FailTogether(run, error.what());
      }
    }
    fill();
  });
}

DevicePointer Address(const void* data) { return reinterpret_cast<DevicePointer>(data); }

constexpr int kCpu = -1;

ffi::Error DoStoreCpu(ffi::RunId run, int32_t device, ffi::AnyBuffer x, ffi::Result<HandleBuffer> handle,
                      int64_t binding, int64_t site, int64_t, int64_t layout) {
  const auto set = [&](uint64_t value) { std::memcpy(handle->typed_data(), &value, sizeof(value)); };
  return RunOnShard(
      run.run_id, device, layout, x.size_bytes(),
      [&] {
        const auto store = StoreOfRun(run.run_id, kCpu, binding);
        set(store->StoreOnCpu({run.run_id, site, {layout, device}}, x.untyped_data(), x.size_bytes()));
      },
      [&] { set(0); });
}

ffi::Error DoFetchCpu(ffi::RunId run, int32_t device, HandleBuffer handle, ffi::RemainingArgs,
                      ffi::Result<ffi::AnyBuffer> x, int64_t site, int64_t layout) {
  return RunOnShard(
      run.run_id, device, layout, -static_cast<int64_t>(x->size_bytes()),
      [&] {
        uint64_t value = 0;
        std::memcpy(&value, handle.typed_data(), sizeof(value));
        FindStore(StoreOf(value))
            ->FetchOnCpu({run.run_id, site, {layout, device}}, value, x->untyped_data(), x->size_bytes());
      },
      [&] { std::memset(x->untyped_data(), 0xff, x->size_bytes()); });
}

ffi::Error DoStoreCuda(Stream stream, ffi::RunId run, int32_t device, ffi::AnyBuffer x,
                       ffi::Result<HandleBuffer> handle, int64_t binding, int64_t site, int64_t ring, int64_t layout) {
  return RunOnShard(
      run.run_id, device, layout, x.size_bytes(),
      [&] {
        StoreOfRun(run.run_id, device, binding)
            ->StoreOnCuda({run.run_id, device, stream, site, layout}, ring, Address(x.untyped_data()), x.size_bytes(),
                          Address(handle->untyped_data()));
      },
      [&] {
        GiveUpRun(run.run_id, device);
        Check(GetCalls().memset_d32(Address(handle->untyped_data()), 0, 2, stream), "cuMemsetD32Async");
      });
}

// The launching thread waits here for the work that it has submitted, which writes the handle.
ffi::Error DoFetchCuda(Stream stream, ffi::RunId run, int32_t device, HandleBuffer handle, ffi::RemainingArgs,
                       ffi::Result<ffi::AnyBuffer> x, int64_t site, int64_t layout) {
  return RunOnShard(
      run.run_id, device, layout, -static_cast<int64_t>(x->size_bytes()),
      [&] {
        const uint64_t value = ReadHandle(Address(handle.untyped_data()), stream);
        FindStore(StoreOf(value))
            ->FetchOnCuda({run.run_id, device, stream, site, layout}, value, Address(x->untyped_data()),
                          x->size_bytes());
      },
      [&] {
        GiveUpRun(run.run_id, device);
        FillWithOnes(Address(x->untyped_data()), x->size_bytes(), stream);
      });
}

ffi::Error DoGuardCpu(ffi::RunId run, ffi::AnyBuffer x, ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> out) {
  if (HasFailedTogether(run.run_id)) {
    std::memset(out->untyped_data(), 0xff, out->size_bytes());
  } else if (out->untyped_data() != x.untyped_data()) {
    std::memcpy(out->untyped_data(), x.untyped_data(), x.size_bytes());
  }
  return ffi::Error::Success();
}

ffi::Error DoGuardCuda(Stream stream, ffi::RunId run, ffi::AnyBuffer x, ffi::RemainingArgs,
                       ffi::Result<ffi::AnyBuffer> out) {
  return Run([&] {
    if (HasFailedTogether(run.run_id)) {
      FillWithOnes(Address(out->untyped_data()), out->size_bytes(), stream);
    } else if (out->untyped_data() != x.untyped_data()) {
      Check(GetCalls().copy_device_to_device(Address(out->untyped_data()), Address(x.untyped_data()), x.size_bytes(),
                                             stream),
            "cuMemcpyDtoDAsync");
    }
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(GuardCpu, DoGuardCpu,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::RunId>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(GuardCuda, DoGuardCuda,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<Stream>>()
                                  .Ctx<ffi::RunId>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>());

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
                                  .Attr<int64_t>("site")
                                  .Attr<int64_t>("layout"));

}  // namespace dejax::offload
