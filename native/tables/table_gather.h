// Gathers rows of a table in host memory by ids. The FFI target "dejax_table_gather" has handlers for the CPU and for CUDA,
// with the same operands and attributes. Their results are out [n / fan_out, width'] and scratch uint32[2], for CUDA.
//
// "dejax_table_gather_start" begins a gather on a stream of its own into memory of its own; "dejax_table_gather_done" waits
// for one or several, and copies their rows, in pieces, to one result. pending_sites.h says which start a done means. Start
// returns its further operands unchanged, so that compute which uses them runs after it; done runs after its further
// operands. They are for CUDA only: the CPU's start is a gather.
#pragma once

#include <cstdint>

#include "driver/ffi_handlers.h"
#include "element_types.h"

namespace dejax {

// Bytes of one element of a type of element_types.h; 0 for an unknown type.
inline int64_t ElementBytes(int64_t type) {
  switch (type) {
    case kF64:
      return 8;
    case kF32:
    case kS32:
    case kU32:
      return 4;
    case kBF16:
    case kF16:
    case kS16:
    case kU16:
      return 2;
    case kF8E4M3:
    case kF8E5M2:
    case kS8:
    case kU8:
      return 1;
    default:
      return 0;
  }
}

// The attributes of a gather:
//   source, result: element types of element_types.h, or -1 to move bytes;
//   clip: an id out of range means the nearest row, otherwise a row of fill;
//   raises: an id out of range is an error;
//   split: a row lies either in the table or in the cache;
//   peers: 0, or with `split` the number of memory blocks that the cache is divided into;
//   fill_value: for converted elements; fill [16]: repeated elements, for moved bytes;
//   kernel, grid (blocks), align: of the CUDA kernel.
struct GatherAttributes {
  int64_t source, result, row_bytes, fan_out;
  bool mean, clip, raises, split;
  float fill_value;
  xla::ffi::Span<const uint8_t> fill;
  int64_t kernel, grid, align, peers;
};
#define DEJAX_GATHER_ATTRIBUTES                                                                                      \
  ::xla::ffi::StructMember<int64_t>("source"), ::xla::ffi::StructMember<int64_t>("result"),                          \
      ::xla::ffi::StructMember<int64_t>("row_bytes"), ::xla::ffi::StructMember<int64_t>("fan_out"),                  \
      ::xla::ffi::StructMember<bool>("mean"), ::xla::ffi::StructMember<bool>("clip"),                                \
      ::xla::ffi::StructMember<bool>("raises"), ::xla::ffi::StructMember<bool>("split"),                             \
      ::xla::ffi::StructMember<float>("fill_value"),                                                                 \
      ::xla::ffi::StructMember<::xla::ffi::Span<const uint8_t>>("fill"), ::xla::ffi::StructMember<int64_t>("kernel"), \
      ::xla::ffi::StructMember<int64_t>("grid"), ::xla::ffi::StructMember<int64_t>("align"),                         \
      ::xla::ffi::StructMember<int64_t>("peers")

// The operands of a gather:
//   table [rows, width] of unsigned integers; with `split` only the rows that are not in the cache;
//   ids [n] int32 or int64;
//   perm [n] int32, the result row of each id, or [0] for ids in the order given (not read on the CPU);
//   slots [rows] int32 and cache [cached, width], or [0] (read on the CPU only with `split`): the row of the cache that
//   holds each row, or a negative number: with `split` ~(its row of the table). With `peers` the cache is uint32[peers, 2],
//   the addresses of blocks of equal size, and its row i is row i / peers of block i % peers;
//   scale float32 [0], [1] or [rows].
struct GatherCall {
  xla::ffi::AnyBuffer table, ids, perm, slots, cache;
  xla::ffi::Buffer<xla::ffi::F32> scale;
  GatherAttributes how;

  int64_t num_ids() const { return static_cast<int64_t>(ids.element_count()); }
  bool ids_are_wide() const { return ids.element_type() == xla::ffi::DataType::S64; }
  // Rows of the result.
  int64_t num_results() const { return how.mean ? num_ids() / how.fan_out : num_ids(); }
  // Rows of the table; with `split` those of the cache count, too.
  int64_t num_rows() const {
    return how.split ? static_cast<int64_t>(slots.element_count()) : static_cast<int64_t>(table.dimensions()[0]);
  }

