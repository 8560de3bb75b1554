// Rows of a table in host memory, set or changed in place: scatter, scatter_add and the row-sparse optimizers.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace dejax {

// FFI handlers.
//   arguments:  table [rows, width]; first, second: float32 state of the table's shape, or [0]; ids [n] int32 or int64,
//               ascending; perm [n] int32, the row of `values` of each; values [n, width']; hyper float32[7], see update.cu.
//   results:    table, first, second: the arguments, aliased; scratch uint32[2], for the CUDA handler.
//   attributes: op int64: 0 set, 1 add, 2 SGD, 3 Adagrad, 4 Adam; table_type, values_type int64: element types, -1 to move
//               bytes (set); row_bytes int64; kernel, grid int64: of the CUDA kernel.
// An id out of range changes nothing.
XLA_FFI_DECLARE_HANDLER_SYMBOL(TableUpdateCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TableUpdateCuda);

}  // namespace dejax

// What both handlers bind, after the context.
#define DEJAX_UPDATE_SIGNATURE       \
  .Arg<xla::ffi::AnyBuffer>()        \
  .Arg<xla::ffi::AnyBuffer>()        \
  .Arg<xla::ffi::AnyBuffer>()        \
  .Arg<xla::ffi::AnyBuffer>()        \
  .Arg<xla::ffi::AnyBuffer>()        \
  .Arg<xla::ffi::AnyBuffer>()        \
  .Arg<xla::ffi::AnyBuffer>()        \
  .Ret<xla::ffi::AnyBuffer>()        \
  .Ret<xla::ffi::AnyBuffer>()        \
  .Ret<xla::ffi::AnyBuffer>()        \
  .Ret<xla::ffi::AnyBuffer>()        \
  .Attr<int64_t>("op")               \
  .Attr<int64_t>("table_type")       \
  .Attr<int64_t>("values_type")      \
  .Attr<int64_t>("row_bytes")        \
  .Attr<int64_t>("kernel")           \
  .Attr<int64_t>("grid")
