// Gathers on a second stream: the start and done handlers of table_gather.h.
#include <cstdint>
#include <cstdio>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "tables/pending_sites.h"
#include "tables/table_gather_cuda.h"

namespace ffi = xla::ffi;

namespace dejax {
namespace {

using cuda::DevicePointer;

constexpr int kReleaseThreshold = 4;    // CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
constexpr unsigned kWithoutTiming = 2;  // CU_EVENT_DISABLE_TIMING
constexpr unsigned kNonBlocking = 1;    // CU_STREAM_NON_BLOCKING

// A gather in flight: its memory, which XLA does not know, and the event that it is done.
struct Pending {
  DevicePointer data = 0;
  size_t bytes = 0;
  cuda::Event done = nullptr;
};

struct Side {
  cuda::Stream stream = nullptr;
  PendingSites<Pending> pending;
};

std::mutex& SideMutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

std::map<cuda::Context, Side>& Sides() {
  static auto* const sides = new std::map<cuda::Context, Side>;
  return *sides;
}

ffi::Error Failed(const char* call, cuda::Result code) {
  return GatherError(ffi::ErrorCode::kInternal,
                     std::string(call) + " failed: " + cuda::ErrorName(*cuda::GetApi(nullptr), code));
}

ffi::Error MakeStream(Side& side) {
  const cuda::LaunchApi& launch = *cuda::GetLaunchApi(nullptr);
  int least = 0, greatest = 0;
  if (auto code = launch.ctx_get_stream_priority_range(&least, &greatest)) {
    return Failed("cuCtxGetStreamPriorityRange", code);
  }
  // The highest priority: when a block of the compute stream ends, a block of the gather takes its place.
  if (auto code = launch.stream_create_with_priority(&side.stream, kNonBlocking, greatest)) {
    return Failed("cuStreamCreateWithPriority", code);
  }
  // Freed memory stays in the pool; by default it returns to the driver at each synchronisation.
  cuda::Device device = 0;
  cuda::MemoryPool pool = nullptr;
  uint64_t everything = UINT64_MAX;
  if (launch.ctx_get_device(&device) == 0 && launch.device_get_default_mem_pool(&pool, device) == 0) {
    launch.mem_pool_set_attribute(pool, kReleaseThreshold, &everything);
  }
  return ffi::Error::Success();
}

// Frees what a gather holds, in the order of `stream`. Returns the first error.
cuda::Result Free(const Pending& pending, cuda::Stream stream) {
  const cuda::LaunchApi& launch = *cuda::GetLaunchApi(nullptr);
  const cuda::Result freed = pending.data ? launch.mem_free_async(pending.data, stream) : 0;
  const cuda::Result destroyed = pending.done != nullptr ? launch.event_destroy(pending.done) : 0;
  return freed != 0 ? freed : destroyed;
}

// The same where another error is being returned, or for another execution: an error is printed, not returned.
void FreeQuietly(const Pending& pending, cuda::Stream stream) {
  if (const cuda::Result code = Free(pending, stream)) {
    std::fprintf(stderr, "dejax.host_gather: memory of a gather that no step took was not freed: %s\n",
                 cuda::ErrorName(*cuda::GetApi(nullptr), code).c_str());
  }
}

// A flat copy of an array at another address.
struct Moved {
  Moved(ffi::AnyBuffer from, DevicePointer to) : dims{static_cast<int64_t>(from.element_count())} {
    raw.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
    raw.dtype = static_cast<XLA_FFI_DataType>(from.element_type());
    raw.data = reinterpret_cast<void*>(to);
    raw.rank = 1;
    raw.dims = dims;
  }
  int64_t dims[1];
  XLA_FFI_Buffer raw = {};
};

size_t RoundUp(size_t bytes) { return (bytes + 255) / 256 * 256; }

// Enqueues the gather. If this fails, the caller must free what `pending` holds.
ffi::Error Begin(const GatherCall& call, cuda::Context context, cuda::Stream stream, cuda::Stream side,
                 Pending* pending) {
  const cuda::LaunchApi& launch = *cuda::GetLaunchApi(nullptr);
  const size_t ids_bytes = call.ids.size_bytes(), perm_bytes = call.perm.size_bytes();
  // One allocation has the rows, the counter, and copies of ids and perm: XLA may reuse its own when this call returns.
  const size_t rows = RoundUp(pending->bytes), ids = RoundUp(ids_bytes), perm = RoundUp(perm_bytes);
  if (auto code = launch.mem_alloc_async(&pending->data, rows + ids + perm + 256, stream)) {
    pending->data = 0;
    return Failed("cuMemAllocAsync", code);
  }
  const DevicePointer own_ids = pending->data + rows, own_perm = own_ids + ids, counter = own_perm + perm;
  const auto copy = [&](DevicePointer to, const void* from, size_t bytes) {
    return bytes ? launch.memcpy_dtod_async(to, reinterpret_cast<DevicePointer>(from), bytes, stream) : 0;
  };
  if (auto code = copy(own_ids, call.ids.untyped_data(), ids_bytes)) return Failed("cuMemcpyDtoDAsync", code);
  if (auto code = copy(own_perm, call.perm.untyped_data(), perm_bytes)) return Failed("cuMemcpyDtoDAsync", code);
  // On the compute stream, like the copies: a fill is a kernel, and on the side stream it would wait until compute leaves
  // room for it.
  if (auto error = ZeroTicket(reinterpret_cast<void*>(counter), stream); error.failure()) return error;
  // The side stream continues from here.
  cuda::Event ready = nullptr;
  if (auto code = launch.event_create(&ready, kWithoutTiming)) return Failed("cuEventCreate", code);
  cuda::Result code = launch.event_record(ready, stream);
  if (code == 0) code = launch.stream_wait_event(side, ready, 0);
  const cuda::Result destroyed = launch.event_destroy(ready);
  if (code == 0) code = destroyed;
  if (code == 0) code = launch.event_create(&pending->done, kWithoutTiming);
  if (code != 0) return Failed("an event of gather_start", code);
  Moved moved_ids(call.ids, own_ids), moved_perm(call.perm, own_perm);
  GatherCall own = call;
  own.ids = ffi::AnyBuffer(&moved_ids.raw);
  own.perm = ffi::AnyBuffer(&moved_perm.raw);
  ffi::Error error = LaunchGather(own, reinterpret_cast<void*>(pending->data), static_cast<int64_t>(pending->bytes),
                                  reinterpret_cast<void*>(counter), context, side);
  if (error.failure()) return error;
  if (auto code = launch.event_record(pending->done, side)) return Failed("cuEventRecord", code);
  return ffi::Error::Success();
}

ffi::Error NoStart(Found found) {
  if (found == Found::kNone) {
    return GatherError(
        ffi::ErrorCode::kFailedPrecondition,
        "gather_done found no gather_start of its own in this execution; both must be in one jitted function");
  }
  return GatherError(ffi::ErrorCode::kFailedPrecondition,
                     "several gathers of one call of gather_start or prefetched_scan are in flight and cannot be told "
                     "apart: call it once for each of them, not a jitted function that calls it");
}

ffi::Error Start(cuda::Stream stream, ffi::RunId run, ffi::AnyBuffer table, ffi::AnyBuffer ids, ffi::AnyBuffer perm,
                 ffi::AnyBuffer slots, ffi::AnyBuffer cache, ffi::Buffer<ffi::F32> scale, ffi::RemainingArgs through,
                 ffi::Result<ffi::AnyBuffer> ticket, ffi::Result<ffi::AnyBuffer>, ffi::RemainingRets passed, int64_t source,
                 int64_t result, int64_t row_bytes, int64_t fan_out, bool mean, bool clip, bool raises, bool split,
                 float fill_value, ffi::Span<const uint8_t> fill, int64_t kernel, int64_t grid, int64_t align,
                 int64_t site, int64_t place, int64_t out_bytes) {
  cuda::Context context = nullptr;
  if (auto error = StreamContext(stream, &context); error.failure()) return error;
  // The ticket of a chain is the first operand that passes through.
  const void *from = nullptr, *to = ticket->untyped_data();
  if (static_cast<Place>(place) != Place::kAlone) {
    const auto in = through.get<ffi::AnyBuffer>(0);
    auto out = passed.get<ffi::AnyBuffer>(0);
    if (in.has_error() || out.has_error()) {
      return GatherError(ffi::ErrorCode::kInvalidArgument, "a start in a loop needs its ticket");
    }
    from = in->untyped_data();
    to = (*out)->untyped_data();
  }
  cuda::CurrentContext current(context);
  std::lock_guard<std::mutex> lock(SideMutex());
  Side& side = Sides()[context];
  if (side.stream == nullptr) {
    if (auto error = MakeStream(side); error.failure()) return error;
  }
  side.pending.DropOthers(run.run_id, [&](const Pending& pending) { FreeQuietly(pending, side.stream); });
  Pending pending;
  pending.bytes = static_cast<size_t>(out_bytes);
  ffi::Error error = Begin({table, ids, perm, slots, cache, scale, source, result, row_bytes, fan_out, mean, clip,
                            raises, split, fill_value, fill, kernel, grid, align},
                           context, stream, side.stream, &pending);
  if (error.failure()) {
    FreeQuietly(pending, side.stream);
    return error;
  }
  const Found found = side.pending.Add(run.run_id, site, static_cast<Place>(place), from, to, pending);
  if (found == Found::kYes) return error;
  FreeQuietly(pending, side.stream);
  return NoStart(found);
}

// A part of the result: `bytes` bytes of a gather, from `begin` on.
struct Piece {
  int64_t gather, begin, bytes;
};

// Copies pieces to the result, one after the other, when their gathers are done. Returns the first error.
cuda::Result CopyPieces(const std::vector<Pending>& gathers, ffi::Span<const int64_t> pieces, DevicePointer out,
                        cuda::Stream stream) {
  const cuda::LaunchApi& launch = *cuda::GetLaunchApi(nullptr);
  for (const Pending& pending : gathers) {
    if (const cuda::Result code = launch.stream_wait_event(stream, pending.done, 0)) return code;
  }
  for (size_t k = 0; k + 2 < pieces.size(); k += 3) {
    const Piece piece{pieces[k], pieces[k + 1], pieces[k + 2]};
    if (piece.bytes == 0) continue;
    const DevicePointer from = gathers[static_cast<size_t>(piece.gather)].data + static_cast<DevicePointer>(piece.begin);
    if (const cuda::Result code = launch.memcpy_dtod_async(out, from, static_cast<size_t>(piece.bytes), stream)) {
      return code;
    }
    out += static_cast<DevicePointer>(piece.bytes);
  }
  return 0;
}

// Whether pieces lie within their gathers and fill the result.
bool Fit(const std::vector<Pending>& gathers, ffi::Span<const int64_t> pieces, size_t bytes) {
  int64_t total = 0;
  for (size_t k = 0; k + 2 < pieces.size(); k += 3) {
    const Piece piece{pieces[k], pieces[k + 1], pieces[k + 2]};
    if (piece.gather < 0 || piece.gather >= static_cast<int64_t>(gathers.size()) || piece.begin < 0 || piece.bytes < 0) {
      return false;
    }
    const auto there = static_cast<int64_t>(gathers[static_cast<size_t>(piece.gather)].bytes);
    if (piece.begin > there || piece.bytes > there - piece.begin) return false;
    total += piece.bytes;
  }
  return pieces.size() % 3 == 0 && total == static_cast<int64_t>(bytes);
}

ffi::Error Done(cuda::Stream stream, ffi::RunId run, ffi::RemainingArgs tickets, ffi::Result<ffi::AnyBuffer> out,
                ffi::Span<const int64_t> sites, ffi::Span<const int64_t> pieces) {
  cuda::Context context = nullptr;
  if (auto error = StreamContext(stream, &context); error.failure()) return error;
  cuda::CurrentContext current(context);
  std::lock_guard<std::mutex> lock(SideMutex());
  Side& side = Sides()[context];
  std::vector<Pending> gathers;
  const auto free_all = [&] {
    cuda::Result first = 0;
    for (const Pending& pending : gathers) {
      const cuda::Result code = Free(pending, stream);
      if (first == 0) first = code;
    }
    return first;
  };
  for (size_t k = 0; k < sites.size(); ++k) {
    const auto ticket = tickets.get<ffi::AnyBuffer>(k);
    if (ticket.has_error()) return GatherError(ffi::ErrorCode::kInvalidArgument, "gather_done needs its tickets");
    Pending pending;
    const Found found = side.pending.Take(run.run_id, sites[k], ticket->untyped_data(), &pending);
    if (found != Found::kYes) {
      for (const Pending& taken : gathers) FreeQuietly(taken, stream);
      return NoStart(found);
    }
    gathers.push_back(pending);
  }
  if (!Fit(gathers, pieces, out->size_bytes())) {
    for (const Pending& taken : gathers) FreeQuietly(taken, stream);
    return GatherError(ffi::ErrorCode::kInternal, "the rows of gather_start are not those of gather_done");
  }
  cuda::Result code = CopyPieces(gathers, pieces, reinterpret_cast<DevicePointer>(out->untyped_data()), stream);
  const cuda::Result freed = free_all();
  if (code == 0) code = freed;
  return code == 0 ? ffi::Error::Success() : Failed("gather_done", code);
}

}  // namespace

int WaitForStarted(cuda::Context context, cuda::Stream stream) {
  std::lock_guard<std::mutex> lock(SideMutex());
  const auto side = Sides().find(context);
  if (side == Sides().end()) return 0;
  cuda::Result result = 0;
  side->second.pending.ForEach([&](const Pending& pending) {
    if (result == 0) result = cuda::GetLaunchApi(nullptr)->stream_wait_event(stream, pending.done, 0);
  });
  return result;
}

int64_t GathersUnderWay() {
  std::lock_guard<std::mutex> lock(SideMutex());
  int64_t count = 0;
  for (const auto& [context, side] : Sides()) side.pending.ForEach([&](const Pending&) { ++count; });
  return count;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(TableGatherStart, Start,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cuda::Stream>>()
                                  .Ctx<ffi::RunId>() DEJAX_GATHER_OPERANDS.RemainingArgs()
                                      DEJAX_GATHER_RESULTS.RemainingRets() DEJAX_GATHER_ATTRIBUTES.Attr<int64_t>("site")
                                  .Attr<int64_t>("place")
                                  .Attr<int64_t>("out_bytes"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(TableGatherDone, Done,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cuda::Stream>>()
                                  .Ctx<ffi::RunId>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<ffi::Span<const int64_t>>("sites")
                                  .Attr<ffi::Span<const int64_t>>("pieces"));

}  // namespace dejax
