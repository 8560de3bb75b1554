// Gathers on a second stream: the start and done handlers of table_gather.h.
#include <cstdint>
#include <cstdio>
#include <map>
#include <mutex>
#include <stdexcept>
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

// The gathers of one device. Each has a mutex of its own: a call that the driver keeps waiting must not keep the threads
// of other devices from launching, for whose collectives it may wait.
struct Side {
  std::mutex mutex;
  cuda::Stream stream = nullptr;
  PendingSites<Pending> pending;
};

std::mutex& SidesMutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

std::map<cuda::Context, Side>& Sides() {
  static auto* const sides = new std::map<cuda::Context, Side>;
  return *sides;
}

// The side of a context; it is never removed.
Side& SideOf(cuda::Context context) {
  std::lock_guard<std::mutex> lock(SidesMutex());
  return Sides()[context];
}

const cuda::Driver& TheDriver() { return cuda::GetDriver(cuda::kTables); }

void MakeStream(Side& side) {
  const cuda::Driver& driver = TheDriver();
  int least = 0, greatest = 0;
  cuda::Check(driver.ctx_get_stream_priority_range(&least, &greatest), "cuCtxGetStreamPriorityRange");
  // The highest priority: when a block of the compute stream ends, a block of the gather takes its place.
  cuda::Check(driver.stream_create_with_priority(&side.stream, kNonBlocking, greatest), "cuStreamCreateWithPriority");
  // Freed memory stays in the pool; by default it returns to the driver at each synchronisation.
  cuda::Device device = 0;
  cuda::MemoryPool pool = nullptr;
  uint64_t everything = UINT64_MAX;
  if (driver.ctx_get_device(&device) == 0 && driver.device_get_default_mem_pool(&pool, device) == 0) {
    driver.mem_pool_set_attribute(pool, kReleaseThreshold, &everything);
  }
}

// Frees what a gather holds, in the order of `stream`. Returns the first error.
cuda::Result Free(const Pending& pending, cuda::Stream stream) {
  const cuda::Driver& driver = TheDriver();
  const cuda::Result freed = pending.data ? driver.mem_free_async(pending.data, stream) : 0;
  const cuda::Result destroyed = pending.done != nullptr ? driver.event_destroy(pending.done) : 0;
  return freed != 0 ? freed : destroyed;
}