  // With `peers`: the bytes of each block of the cache.
  int64_t peer_bytes() const {
    const int64_t rows = num_rows() - static_cast<int64_t>(table.dimensions()[0]);
    return (rows + how.peers - 1) / how.peers * how.row_bytes;
  }

  // What does not fit, or null. A result row has `row_bytes` if bytes are moved, else one element for each of the table's.
  const char* Misfit(int64_t out_bytes) const {
    if (how.fill.size() != 16 || how.fan_out < 1 || how.row_bytes < 0 || table.dimensions().size() == 0 ||
        (how.mean && how.source < 0)) {
      return "the attributes do not fit together";
    }
    if (!ids_are_wide() && ids.element_type() != xla::ffi::DataType::S32) return "ids must be int32 or int64";
    int64_t out_row = how.row_bytes;
    if (how.source >= 0) {
      const int64_t from = ElementBytes(how.source), to = ElementBytes(how.result);
      if (from == 0 || (how.result != kF32 && how.result != kBF16 && how.result != kF16)) return "no such conversion";
      if (how.row_bytes % from != 0) return "a row must have whole elements";
      out_row = how.row_bytes / from * to;
    }
    const auto count = [](const xla::ffi::AnyBuffer& x) { return static_cast<int64_t>(x.element_count()); };
    const auto bytes = [](const xla::ffi::AnyBuffer& x) { return static_cast<int64_t>(x.size_bytes()); };
    const int64_t rows = num_rows(), scales = static_cast<int64_t>(scale.element_count());
    if (how.mean && num_ids() % how.fan_out != 0) return "ids must be a multiple of the fan-out";
    if (out_bytes != num_results() * out_row) return "the result has other rows";
    if (bytes(table) != table.dimensions()[0] * how.row_bytes) return "the table has other rows";
    if (count(perm) != 0 && count(perm) != num_ids()) return "each id needs a place";
    if (scales > 1 && scales != rows) return "there must be a scale for each row, or one";
    if (how.peers != 0) {
      const bool fits = how.peers > 0 && how.split && count(slots) == rows && bytes(cache) == 8 * how.peers;
      return fits ? nullptr : "the blocks of the cache do not fit";
    }
    if (count(slots) != 0 && (count(slots) != rows || (how.row_bytes > 0 && bytes(cache) % how.row_bytes != 0))) {
      return "the cache does not fit";
    }
    return nullptr;
  }
};

// Rows that a reader of a table on a drive has found: for each id its place, among `near` rows and then among those beyond;
// below 0 for a row of fill.
struct FoundRows {
  const char* near;
  int64_t near_rows;
  const char* beyond;
  int64_t beyond_rows;
  const int64_t* places;
  int64_t count;
};

// Gathers them on the CPU's threads. scale: one for all rows, or null.
void GatherFound(const FoundRows& found, const GatherAttributes& how, const float* scale, void* out);

// The gathers of host_gather fail with an error that begins so, and mostly with this code.
template <typename Body>
xla::ffi::Error ReportedGather(const Body& body) {
  return Reported("dejax.host_gather.gather: ", xla::ffi::ErrorCode::kInternal, body);
}

// Makes `stream` wait for the gathers that were begun and are not done, before a table is written. The context is
// current. Throws std::runtime_error.
void WaitForStarted(cuda::Context context, cuda::Stream stream);

// The number of gathers that were begun and neither taken by their done nor dropped.
int64_t GathersUnderWay();

// Allocates the memory into which kernels with `raises` report, in the context of a device. A call that is captured into
// a graph cannot allocate it. False if there is no memory.
bool PrepareGatherErrors(int ordinal);

// Whether a kernel with `raises` has met an id out of range since the last call, and the id.
bool TakeGatherError(long long* id);

}  // namespace dejax

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(dejax::GatherAttributes, DEJAX_GATHER_ATTRIBUTES);

// The operands and results of a gather, as a handler binds them.
#define DEJAX_GATHER_OPERANDS     \
  .Arg<xla::ffi::AnyBuffer>()     \
      .Arg<xla::ffi::AnyBuffer>() \
      .Arg<xla::ffi::AnyBuffer>() \
      .Arg<xla::ffi::AnyBuffer>() \
      .Arg<xla::ffi::AnyBuffer>() \
      .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
#define DEJAX_GATHER_RESULTS .Ret<xla::ffi::AnyBuffer>().Ret<xla::ffi::AnyBuffer>()
