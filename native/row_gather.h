// out[..., :] = table[ids[...], :] on the CPU, for any element type and row width.
#pragma once

#include "xla/ffi/api/api.h"

namespace dejax {

// FFI handler for platform "cpu".
//   arguments:  table [batch..., rows, row...] of any whole-byte type; ids [batch..., index...] int32 or int64.
//               Each batch dimension has the size of the result's, or 1 for broadcasting.
//   result:     [batch..., index..., row...] of the table's type
//   attributes: ids_rank int64: the number of index dimensions; clip bool: an id out of range (negative ones
//               included) means the nearest row, otherwise a row of `fill`; fill uint8[itemsize]: one element.
XLA_FFI_DECLARE_HANDLER_SYMBOL(RowGather);

}  // namespace dejax
