// The handlers of handlers.h for CUDA. A start copies its ids to the host; a host function on a stream of its own then
// begins the reads, while the compute stream goes on. The gather waits on the host, not on the GPU, until the rows are in
// the cache, which is pinned; then the kernel that gathers from host memory reads them by their positions there.
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "driver/cuda_calls.h"
#include "tables/drive/handlers.h"
#include "tables/pending_sites.h"
#include "tables/table_gather_cuda.h"

namespace ffi = xla::ffi;

namespace dejax {
namespace {

using cuda::DevicePointer;
using offload::Event;
using offload::EventPool;

constexpr cuda::Result kNotReady = 600;  // CUDA_ERROR_NOT_READY
constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING
constexpr unsigned kPortableAndMapped = 3;
constexpr int kMemoryType = 2;          // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
constexpr unsigned kDeviceMemory = 2;  // CU_MEMORYTYPE_DEVICE

// Pinned memory that kernels and copies use for a while. It is kept for the next user.
class PinnedPool : public std::enable_shared_from_this<PinnedPool> {
 public:
  std::shared_ptr<char> Get(size_t bytes) {
    std::pair<size_t, char*> found{0, nullptr};
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto at = free_.lower_bound(bytes);
      if (at != free_.end() && at->first <= 4 * bytes + 4096) {
        found = *at;
        free_.erase(at);
      }
    }
    if (found.second == nullptr) {
      found.first = bytes + bytes / 4 + 4096;
      void* data = nullptr;
      cuda::Check(cuda::GetDriver(cuda::kTables).host_alloc(&data, found.first, kPortableAndMapped), "cuMemHostAlloc");
      found.second = static_cast<char*>(data);
    }
    return std::shared_ptr<char>(found.second, [self = shared_from_this(), found](char*) {
      std::lock_guard<std::mutex> lock(self->mutex_);
      self->free_.insert(found);
    });
  }

 private:
  std::mutex mutex_;
  std::multimap<size_t, char*> free_;
};

// A start: its ids on their way to the host, then its request.
struct Started {
  std::shared_ptr<RowReader> reader;
  std::shared_ptr<char> ids;
  int64_t count = 0;
  bool wide = false, clip = false;
  Event copied;  // the ids are on the host

  std::mutex mutex;
  std::condition_variable changed;
  bool begun = false, dropped = false;
  RowReader::RequestPtr request;
  std::string error;

  // The ids are there.
  void Begin() {
    std::lock_guard<std::mutex> lock(mutex);
    try {
      const RowReader::Use use(reader.get());
      if (!dropped) request = BeginRequest(reader.get(), ids.get(), count, wide, clip);
    } catch (const std::exception& caught) {
      error = caught.what();
    }
    begun = true;
    changed.notify_all();
  }

  RowReader::RequestPtr Request() {
    std::unique_lock<std::mutex> lock(mutex);
    while (!changed.wait_for(lock, std::chrono::seconds(1), [this] { return begun; })) {
      lock.unlock();  // a GPU that has failed calls no host function any more
      const cuda::Result state = copied ? cuda::GetDriver().event_query(copied.get()) : 0;
      if (state != kNotReady) cuda::Check(state, "the copy of ids to the host");
      lock.lock();
    }
    if (!error.empty()) throw std::runtime_error(error);
    return request;
  }

