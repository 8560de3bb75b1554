// out[..., :] = table[ids[...], :] on the CPU, for any element type and row width.
#pragma once

#include "xla/ffi/api/api.h"

namespace dejax {

// FFI handler for platform "cpu".
//   arguments:  table [batch..., rows, row...] of any whole-byte type; ids [batch..., index...] int32 or int64.
//               Each leading batch dimension is that of the result, or 1 (then it is the same for all).
//   result:     [batch..., index..., row...] of the table's type
//   attributes: ids_rank int64: the number of index dimensions; clip bool: an id out of range (negative ones
//               included) means the nearest row rather than a row of `fill`; fill uint8[itemsize]: one element.
XLA_FFI_DECLARE_HANDLER_SYMBOL(RowGather);

}  // namespace dejax
