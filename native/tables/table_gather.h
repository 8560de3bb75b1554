// Gathers rows of a table in host memory by ids: the CPU and the CUDA handler of one FFI target, with one interface.
#pragma once

#include <cstdint>

#include "element_types.h"
#include "xla/ffi/api/ffi.h"

struct CUctx_st;
struct CUstream_st;

// The operands, results and attributes of both handlers, after the context.
#define DEJAX_GATHER_OPERANDS     \
  .Arg<xla::ffi::AnyBuffer>()     \
      .Arg<xla::ffi::AnyBuffer>() \
      .Arg<xla::ffi::AnyBuffer>() \
      .Arg<xla::ffi::AnyBuffer>() \
      .Arg<xla::ffi::AnyBuffer>() \
      .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
#define DEJAX_GATHER_RESULTS .Ret<xla::ffi::AnyBuffer>().Ret<xla::ffi::AnyBuffer>()
#define DEJAX_GATHER_ATTRIBUTES                    \
  .Attr<int64_t>("source")                         \
      .Attr<int64_t>("result")                     \
      .Attr<int64_t>("row_bytes")                  \
      .Attr<int64_t>("fan_out")                    \
      .Attr<bool>("mean")                          \
      .Attr<bool>("clip")                          \
      .Attr<bool>("raises")                        \
      .Attr<bool>("split")                         \
      .Attr<float>("fill_value")                   \
      .Attr<xla::ffi::Span<const uint8_t>>("fill") \
      .Attr<int64_t>("kernel")                     \
      .Attr<int64_t>("grid")                       \
      .Attr<int64_t>("align")
#define DEJAX_GATHER_SIGNATURE DEJAX_GATHER_OPERANDS DEJAX_GATHER_RESULTS DEJAX_GATHER_ATTRIBUTES

namespace dejax {

// FFI handlers.
//   arguments:  table [rows, width] of unsigned integers; with `split` only the rows that are not in the cache;
//               ids [n] int32 or int64;
//               perm [n] int32, the result row of each id, or [0] for ids in the order given (not read on the CPU);
//               slots [rows] int32 and cache [cached, width], or [0] (read on the CPU only with `split`): the row of the
//               cache that holds each row, or a negative number: with `split` ~(its row of the table);
//               scale float32 [0], [1] or [rows].
//   results:    out [n / fan_out, width'], scratch uint32[2] for the CUDA handler.
//   attributes: source, result int64: element types of element_types.h, or -1 to move bytes;
//               row_bytes, fan_out int64; mean bool;
//               clip bool: an id out of range means the nearest row, otherwise a row of fill;
//               raises bool: an id out of range is an error;
//               split bool: a row lies either in the table or in the cache;
//               fill_value float32 for converted elements; fill uint8[16], repeated elements, for moved bytes;
//               kernel, grid (blocks), align int64: of the CUDA kernel.
XLA_FFI_DECLARE_HANDLER_SYMBOL(TableGatherCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TableGatherCuda);

// TableGatherStart begins a gather on a stream of its own into memory of its own; TableGatherDone waits for one or several,
// and copies their rows, in pieces, to one result.
// pending_sites.h says which start a done means. Start returns its further operands unchanged, so that compute which uses
// them runs after it; done runs after its further operands. CUDA only: the CPU's start is a gather.
XLA_FFI_DECLARE_HANDLER_SYMBOL(TableGatherStart);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TableGatherDone);

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

// The sizes of a gather, which all handlers check before they read or write.
struct GatherSizes {
  int64_t ids = 0, perm = 0, slots = 0, cache_bytes = 0, scale = 0;  // elements, except cache_bytes
  int64_t rows = 0, table_rows = 0, table_bytes = 0, out_bytes = 0;  // `rows` counts those of the cache with `split`
  bool ids_are_integers = false, split = false;
  int64_t source = 0, result = 0, row_bytes = 0, fan_out = 0;
  bool mean = false;

  // What does not fit, or null. A result row has `row_bytes` if bytes are moved, else one element for each of the table's.
  const char* Misfit() const {
    if (fan_out < 1 || row_bytes < 0 || (mean && source < 0)) return "the attributes do not fit together";
    if (!ids_are_integers) return "ids must be int32 or int64";
    int64_t out_row = row_bytes;
    if (source >= 0) {
      const int64_t from = ElementBytes(source), to = ElementBytes(result);
      if (from == 0 || (result != kF32 && result != kBF16 && result != kF16)) return "no such conversion";
      if (row_bytes % from != 0) return "a row must have whole elements";
      out_row = row_bytes / from * to;
    }
    if (mean && ids % fan_out != 0) return "ids must be a multiple of the fan-out";
    if (out_bytes != (mean ? ids / fan_out : ids) * out_row) return "the result has other rows";
    if (table_bytes != table_rows * row_bytes) return "the table has other rows";
    if (split ? slots != rows : rows != table_rows) return "each row needs a slot";
    if (perm != 0 && perm != ids) return "each id needs a place";
    if (scale > 1 && scale != rows) return "there must be a scale for each row, or one";
    if (slots != 0 && (slots != rows || (row_bytes > 0 && cache_bytes % row_bytes != 0))) return "the cache does not fit";
    return nullptr;
  }
};

// Makes `stream` wait for the gathers that were begun and are not done, before a table is written. The context is
// current. Returns 0 or a CUresult.
int WaitForStarted(CUctx_st* context, CUstream_st* stream);

// The number of gathers that were begun and neither taken by their done nor dropped.
int64_t GathersUnderWay();

// Allocates the memory into which kernels with `raises` report, in the context of a device. A call that is captured into
// a graph cannot allocate it. False if there is no memory.
bool PrepareGatherErrors(int ordinal);

// Whether a kernel with `raises` has met an id out of range since the last call, and the id.
bool TakeGatherError(long long* id);

}  // namespace dejax