  // No gather will come.
  void Drop() {
    std::lock_guard<std::mutex> lock(mutex);
    dropped = true;
    if (request) reader->Release(request);
  }
};
using StartedPtr = std::shared_ptr<Started>;

// What a kernel reads until its event.
struct InUse {
  Event used;
  std::shared_ptr<RowReader> reader;
  RowReader::RequestPtr request;
  std::shared_ptr<char> positions, rows;
};

struct DriveSide {
  cuda::Stream stream = nullptr;  // of host functions
  std::shared_ptr<EventPool> events = std::make_shared<EventPool>();
  PendingSites<StartedPtr> pending;
  std::deque<InUse> in_use;
};

std::mutex& SideMutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

DriveSide& SideOf(cuda::Context context) {
  static auto* const sides = new std::map<cuda::Context, DriveSide>;
  DriveSide& side = (*sides)[context];
  if (side.stream == nullptr) cuda::Check(cuda::GetDriver().stream_create(&side.stream, kNonBlocking), "cuStreamCreate");
  return side;
}

PinnedPool& Pool() {
  static auto* const pool = new std::shared_ptr<PinnedPool>(std::make_shared<PinnedPool>());
  return **pool;
}

// The reader of a table whose number a CPU can read. A copy of it in the GPU's memory is an error, not a crash.
std::shared_ptr<RowReader> PinnedReaderOf(ffi::AnyBuffer table) {
  unsigned type = 0;
  const auto at = reinterpret_cast<DevicePointer>(table.untyped_data());
  if (cuda::GetDriver(cuda::kTables).pointer_get_attribute(&type, kMemoryType, at) == 0 && type == kDeviceMemory) {
    throw CallError(ffi::ErrorCode::kInvalidArgument,
                    "a table on a drive must be read through its array in host memory, got a copy in the GPU's memory, "
                    "such as jax.device_put makes; give the step the table itself");
  }
  return ReaderOf(table);
}

// Gives back what kernels no longer read. The mutex is held.
void GiveBack(DriveSide& side) {
  while (!side.in_use.empty() && cuda::GetDriver().event_query(side.in_use.front().used.get()) == 0) {
    side.in_use.front().reader->Release(side.in_use.front().request);
    side.in_use.pop_front();
  }
}

// An array at another address, of bytes [rows, row] or of `count` elements.
struct ArrayAt {
  ArrayAt(void* data, ffi::DataType type, int64_t rows, int64_t row = -1) : dims{rows, row} {
    raw.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
    raw.dtype = static_cast<XLA_FFI_DataType>(type);
    raw.data = data;
    raw.rank = row < 0 ? 1 : 2;
    raw.dims = dims;
  }
  ffi::AnyBuffer buffer() { return ffi::AnyBuffer(&raw); }

