// FFI handlers of dejax.offload.
#pragma once

#include "xla/ffi/api/api.h"

namespace dejax::offload {

// Store.
//   arguments:  tensor, of any whole-byte type and at least one element
//   result:     handle uint32[2]
//   attributes: store int64: a binding, see current.h; site int64: which call of the program this is;
//               ring int64: bytes that the device's ring should have, where the store was given no size
XLA_FFI_DECLARE_HANDLER_SYMBOL(StoreCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(StoreCuda);

// Fetch.
//   arguments:  handle uint32[2]; anything: only there so that the fetch comes after it
//   result:     tensor
//   attributes: store, site as above
XLA_FFI_DECLARE_HANDLER_SYMBOL(FetchCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(FetchCuda);

// Guard: NaN instead of its argument where this run's fetches were foreseen wrongly. In place.
//   arguments:  tensor; anything: only there so that it comes after it
//   result:     the tensor, which aliases the argument
//   attributes: store as above
XLA_FFI_DECLARE_HANDLER_SYMBOL(GuardCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GuardCuda);

}  // namespace dejax::offload
