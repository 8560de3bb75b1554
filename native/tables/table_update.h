// Writes rows of a table in host memory in place: scatter, scatter_add and the row-sparse optimizers.
#pragma once

#include "tables/table_gather.h"

namespace dejax {

// The values of the attribute `op`, and of OP in update.cu; dejax/host_gather/update.py has the same.
enum UpdateOp : int64_t { kSet = 0, kAdd = 1, kSgd = 2, kAdagrad = 3, kAdam = 4 };

// Attributes: table_type, values_type: element types, -1 to move bytes (set); kernel, grid: of the CUDA kernel.
struct UpdateAttributes {
  int64_t op;  // UpdateOp
  int64_t table_type, values_type, row_bytes, kernel, grid;
};

// The operands of an update: ids [n] int32 or int64, ascending; perm [n] int32, the row of `values` of each id; values
// [n, width']; hyper float32[7], see update.cu; then the table [rows, width] and the float32 states of the operation. The
// results are the table and the states, aliased, and nothing else: XLA puts all results of a call in one memory space. An
// id out of range changes nothing.
struct UpdateCall {
  xla::ffi::AnyBuffer ids, perm, values, hyper;
  UpdateAttributes how;
  // The table and its states: their addresses before and after, null for no state.
  const void* before[3] = {};
  void* after[3] = {};
  size_t bytes[3] = {};
  int64_t rows = 0;

  int64_t num_ids() const { return static_cast<int64_t>(ids.element_count()); }
  bool ids_are_wide() const { return ids.element_type() == xla::ffi::DataType::S64; }
  bool is_empty() const { return num_ids() == 0 || how.row_bytes == 0; }

  // Throws where they do not fit the operation or each other: a state has a float32 for each element of the table.
  void Read(xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets) {
    if (Fits(args, rets)) return;
    throw CallError(xla::ffi::ErrorCode::kInvalidArgument, "table, ids, values and state do not fit together");
  }

 private:
  bool Fits(xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets) {
    const size_t wanted = how.op < kAdagrad ? 1 : how.op == kAdagrad ? 2 : 3;
    const int64_t element = ElementBytes(how.table_type), row_bytes = how.row_bytes;
    if (how.op < kSet || how.op > kAdam || row_bytes < 0) return false;
    if (how.op != kSet && (element == 0 || row_bytes % element != 0)) return false;
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
    const int64_t row = how.op == kSet ? row_bytes : row_bytes / element * ElementBytes(how.values_type);
    return static_cast<int64_t>(values.size_bytes()) == num_ids() * row &&
           static_cast<int64_t>(perm.element_count()) == num_ids() && hyper.element_count() >= 7;
  }
};

// Reads a call and makes the update by `body(call)`. Errors begin as all of host_gather.
template <typename Body>
xla::ffi::Error ReportedUpdate(UpdateCall call, xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets,
                               const Body& body) {
  return Reported("dejax.host_gather: ", xla::ffi::ErrorCode::kInternal, [&] {
    call.Read(args, rets);
    body(call);
  });
}

}  // namespace dejax

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(dejax::UpdateAttributes, ::xla::ffi::StructMember<int64_t>("op"),
                                      ::xla::ffi::StructMember<int64_t>("table_type"),
                                      ::xla::ffi::StructMember<int64_t>("values_type"),
                                      ::xla::ffi::StructMember<int64_t>("row_bytes"),
                                      ::xla::ffi::StructMember<int64_t>("kernel"),
                                      ::xla::ffi::StructMember<int64_t>("grid"));

// The operands, results and attributes of both handlers, after the context.
#define DEJAX_UPDATE_SIGNATURE    \
  .Arg<xla::ffi::AnyBuffer>()     \
      .Arg<xla::ffi::AnyBuffer>() \
      .Arg<xla::ffi::AnyBuffer>() \
      .Arg<xla::ffi::AnyBuffer>() \
      .RemainingArgs()            \
      .RemainingRets()            \
      .Attrs<dejax::UpdateAttributes>()