  int64_t dims[2];
  XLA_FFI_Buffer raw = {};
};

bool AreWide(ffi::AnyBuffer ids) { return ids.element_type() == ffi::DataType::S64; }

void BeginOnHost(void* started) {
  const std::unique_ptr<StartedPtr> owned(static_cast<StartedPtr*>(started));
  (*owned)->Begin();
}

StartedPtr MakeStarted(const std::shared_ptr<RowReader>& reader, ffi::AnyBuffer ids, bool clip) {
  const auto started = std::make_shared<Started>();
  started->reader = reader;
  started->ids = Pool().Get(ids.size_bytes());
  started->count = static_cast<int64_t>(ids.element_count());
  started->wide = AreWide(ids);
  started->clip = clip;
  return started;
}

void CopyIds(const Started& started, ffi::AnyBuffer ids, cuda::Stream stream) {
  cuda::Check(cuda::GetDriver().copy_device_to_host(started.ids.get(), reinterpret_cast<DevicePointer>(ids.untyped_data()),
                                                    ids.size_bytes(), stream),
              "cuMemcpyDtoHAsync");
}

ffi::Error StartOnCuda(cuda::Stream stream, ffi::RunId run, ffi::AnyBuffer table, ffi::AnyBuffer ids,
                       ffi::RemainingArgs through, ffi::Result<ffi::AnyBuffer> ticket, ffi::RemainingRets passed, bool clip,
                       int64_t site, int64_t place) {
  return ReportedGather([&] {
    const cuda::Context context = StreamContext(stream);
    const cuda::ContextScope scope(context);
    const cuda::Driver& driver = cuda::GetDriver();
    if (driver.launch_host_func == nullptr) {
      throw CallError(ffi::ErrorCode::kUnavailable, "the NVIDIA driver lacks cuLaunchHostFunc; install a newer one");
    }
    const void* from = nullptr;
    if (static_cast<ChainPlace>(place) != ChainPlace::kAlone) {
      const auto in = through.get<ffi::AnyBuffer>(0);
      if (in.has_error()) throw CallError(ffi::ErrorCode::kInvalidArgument, "a start in a loop needs its ticket");
      from = in->untyped_data();
    }
    PassThrough(through, passed, [&](void* to, const void* data, size_t bytes) {
      cuda::Check(driver.copy_device_to_device(reinterpret_cast<DevicePointer>(to), reinterpret_cast<DevicePointer>(data),
                                               bytes, stream),
                  "cuMemcpyDtoDAsync");
    });
    const StartedPtr started = MakeStarted(PinnedReaderOf(table), ids, clip);
    std::lock_guard<std::mutex> lock(SideMutex());
    DriveSide& side = SideOf(context);
    GiveBack(side);
    side.pending.DropOthers(run.run_id, [](const StartedPtr& lost) { lost->Drop(); });
    CopyIds(*started, ids, stream);  // in the order of compute: XLA may use the ids' memory again afterwards
    started->copied = side.events->Record(stream);
    offload::Wait(side.stream, started->copied);
    auto owned = std::make_unique<StartedPtr>(started);
    cuda::Check(driver.launch_host_func(side.stream, &BeginOnHost, owned.get()), "cuLaunchHostFunc");
    static_cast<void>(owned.release());
    if (side.pending.Add(run.run_id, site, static_cast<ChainPlace>(place), from, ticket->untyped_data(), started) !=
        Found::kYes) {
      started->Drop();
      throw CallError(ffi::ErrorCode::kFailedPrecondition, "a start in a loop found no start before it");
    }
  });
}

// The start that a gather ends, with its request begun.
StartedPtr TakeStarted(cuda::Context context, cuda::Stream stream, int64_t run, int64_t site, ffi::AnyBuffer ticket,
                       const std::shared_ptr<RowReader>& reader, ffi::AnyBuffer ids, bool clip) {
  StartedPtr started;
  if (ticket.element_count() > 0) {
    std::lock_guard<std::mutex> lock(SideMutex());
    if (SideOf(context).pending.Take(run, site, ticket.untyped_data(), &started) == Found::kYes) {
      if (started->count == static_cast<int64_t>(ids.element_count())) return started;
      started->Drop();
    }
    throw CallError(ffi::ErrorCode::kFailedPrecondition,
                    "gather_done found no gather_start of its own in this execution; both must be in one jitted function");
  }
  started = MakeStarted(reader, ids, clip);
  CopyIds(*started, ids, stream);
  cuda::Check(cuda::GetDriver().stream_synchronize(stream), "cuStreamSynchronize");
  {
    std::lock_guard<std::mutex> lock(SideMutex());
    GiveBack(SideOf(context));  // the cache has room again for the rows of gathers that have ended
  }
  started->Begin();
  return started;
}

// Where the kernel finds rows: in pinned memory that begins at `data`.
struct PinnedRows {
  char* data;
  int64_t count;
  std::shared_ptr<char> owned;  // null: they lie in the cache
};

// The rows of a request that found the cache full lie partly in memory that kernels cannot read. All of them are copied.
PinnedRows CopiedRows(const RowReader::Options& options, const RowReader::Request& request) {
  const int64_t row_bytes = options.layout.row_bytes, count = static_cast<int64_t>(request.places.size());
  const std::shared_ptr<char> rows = Pool().Get(static_cast<size_t>(count * row_bytes));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t place = request.places[i];
    if (place < 0) continue;
    const char* from = place < options.slots ? options.cache + place * row_bytes
                                             : request.more.get() + (place - options.slots) * row_bytes;
    std::memcpy(rows.get() + i * row_bytes, from, static_cast<size_t>(row_bytes));
  }
  return {rows.get(), count, rows};
}

