// Writes rows of a table in host memory in place: scatter, scatter_add and the row-sparse optimizers.
#pragma once

#include "tables/table_gather.h"
#include "xla/ffi/api/ffi.h"

namespace dejax {

// The values of the attribute `op`, and of OP in update.cu; dejax/host_gather/update.py has the same.
enum UpdateOp : int64_t { kSet = 0, kAdd = 1, kSgd = 2, kAdagrad = 3, kAdam = 4 };

// The tables of one update, the table and its optimizer's states: their addresses before and after, null for no state.
struct UpdateTables {
  const void* before[3] = {};
  void* after[3] = {};
  size_t bytes[3] = {};
  int64_t rows = 0;

  // False if they do not fit the operation or each other: a state has a float32 for each element of the table.
  bool Read(xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets, int64_t op, int64_t row_bytes,
            int64_t table_type) {
    const size_t wanted = op < kAdagrad ? 1 : op == kAdagrad ? 2 : 3;
    const int64_t element = ElementBytes(table_type);
    if (op < kSet || op > kAdam || row_bytes < 0 || (op != kSet && (element == 0 || row_bytes % element != 0))) return false;
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

// Whether `values` has one row for each id, with as many elements as a row of the table.
inline bool ValuesFit(xla::ffi::AnyBuffer values, int64_t n, int64_t op, int64_t row_bytes, int64_t table_type,
                      int64_t values_type) {
  const int64_t row = op == kSet ? row_bytes : row_bytes / ElementBytes(table_type) * ElementBytes(values_type);
  return static_cast<int64_t>(values.size_bytes()) == n * row;
}

// FFI handlers.
//   arguments:  ids [n] int32 or int64, ascending; perm [n] int32, the row of `values` of each id; values [n, width'];
//               hyper float32[7], see update.cu; then the table [rows, width] and the float32 states of the operation.
//   results:    the table and the states, aliased, and nothing else: XLA puts all results of a call in one memory space.
//   attributes: op int64: UpdateOp;
//               table_type, values_type int64: element types, -1 to move bytes (set);
//               row_bytes int64; kernel, grid int64: of the CUDA kernel.
// An id out of range changes nothing.
XLA_FFI_DECLARE_HANDLER_SYMBOL(TableUpdateCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TableUpdateCuda);

}  // namespace dejax

// The operands, results and attributes of both handlers, after the context.
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
