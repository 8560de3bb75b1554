// The kind of memory that an operand lies in when it reaches a handler: an FFI buffer does not tell.
#pragma once

#include "xla/ffi/api/api.h"

namespace dejax {

// Values of the result; `dejax._native` has the same table.
enum PointerKind : int { kPageableHost = 0, kDeviceMemory = 1, kPinnedHost = 2, kManaged = 3, kEmpty = 4 };

// FFI handlers: argument, any buffer; result, int32 scalar in the platform's default memory.
XLA_FFI_DECLARE_HANDLER_SYMBOL(PointerKindCpu);   // for platform "cpu"
XLA_FFI_DECLARE_HANDLER_SYMBOL(PointerKindCuda);  // for platform "CUDA"

}  // namespace dejax