// The same where another error is being returned, or for another execution: an error is printed, not returned.
void FreeQuietly(const Pending& pending, cuda::Stream stream) {
  if (const cuda::Result code = Free(pending, stream)) {
    std::fprintf(stderr, "dejax.host_gather: memory of a gather that no step took was not freed: %s\n",
                 cuda::ErrorName(code).c_str());
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

// Enqueues the gather. If this throws, the caller must free what `pending` holds.
void Begin(const GatherCall& call, cuda::Context context, cuda::Stream stream, cuda::Stream side, Pending* pending) {
  const cuda::Driver& driver = TheDriver();
  const size_t ids_bytes = call.ids.size_bytes(), perm_bytes = call.perm.size_bytes();
  // One allocation has the rows, the counter, and copies of ids and perm: XLA may reuse its own when this call returns.
  const size_t rows = RoundUp(pending->bytes), ids = RoundUp(ids_bytes), perm = RoundUp(perm_bytes);
  DevicePointer data = 0;
  cuda::Check(driver.mem_alloc_async(&data, rows + ids + perm + 256, stream), "cuMemAllocAsync");
  pending->data = data;
  const DevicePointer own_ids = data + rows, own_perm = own_ids + ids, counter = own_perm + perm;
  const auto copy = [&](DevicePointer to, const void* from, size_t bytes) {
    if (bytes == 0) return;
    cuda::Check(driver.copy_device_to_device(to, reinterpret_cast<DevicePointer>(from), bytes, stream),
                "cuMemcpyDtoDAsync");
  };
  copy(own_ids, call.ids.untyped_data(), ids_bytes);
  copy(own_perm, call.perm.untyped_data(), perm_bytes);
  // On the compute stream, like the copies: a fill is a kernel, and on the side stream it would wait until compute leaves
  // room for it.
  ZeroTicket(reinterpret_cast<void*>(counter), stream);
  // The side stream continues from here.
  cuda::Event ready = nullptr;
  cuda::Check(driver.event_create(&ready, kWithoutTiming), "cuEventCreate");
  cuda::Result code = driver.event_record(ready, stream);
  if (code == 0) code = driver.stream_wait_event(side, ready, 0);
  const cuda::Result destroyed = driver.event_destroy(ready);
  cuda::Check(code != 0 ? code : destroyed, "an event of gather_start");
  cuda::Check(driver.event_create(&pending->done, kWithoutTiming), "cuEventCreate");
  Moved moved_ids(call.ids, own_ids), moved_perm(call.perm, own_perm);
  GatherCall own = call;
  own.ids = ffi::AnyBuffer(&moved_ids.raw);
  own.perm = ffi::AnyBuffer(&moved_perm.raw);
  LaunchGather(own, reinterpret_cast<void*>(data), static_cast<int64_t>(pending->bytes), reinterpret_cast<void*>(counter),
               context, side);
  cuda::Check(driver.event_record(pending->done, side), "cuEventRecord");
}

void RequireStart(Found found) {
  if (found == Found::kYes) return;
  throw CallError(ffi::ErrorCode::kFailedPrecondition,
                  found == Found::kNone
                      ? "gather_done found no gather_start of its own in this execution; both must be in one jitted "
                        "function"
                      : "several gathers of one call of gather_start or prefetched_scan are in flight and cannot be told "
                        "apart: call it once for each of them, not a jitted function that calls it");
}

struct StartAttributes : GatherAttributes {
  int64_t site, place, out_bytes;
};

void BeginStart(cuda::Stream stream, int64_t run, const GatherCall& call, const StartAttributes& how, const void* from,
                const void* to) {
  const cuda::Context context = StreamContext(stream);
  const cuda::ContextScope scope(context);
  Side& side = SideOf(context);
  std::lock_guard<std::mutex> lock(side.mutex);
  if (side.stream == nullptr) MakeStream(side);
  side.pending.DropOthers(run, [&](const Pending& pending) { FreeQuietly(pending, side.stream); });
  Pending pending;
  pending.bytes = static_cast<size_t>(how.out_bytes);
  try {
    Begin(call, context, stream, side.stream, &pending);
    RequireStart(side.pending.Add(run, how.site, static_cast<ChainPlace>(how.place), from, to, pending));
  } catch (...) {
    FreeQuietly(pending, side.stream);
    throw;
  }
}

ffi::Error Start(cuda::Stream stream, ffi::RunId run, ffi::AnyBuffer table, ffi::AnyBuffer ids, ffi::AnyBuffer perm,
                 ffi::AnyBuffer slots, ffi::AnyBuffer cache, ffi::Buffer<ffi::F32> scale, ffi::RemainingArgs through,
                 ffi::Result<ffi::AnyBuffer> ticket, ffi::Result<ffi::AnyBuffer>, ffi::RemainingRets passed,
                 StartAttributes how) {
  return ReportedGather([&] {
    // The ticket of a chain is the first operand that passes through.
    const void *from = nullptr, *to = ticket->untyped_data();
    if (static_cast<ChainPlace>(how.place) != ChainPlace::kAlone) {
      const auto in = through.get<ffi::AnyBuffer>(0);
      auto out = passed.get<ffi::AnyBuffer>(0);
      if (in.has_error() || out.has_error()) {
        throw CallError(ffi::ErrorCode::kInvalidArgument, "a start in a loop needs its ticket");
      }
      from = in->untyped_data();
      to = (*out)->untyped_data();
    }
    BeginStart(stream, run.run_id, {table, ids, perm, slots, cache, scale, how}, how, from, to);
  });
}

// A part of the result: `bytes` bytes of a gather, from `begin` on.
struct Piece {
  int64_t gather, begin, bytes;
};

// Copies pieces to the result, one after the other, when their gathers are done.
void CopyPieces(const std::vector<Pending>& gathers, ffi::Span<const int64_t> pieces, DevicePointer out,
                cuda::Stream stream) {
  const cuda::Driver& driver = TheDriver();
  for (const Pending& pending : gathers) {
    cuda::Check(driver.stream_wait_event(stream, pending.done, 0), "cuStreamWaitEvent");
  }
  for (size_t k = 0; k + 2 < pieces.size(); k += 3) {
    const Piece piece{pieces[k], pieces[k + 1], pieces[k + 2]};
    if (piece.bytes == 0) continue;
    const DevicePointer from = gathers[static_cast<size_t>(piece.gather)].data + static_cast<DevicePointer>(piece.begin);
    cuda::Check(driver.copy_device_to_device(out, from, static_cast<size_t>(piece.bytes), stream), "cuMemcpyDtoDAsync");
    out += static_cast<DevicePointer>(piece.bytes);
  }
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
  return ReportedGather([&] {
    const cuda::Context context = StreamContext(stream);
    const cuda::ContextScope scope(context);
    Side& side = SideOf(context);
    std::lock_guard<std::mutex> lock(side.mutex);
    std::vector<Pending> gathers;
    try {
      for (size_t k = 0; k < sites.size(); ++k) {
        const auto ticket = tickets.get<ffi::AnyBuffer>(k);
        if (ticket.has_error()) throw CallError(ffi::ErrorCode::kInvalidArgument, "gather_done needs its tickets");
        Pending pending;
        RequireStart(side.pending.Take(run.run_id, sites[k], ticket->untyped_data(), &pending));
        gathers.push_back(pending);
      }
      if (!Fit(gathers, pieces, out->size_bytes())) throw std::runtime_error("gather_start and gather_done have other rows");
      CopyPieces(gathers, pieces, reinterpret_cast<DevicePointer>(out->untyped_data()), stream);
    } catch (...) {
      for (const Pending& taken : gathers) FreeQuietly(taken, stream);
      throw;
    }
    cuda::Result first = 0;
    for (const Pending& pending : gathers) {
      const cuda::Result code = Free(pending, stream);
      if (first == 0) first = code;
    }
    cuda::Check(first, "gather_done");
  });
}

}  // namespace

void WaitForStarted(cuda::Context context, cuda::Stream stream) {
  Side& side = SideOf(context);
  std::lock_guard<std::mutex> lock(side.mutex);
  side.pending.ForEach([&](const Pending& pending) {
    cuda::Check(TheDriver().stream_wait_event(stream, pending.done, 0), "cuStreamWaitEvent");
  });
}

int64_t GathersUnderWay() {
  std::lock_guard<std::mutex> lock(SidesMutex());
  int64_t count = 0;
  for (auto& [context, side] : Sides()) {
    std::lock_guard<std::mutex> own(side.mutex);
    side.pending.ForEach([&](const Pending&) { ++count; });
  }
  return count;
}

}  // namespace dejax

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(dejax::StartAttributes, DEJAX_GATHER_ATTRIBUTES, ffi::StructMember<int64_t>("site"),
                                      ffi::StructMember<int64_t>("place"), ffi::StructMember<int64_t>("out_bytes"));

namespace dejax {
namespace {

DEJAX_FFI_HANDLER("dejax_table_gather_start", "CUDA",
                  ffi::Ffi::Bind()
                      .Ctx<ffi::PlatformStream<cuda::Stream>>()
                      .Ctx<ffi::RunId>() DEJAX_GATHER_OPERANDS.RemainingArgs() DEJAX_GATHER_RESULTS.RemainingRets()
                      .Attrs<StartAttributes>()
                      .To(Start));
DEJAX_FFI_HANDLER("dejax_table_gather_done", "CUDA",
                  ffi::Ffi::Bind()
                      .Ctx<ffi::PlatformStream<cuda::Stream>>()
                      .Ctx<ffi::RunId>()
                      .RemainingArgs()
                      .Ret<ffi::AnyBuffer>()
                      .Attr<ffi::Span<const int64_t>>("sites")
                      .Attr<ffi::Span<const int64_t>>("pieces")
                      .To(Done));

}  // namespace
}  // namespace dejax
