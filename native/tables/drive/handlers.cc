// The handlers of handlers.h for the CPU.
#include "tables/drive/handlers.h"

#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace ffi = xla::ffi;

namespace dejax {

std::shared_ptr<RowReader> ReaderOf(ffi::AnyBuffer table) {
  int64_t number = 0;
  if (table.size_bytes() != sizeof(number)) {
    throw CallError(ffi::ErrorCode::kInvalidArgument, "the table's array must have the number of its reader");
  }
  std::memcpy(&number, table.untyped_data(), sizeof(number));
  std::shared_ptr<RowReader> reader = RowReader::Find(number);
  if (!reader) throw CallError(ffi::ErrorCode::kFailedPrecondition, "the table was closed");
  return reader;
}

RowReader::RequestPtr BeginRequest(RowReader* reader, const void* ids, int64_t count, bool wide, bool clip) {
  return wide ? reader->Begin(static_cast<const int64_t*>(ids), count, clip)
              : reader->Begin(static_cast<const int32_t*>(ids), count, clip);
}

void CheckDriveGather(const RowReader& reader, const GatherAttributes& how, ffi::AnyBuffer ids, int64_t out_bytes) {
  int64_t out_row = how.row_bytes;
  if (how.source >= 0) {
    const int64_t from = ElementBytes(how.source);
    out_row = from == 0 ? -1 : how.row_bytes / from * ElementBytes(how.result);
  }
  if (how.row_bytes != reader.options().layout.row_bytes || how.fill.size() != 16 || how.mean || how.split ||
      out_bytes != static_cast<int64_t>(ids.element_count()) * out_row) {
    throw CallError(ffi::ErrorCode::kInvalidArgument, "the rows of the table, ids and result do not fit together");
  }
}

void RequireInside(const RowReader& reader, const RowReader::Request& request, const GatherAttributes& how) {
  if (!how.raises || !request.has_outside) return;
  throw CallError(ffi::ErrorCode::kOutOfRange, "id " + std::to_string(request.outside) + " is out of range for a table of " +
                                                   std::to_string(reader.options().layout.rows) + " rows");
}

namespace {

bool AreWide(ffi::AnyBuffer ids) { return ids.element_type() == ffi::DataType::S64; }

ffi::Error StartOnCpu(ffi::AnyBuffer table, ffi::AnyBuffer ids, ffi::RemainingArgs through,
                      ffi::Result<ffi::AnyBuffer> ticket, ffi::RemainingRets passed, bool clip, int64_t, int64_t) {
  return ReportedGather([&] {
    const auto reader = ReaderOf(table);
    const RowReader::Use use(reader.get());
    PassThrough(through, passed, [](void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); });
    int64_t kept = 0;
    if (ids.element_count() > 0) {
      kept = reader->Keep(
          BeginRequest(reader.get(), ids.untyped_data(), static_cast<int64_t>(ids.element_count()), AreWide(ids), clip));
    }
    if (ticket->size_bytes() != sizeof(kept)) throw CallError(ffi::ErrorCode::kInvalidArgument, "a ticket has 8 bytes");
    std::memcpy(ticket->untyped_data(), &kept, sizeof(kept));
  });
}

ffi::Error GatherOnCpu(ffi::AnyBuffer ticket, ffi::AnyBuffer table, ffi::AnyBuffer ids, ffi::Buffer<ffi::F32> scale,
                       ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> out, DriveGatherAttributes how) {
  return ReportedGather([&] {
    const auto reader = ReaderOf(table);
    const RowReader::Use use(reader.get());
    CheckDriveGather(*reader, how, ids, static_cast<int64_t>(out->size_bytes()));
    const auto count = static_cast<int64_t>(ids.element_count());
    if (count == 0 || how.row_bytes == 0) return;
    RowReader::RequestPtr started;
    if (ticket.size_bytes() == sizeof(int64_t)) {
      int64_t kept = 0;
      std::memcpy(&kept, ticket.untyped_data(), sizeof(kept));
      started = reader->Take(kept);
    }
    if (started && static_cast<int64_t>(started->places.size()) != count) {
      reader->Release(started);
      started = nullptr;
    }
    if (!started) started = BeginRequest(reader.get(), ids.untyped_data(), count, AreWide(ids), how.clip);
    const HeldRequest request(reader.get(), started);
    RequireInside(*reader, *started, how);
    reader->Wait(started);
    const RowReader::Options& options = reader->options();
    GatherFound({options.cache, options.slots, started->more.get(), started->more_rows, started->places.data(), count}, how,
                scale.element_count() > 0 ? scale.typed_data() : nullptr, out->untyped_data());
  });
}

DEJAX_FFI_HANDLER("dejax_drive_start", "cpu",
                  ffi::Ffi::Bind()
                      .Arg<ffi::AnyBuffer>()
                      .Arg<ffi::AnyBuffer>()
                      .RemainingArgs()
                      .Ret<ffi::AnyBuffer>()
                      .RemainingRets()
                      .Attr<bool>("clip")
                      .Attr<int64_t>("site")
                      .Attr<int64_t>("place")
                      .To(StartOnCpu));
DEJAX_FFI_HANDLER("dejax_drive_gather", "cpu",
                  ffi::Ffi::Bind()
                      .Arg<ffi::AnyBuffer>()
                      .Arg<ffi::AnyBuffer>()
                      .Arg<ffi::AnyBuffer>()
                      .Arg<ffi::Buffer<ffi::F32>>()
                      .RemainingArgs()
                      .Ret<ffi::AnyBuffer>()
                      .Attrs<DriveGatherAttributes>()
                      .To(GatherOnCpu));

}  // namespace
}  // namespace dejax
