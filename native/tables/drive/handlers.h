// Gathers of tables on a drive. "dejax_drive_start" begins to read the rows of ids, and "dejax_drive_gather" gives them: it
// takes what a start has begun, which it finds by the start's ticket, or begins itself. Both have handlers for the CPU and
// for CUDA with the same operands and attributes:
//   start:  table uint32[2], the number of its RowReader, in host memory; ids [n]; what passes through ->
//           ticket uint32[2], and what passed through;
//   gather: ticket, or [0] without a start; table; ids; scale float32 [0] or [1]; what must come before -> rows.
// An id `kOnDevice` means a row that the device has: its row is one of fill, and counted as found there.
#pragma once

#include <memory>
#include <string>

#include "tables/drive/row_reader.h"
#include "tables/table_gather.h"

namespace dejax {

// The reader that a table's array in host memory names. Throws where it was closed.
std::shared_ptr<RowReader> ReaderOf(xla::ffi::AnyBuffer table);

// A request that ends with its owner.
class HeldRequest {
 public:
  HeldRequest(RowReader* reader, RowReader::RequestPtr request) : reader_(reader), request_(std::move(request)) {}
  ~HeldRequest() {
    if (request_) reader_->Release(request_);
  }
  HeldRequest(const HeldRequest&) = delete;

  const RowReader::RequestPtr& operator*() const { return request_; }
  // The caller releases it.
  RowReader::RequestPtr Hand() { return std::move(request_); }

 private:
  RowReader* const reader_;
  RowReader::RequestPtr request_;
};

RowReader::RequestPtr BeginRequest(RowReader* reader, const void* ids, int64_t count, bool wide, bool clip);

// Throws where ids, rows and result do not fit together.
void CheckDriveGather(const RowReader& reader, const GatherAttributes& how, xla::ffi::AnyBuffer ids, int64_t out_bytes);

// Throws where an id was out of range and the gather must not allow it.
void RequireInside(const RowReader& reader, const RowReader::Request& request, const GatherAttributes& how);

// What passes through a call, in the memory of its results.
template <typename Copy>
void PassThrough(xla::ffi::RemainingArgs from, xla::ffi::RemainingRets to, const Copy& copy) {
  if (from.size() != to.size()) throw CallError(xla::ffi::ErrorCode::kInvalidArgument, "what passes through must come back");
  for (size_t k = 0; k < from.size(); ++k) {
    const auto in = from.get<xla::ffi::AnyBuffer>(k);
    auto out = to.get<xla::ffi::AnyBuffer>(k);
    if (in.has_error() || out.has_error() || in->size_bytes() != (*out)->size_bytes()) {
      throw CallError(xla::ffi::ErrorCode::kInvalidArgument, "what passes through must come back");
    }
    if (in->untyped_data() != (*out)->untyped_data()) copy((*out)->untyped_data(), in->untyped_data(), in->size_bytes());
  }
}

struct DriveGatherAttributes : GatherAttributes {
  int64_t site;
};

}  // namespace dejax

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(dejax::DriveGatherAttributes, DEJAX_GATHER_ATTRIBUTES,
                                      ::xla::ffi::StructMember<int64_t>("site"));