// The position of each id's row; -1 for a row of fill.
template <typename Id>
void WritePositions(const RowReader::Request& request, bool copied, char* out) {
  auto* to = reinterpret_cast<Id*>(out);
  for (size_t i = 0; i < request.places.size(); ++i) {
    const int64_t place = request.places[i];
    to[i] = static_cast<Id>(copied && place >= 0 ? static_cast<int64_t>(i) : place);
  }
}

ffi::Error GatherOnCuda(cuda::Stream stream, ffi::RunId run, ffi::AnyBuffer ticket, ffi::AnyBuffer table,
                        ffi::AnyBuffer ids, ffi::Buffer<ffi::F32> scale, ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> out,
                        DriveGatherAttributes how) {
  return ReportedGather([&] {
    const cuda::Context context = StreamContext(stream);
    const cuda::ContextScope scope(context);
    const auto reader = PinnedReaderOf(table);
    const RowReader::Use use(reader.get());
    CheckDriveGather(*reader, how, ids, static_cast<int64_t>(out->size_bytes()));
    const StartedPtr started = TakeStarted(context, stream, run.run_id, how.site, ticket, reader, ids, how.clip);
    const RowReader::RequestPtr begun = started->Request();
    HeldRequest request(reader.get(), begun);
    RequireInside(*reader, *begun, how);
    reader->Wait(begun);
    const RowReader::Options& options = reader->options();
    PinnedRows there{options.cache, options.slots, nullptr};
    if (begun->more_rows > 0) there = CopiedRows(options, *begun);
    const std::shared_ptr<char> positions = Pool().Get(ids.size_bytes());
    started->wide ? WritePositions<int64_t>(*begun, there.owned != nullptr, positions.get())
                  : WritePositions<int32_t>(*begun, there.owned != nullptr, positions.get());
    ArrayAt rows(there.data, ffi::DataType::U8, there.count, how.row_bytes);
    ArrayAt at(positions.get(), ids.element_type(), started->count), none(nullptr, ffi::DataType::S32, 0);
    how.clip = how.raises = false;  // positions are right, or -1
    LaunchGather({rows.buffer(), at.buffer(), none.buffer(), none.buffer(), none.buffer(), scale, how}, out->untyped_data(),
                 static_cast<int64_t>(out->size_bytes()), nullptr, context, stream);
    std::lock_guard<std::mutex> lock(SideMutex());
    DriveSide& side = SideOf(context);
    side.in_use.push_back({side.events->Record(stream), reader, request.Hand(), positions, there.owned});
    GiveBack(side);
  });
}

DEJAX_FFI_HANDLER("dejax_drive_start", "CUDA",
                  ffi::Ffi::Bind()
                      .Ctx<ffi::PlatformStream<cuda::Stream>>()
                      .Ctx<ffi::RunId>()
                      .Arg<ffi::AnyBuffer>()
                      .Arg<ffi::AnyBuffer>()
                      .RemainingArgs()
                      .Ret<ffi::AnyBuffer>()
                      .RemainingRets()
                      .Attr<bool>("clip")
                      .Attr<int64_t>("site")
                      .Attr<int64_t>("place")
                      .To(StartOnCuda));
DEJAX_FFI_HANDLER("dejax_drive_gather", "CUDA",
                  ffi::Ffi::Bind()
                      .Ctx<ffi::PlatformStream<cuda::Stream>>()
                      .Ctx<ffi::RunId>()
                      .Arg<ffi::AnyBuffer>()
                      .Arg<ffi::AnyBuffer>()
                      .Arg<ffi::AnyBuffer>()
                      .Arg<ffi::Buffer<ffi::F32>>()
                      .RemainingArgs()
                      .Ret<ffi::AnyBuffer>()
                      .Attrs<DriveGatherAttributes>()
                      .To(GatherOnCuda));

}  // namespace
}  // namespace dejax
