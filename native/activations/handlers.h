// FFI handlers of dejax.offload.
#pragma once

#include "xla/ffi/api/api.h"

namespace dejax::offload {

// Store.
//   arguments:  tensor, of any whole-byte type and at least one element
//   result:     handle uint32[2]
//   attributes: store int64: a binding, see current.h; site int64: which call of the program this is;
//               ring int64: bytes of the device's ring, where the store was given no size
XLA_FFI_DECLARE_HANDLER_SYMBOL(StoreCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(StoreCuda);

// Fetch.
//   arguments:  handle uint32[2]; further arguments only make the fetch wait for them
//   result:     tensor
//   attributes: site as above
XLA_FFI_DECLARE_HANDLER_SYMBOL(FetchCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(FetchCuda);

// Guard: NaN in place of its argument where this run has failed on one device of several (together.h). In place.
//   arguments:  tensor; further arguments only make the guard wait for them
//   result:     the tensor, which aliases the argument
XLA_FFI_DECLARE_HANDLER_SYMBOL(GuardCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GuardCuda);

}  // namespace dejax::offload
