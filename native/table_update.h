// Rows of a table in host memory, set or changed in place: scatter, scatter_add and the row-sparse optimizers.
#pragma once

#include "table_gather.h"
#include "xla/ffi/api/ffi.h"

namespace dejax {

// The tables of one update: where they are before and after, null where the operation has none.
struct UpdateTables {
  const void* before[3] = {};
  void* after[3] = {};
  size_t bytes[3] = {};
  int64_t rows = 0;

  // False where they do not fit the operation, or each other: the states have a float32 for each element of the table.
  bool Read(xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets, int64_t op, int64_t row_bytes,
            int64_t table_type) {
    const size_t wanted = op < 3 ? 1 : op == 3 ? 2 : 3;
    const int64_t element = ElementBytes(table_type);
    if (op < 0 || op > 4 || row_bytes < 0 || (op > 0 && (element == 0 || row_bytes % element != 0))) return false;
    if (args.size() != wanted || rets.size() != wanted) return false;
    for (size_t k = 0; k < wanted; ++k) {
      const auto arg = args.get<xla::ffi::AnyBuffer>(k);
      auto ret = rets.get<xla::ffi::AnyBuffer>(k);
      if (arg.has_error() || ret.has_error() || arg->size_bytes() != (*ret)->size_bytes() ||
          arg->dimensions().size() == 0) {
        return false;
      }
      before[k] = arg->untyped_data();
      after[k] = (*ret)->untyped_data();
      bytes[k] = arg->size_bytes();
      if (k == 0) rows = arg->dimensions()[0];
      const int64_t expected = k == 0 ? rows * row_bytes : rows * (row_bytes / element) * 4;
      if (static_cast<int64_t>(bytes[k]) != expected) return false;
    }
    return true;
  }
};

// Whether there are as many rows of values as ids, each of as many elements as a row of the table.
inline bool ValuesFit(xla::ffi::AnyBuffer values, int64_t n, int64_t op, int64_t row_bytes, int64_t table_type,
                      int64_t values_type) {
  const int64_t row = op == 0 ? row_bytes : row_bytes / ElementBytes(table_type) * ElementBytes(values_type);
  return static_cast<int64_t>(values.size_bytes()) == n * row;
}

// FFI handlers.
//   arguments:  ids [n] int32 or int64, ascending; perm [n] int32, the row of `values` of each; values [n, width'];
//               hyper float32[7], see update.cu; then the table [rows, width] and the float32 states of the operation.
//   results:    the table and the states, aliased. Nothing else: XLA gives all results of a call the memory of one.
//   attributes: op int64: 0 set, 1 add, 2 SGD, 3 Adagrad, 4 Adam;
//               table_type, values_type int64: element types, -1 to move bytes (set);
//               row_bytes int64; kernel, grid int64: of the CUDA kernel.
// An id out of range changes nothing.
XLA_FFI_DECLARE_HANDLER_SYMBOL(TableUpdateCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TableUpdateCuda);

}  // namespace dejax

// What both handlers bind, after the context.
#define DEJAX_UPDATE_SIGNATURE      \
  .Arg<xla::ffi::AnyBuffer>()       \
      .Arg<xla::ffi::AnyBuffer>()   \
      .Arg<xla::ffi::AnyBuffer>()   \
      .Arg<xla::ffi::AnyBuffer>()   \
      .RemainingArgs()              \
      .RemainingRets()              \
      .Attr<int64_t>("op")          \
      .Attr<int64_t>("table_type")  \
      .Attr<int64_t>("values_type") \
      .Attr<int64_t>("row_bytes")   \
      .Attr<int64_t>("kernel")      \
      .Attr<int64_t>("grid")
