// The handlers of dejax.offload's activations.
#include <cstring>

#include "activations/current.h"
#include "activations/store.h"
#include "driver/ffi_handlers.h"
#include "driver/together.h"

namespace ffi = xla::ffi;

namespace dejax::offload {
namespace {

using HandleBuffer = ffi::BufferR1<ffi::DataType::U32>;

template <typename Body>
ffi::Error Run(const Body& body) {
  return Reported("", ffi::ErrorCode::kFailedPrecondition, body);
}

// A call on a shard (layout is not 0) fails together with those of the other devices, see together.h; `fill` then makes
// its result.
template <typename Body, typename Fill>
ffi::Error RunOnShard(const Where& where, int64_t layout, int64_t bytes, const Body& body, const Fill& fill) {
  if (layout == 0) return Run(body);
  return Run([&] {
    BeginTogether(where.run);
    CountTogether(where.run, where.device, bytes);
    if (!HasFailedTogether(where.run)) {
      try {
        body();
        return;
      } catch (const FailsEverywhere&) {
        throw;
      } catch (const std::exception& error) {
        FailTogether(where.run, error.what());
      }
    }
    if (where.on_gpu) GiveUpRun(where.run, where.device);
    fill();
  });
}

DevicePointer Address(const void* data) { return reinterpret_cast<DevicePointer>(data); }

StoreCall CallOf(const Where& where, int64_t site, int64_t layout) {
  return {where.run, where.on_gpu ? where.device : kCpu, site, {layout, where.device}, where.stream};
}

void Fill(const Where& where, void* data, int64_t bytes) {
  if (where.on_gpu) {
    FillWithOnes(Address(data), bytes, where.stream);
  } else {
    std::memset(data, 0xff, bytes);
  }
}

// Stores a tensor, of any whole-byte type and at least one element.
//   store: a binding, see current.h. site: which call of the program this is. ring: bytes of the device's ring, where the
//   store was given no size.
ffi::Error StoreTensor(Where where, ffi::AnyBuffer x, ffi::Result<HandleBuffer> handle, int64_t binding, int64_t site,
                 int64_t ring, int64_t layout) {
  const auto set = [&](uint64_t value) { std::memcpy(handle->typed_data(), &value, sizeof(value)); };
  return RunOnShard(
      where, layout, x.size_bytes(),
      [&] {
        const StoreCall call = CallOf(where, site, layout);
        const auto store = StoreOfRun(call.run, call.device, binding);
        if (where.on_gpu) {
          store->StoreOnCuda(call, ring, Address(x.untyped_data()), x.size_bytes(), Address(handle->untyped_data()));
        } else {
          set(store->StoreOnCpu(call, x.untyped_data(), x.size_bytes()));
        }
      },
      [&] {
        if (!where.on_gpu) return set(0);
        Check(GetDriver().memset_d32(Address(handle->untyped_data()), 0, 2, where.stream), "cuMemsetD32Async");
      });
}

// Fetches the tensor of a handle. Further operands only make the fetch wait for them. On a GPU the launching thread waits
// for the work that it has submitted, which writes the handle.
ffi::Error FetchTensor(Where where, HandleBuffer handle, ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> x, int64_t site,
                 int64_t layout) {
  const auto bytes = static_cast<int64_t>(x->size_bytes());
  return RunOnShard(
      where, layout, -bytes,
      [&] {
        const StoreCall call = CallOf(where, site, layout);
        uint64_t value = 0;
        if (where.on_gpu) {
          value = ReadHandle(Address(handle.untyped_data()), where.stream);
          FindStore(StoreOf(value))->FetchOnCuda(call, value, Address(x->untyped_data()), bytes);
        } else {
          std::memcpy(&value, handle.typed_data(), sizeof(value));
          FindStore(StoreOf(value))->FetchOnCpu(call, value, x->untyped_data(), bytes);
        }
      },
      [&] { Fill(where, x->untyped_data(), bytes); });
}

// NaN in place of its operand where this run has failed on one device of several (together.h). The result aliases the
// operand. Further operands only make the guard wait for them.
ffi::Error GuardTensor(Where where, ffi::AnyBuffer x, ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> out) {
  return Run([&] {
    void* const to = out->untyped_data();
    if (HasFailedTogether(where.run)) {
      Fill(where, to, out->size_bytes());
    } else if (to == x.untyped_data()) {
      return;
    } else if (where.on_gpu) {
      Check(GetDriver().copy_device_to_device(Address(to), Address(x.untyped_data()), x.size_bytes(), where.stream),
            "cuMemcpyDtoDAsync");
    } else {
      std::memcpy(to, x.untyped_data(), x.size_bytes());
    }
  });
}

DEJAX_FFI_HANDLERS("dejax_offload_store", StoreTensor,
                   .Arg<ffi::AnyBuffer>()
                       .Ret<HandleBuffer>()
                       .Attr<int64_t>("store")
                       .Attr<int64_t>("site")
                       .Attr<int64_t>("ring")
                       .Attr<int64_t>("layout"));
DEJAX_FFI_HANDLERS("dejax_offload_fetch", FetchTensor,
                   .Arg<HandleBuffer>()
                       .RemainingArgs()
                       .Ret<ffi::AnyBuffer>()
                       .Attr<int64_t>("site")
                       .Attr<int64_t>("layout"));
DEJAX_FFI_HANDLERS("dejax_offload_guard", GuardTensor, .Arg<ffi::AnyBuffer>().RemainingArgs().Ret<ffi::AnyBuffer>());

}  // namespace
}  // namespace dejax::offload
