// The CUDA handlers of table_gather.h: they launch the kernels of dejax/host_gather/kernels/gather.cu.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "cuda_launch.h"
#include "table_gather.h"

namespace ffi = xla::ffi;

namespace dejax {
namespace {

using cuda::DevicePointer;

constexpr unsigned kThreads = 1024;
constexpr int kUnroll = 4;                 // as in gather.cu
constexpr int64_t kMaxRowBytes = 1 << 30;  // the kernel counts bytes of a row in 32 bits
constexpr int kReleaseThreshold = 4;       // CU_MEMPOOL_ATTR_RELEASE_THRESHOLD

struct alignas(16) Vector4 {
  uint8_t bytes[16];
};

// As in gather.cu, member by member.
struct Params {
  const void* table;
  const void* table_end;
  const void* ids;
  const void* perm;
  const void* slots;
  const void* cache;
  const void* cache_end;
  const void* scale;
  void* out;
  void* ticket;
  void* error;
  long long n;
  long long rows;
  long long scale_count;
  int row_bytes;
  int chunks;
  int align;
  int fan_out;
  int clip;
  float fill_value;
  Vector4 fill;
};

ffi::Error Failed(ffi::ErrorCode code, const std::string& what) {
  return ffi::Error(code, "dejax.host_gather.gather: " + what);
}

// Two words of pinned memory into which kernels report an id out of range; made on first use.
volatile long long* ErrorWords() {
  static volatile long long* const words = [] {
    std::string why;
    void* data = nullptr;
    cuda::Context context = cuda::PrimaryContext(0, &why);
    if (context == nullptr) return static_cast<volatile long long*>(nullptr);
    cuda::CurrentContext current(context);
    if (cuda::GetLaunchApi(nullptr)->mem_host_alloc(&data, 64, 3) != 0)
      return static_cast<volatile long long*>(nullptr);
    std::memset(data, 0, 64);
    return static_cast<volatile long long*>(data);
  }();
  return words;
}

struct Gather {
  ffi::AnyBuffer table, ids, perm, slots, cache;
  ffi::Buffer<ffi::F32> scale;
  int64_t source, result, row_bytes, fan_out;
  bool mean, clip, raises;
  float fill_value;
  ffi::Span<const uint8_t> fill;
  int64_t kernel, grid, align;
};

// Launches on `stream`, whose context is current.
ffi::Error Launch(const Gather& g, void* out, int64_t out_bytes, void* ticket, cuda::Context context,
                  cuda::Stream stream) {
  if (g.fill.size() != 16 || g.fan_out < 1 || g.row_bytes < 0 || g.row_bytes > kMaxRowBytes || g.grid < 1 ||
      (g.align & (g.align - 1)) != 0 || g.align < 16) {
    return Failed(ffi::ErrorCode::kInvalidArgument, "the attributes do not fit together");
  }
  const int64_t ids = static_cast<int64_t>(g.ids.element_count()), rows = g.table.dimensions()[0];
  if (ids == 0 || g.row_bytes == 0) return ffi::Error::Success();
  if (static_cast<int64_t>(g.table.size_bytes()) != rows * g.row_bytes ||
      (g.source < 0 && out_bytes != ids * g.row_bytes)) {
    return Failed(ffi::ErrorCode::kInvalidArgument, "table, rows and result do not fit together");
  }
  std::string why;
  cuda::Function kernel = cuda::FindKernel(g.kernel, context, &why);
  if (kernel == nullptr) return Failed(ffi::ErrorCode::kInternal, why);
  Params p = {};
  p.table = g.table.untyped_data();
  p.table_end = static_cast<const char*>(p.table) + g.table.size_bytes();
  p.ids = g.ids.untyped_data();
  const bool sorted = g.perm.element_count() > 0;
  p.perm = sorted ? g.perm.untyped_data() : nullptr;
  p.slots = g.slots.untyped_data();
  p.cache = g.cache.untyped_data();
  p.cache_end = static_cast<const char*>(p.cache) + g.cache.size_bytes();
  p.scale = g.scale.untyped_data();
  p.out = out;
  p.ticket = ticket;
  p.n = g.mean ? ids / g.fan_out : ids;
  p.rows = rows;
  p.scale_count = static_cast<long long>(g.scale.element_count());
  p.row_bytes = static_cast<int>(g.row_bytes);
  const uintptr_t address = reinterpret_cast<uintptr_t>(p.table);
  if (address % 16 != 0)
    return Failed(ffi::ErrorCode::kInvalidArgument, "the table does not begin at a multiple of 16 bytes");
  // A row that begins `offset` bytes after a boundary of `align` touches this many chunks at most. Rows of whole lines
  // begin at one only where the table does.
  const int64_t unit = g.row_bytes & -g.row_bytes;
  const int64_t align = address % static_cast<uintptr_t>(g.align) == 0 ? g.align : 16;
  const int64_t offset = unit >= align ? 0 : align - std::min<int64_t>(unit, 16);
  p.chunks = static_cast<int>((g.row_bytes + offset + 15) / 16);
  p.align = static_cast<int>(align);
  p.fan_out = static_cast<int>(g.fan_out);
  p.clip = g.clip;
  p.fill_value = g.fill_value;
  std::memcpy(p.fill.bytes, g.fill.begin(), 16);
  if (g.raises) {
    volatile long long* words = ErrorWords();
    p.error = const_cast<long long*>(words);
    if (words != nullptr && words[0] != 0) {
      const long long id = words[1];
      words[0] = 0;
      return Failed(ffi::ErrorCode::kOutOfRange, "id " + std::to_string(id) + " was out of range in an earlier call");
    }
  }
  const cuda::Api& api = *cuda::GetApi(nullptr);
  const cuda::LaunchApi& launch = *cuda::GetLaunchApi(nullptr);
  if (sorted) {
    if (auto result = launch.memset_d8_async(reinterpret_cast<DevicePointer>(ticket), 0, 8, stream)) {
      return Failed(ffi::ErrorCode::kInternal, "cuMemsetD8Async failed: " + cuda::ErrorName(api, result));
    }
  }
  // No more warps than there is work.
  const int64_t steps = (p.n * p.chunks + 32 * kUnroll - 1) / (32 * kUnroll);
  const unsigned threads = static_cast<unsigned>(std::clamp<int64_t>((steps + g.grid - 1) / g.grid * 32, 32, kThreads));
  const unsigned grid = static_cast<unsigned>(std::min<int64_t>(g.grid, std::max<int64_t>(1, steps)));
  void* arguments[] = {&p};
  if (auto result = launch.launch_kernel(kernel, grid, 1, 1, threads, 1, 1, 0, stream, arguments, nullptr)) {
    return Failed(ffi::ErrorCode::kInternal, "cuLaunchKernel failed: " + cuda::ErrorName(api, result));
  }
  return ffi::Error::Success();
}

// The context of a stream, and whether everything that a launch needs is there.
ffi::Error Context(cuda::Stream stream, cuda::Context* context) {
  std::string why;
  const cuda::LaunchApi* launch = cuda::GetLaunchApi(&why);
  if (launch == nullptr) return Failed(ffi::ErrorCode::kUnavailable, why);
  // While a stream is captured into a graph it cannot be asked; XLA makes the context current before it captures.
  if (launch->ctx_get_current(context) != 0 || *context == nullptr) {
    if (auto result = cuda::GetApi(nullptr)->stream_get_ctx(stream, context)) {
      return Failed(ffi::ErrorCode::kInternal,
                    "cuStreamGetCtx failed: " + cuda::ErrorName(*cuda::GetApi(nullptr), result));
    }
  }
  return ffi::Error::Success();
}

ffi::Error OnCuda(cuda::Stream stream, ffi::AnyBuffer table, ffi::AnyBuffer ids, ffi::AnyBuffer perm,
                  ffi::AnyBuffer slots, ffi::AnyBuffer cache, ffi::Buffer<ffi::F32> scale,
                  ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> scratch, int64_t source, int64_t result,
                  int64_t row_bytes, int64_t fan_out, bool mean, bool clip, bool raises, float fill_value,
                  ffi::Span<const uint8_t> fill, int64_t kernel, int64_t grid, int64_t align) {
  cuda::Context context = nullptr;
  if (auto error = Context(stream, &context); error.failure()) return error;
  cuda::CurrentContext current(context);
  return Launch({table, ids, perm, slots, cache, scale, source, result, row_bytes, fan_out, mean, clip, raises,
                 fill_value, fill, kernel, grid, align},
                out->untyped_data(), static_cast<int64_t>(out->size_bytes()), scratch->untyped_data(), context, stream);
}

// ------------------------------------------------------------------------------------------------ start and done

// A gather under way: its memory, which XLA knows nothing of, and the event that says it is done.
struct Pending {
  DevicePointer data;
  size_t bytes;
  cuda::Event done;
};

struct Side {
  cuda::Stream stream = nullptr;
  std::map<std::pair<int64_t, int64_t>, std::deque<Pending>> pending;  // by run and site
};

std::mutex& SideMutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

std::map<cuda::Context, Side>& Sides() {
  static auto* const sides = new std::map<cuda::Context, Side>;
  return *sides;
}

ffi::Error Start(cuda::Stream stream, ffi::RunId run, ffi::AnyBuffer table, ffi::AnyBuffer ids, ffi::AnyBuffer perm,
                 ffi::AnyBuffer slots, ffi::AnyBuffer cache, ffi::Buffer<ffi::F32> scale, ffi::RemainingArgs,
                 ffi::Result<ffi::AnyBuffer>, ffi::Result<ffi::AnyBuffer>, ffi::RemainingRets, int64_t source,
                 int64_t result, int64_t row_bytes, int64_t fan_out, bool mean, bool clip, bool raises,
                 float fill_value, ffi::Span<const uint8_t> fill, int64_t kernel, int64_t grid, int64_t align,
                 int64_t site, int64_t out_bytes) {
  cuda::Context context = nullptr;
  if (auto error = Context(stream, &context); error.failure()) return error;
  cuda::CurrentContext current(context);
  const cuda::Api& api = *cuda::GetApi(nullptr);
  const cuda::LaunchApi& launch = *cuda::GetLaunchApi(nullptr);
  std::lock_guard<std::mutex> lock(SideMutex());
  Side& side = Sides()[context];
  cuda::Event ready = nullptr;
  // One allocation: the rows, the ids and their order (XLA may reuse its own as soon as this call returns), the
  // counter.
  const size_t ids_bytes = (ids.size_bytes() + 255) / 256 * 256, perm_bytes = (perm.size_bytes() + 255) / 256 * 256;
  const size_t rows_bytes = (static_cast<size_t>(out_bytes) + 255) / 256 * 256;
  Pending pending = {0, static_cast<size_t>(out_bytes), nullptr};
  const auto failed = [&](const char* call, cuda::Result code) {
    return Failed(ffi::ErrorCode::kInternal,
                  std::string(call) + " failed in gather_start: " + cuda::ErrorName(api, code));
  };
  if (side.stream == nullptr) {
    int least = 0, greatest = 0;
    launch.ctx_get_stream_priority_range(&least, &greatest);
    // Non-blocking, and of the highest priority: its few blocks go first wherever a block of the compute stream ends.
    if (auto code = launch.stream_create_with_priority(&side.stream, 1, greatest))
      return failed("cuStreamCreate", code);
    // Freed memory stays in the pool, rather than go back to the driver whenever somebody synchronises.
    cuda::Device device = 0;
    cuda::MemoryPool pool = nullptr;
    uint64_t everything = UINT64_MAX;
    if (launch.ctx_get_device(&device) == 0 && launch.device_get_default_mem_pool(&pool, device) == 0) {
      launch.mem_pool_set_attribute(pool, kReleaseThreshold, &everything);
    }
  }
  // On the compute stream: allocate, and copy what XLA may overwrite. Then the side stream goes on from there.
  if (auto code = launch.mem_alloc_async(&pending.data, rows_bytes + ids_bytes + perm_bytes + 256, stream)) {
    return failed("cuMemAllocAsync", code);
  }
  const DevicePointer own_ids = pending.data + rows_bytes, own_perm = own_ids + ids_bytes,
                      counter = own_perm + perm_bytes;
  cuda::Result code = 0;
  if (ids.size_bytes()) {
    code = launch.memcpy_dtod_async(own_ids, reinterpret_cast<DevicePointer>(ids.untyped_data()), ids.size_bytes(),
                                    stream);
  }
  if (code == 0 && perm.size_bytes()) {
    code = launch.memcpy_dtod_async(own_perm, reinterpret_cast<DevicePointer>(perm.untyped_data()), perm.size_bytes(),
                                    stream);
  }
  if (code == 0) code = launch.event_create(&ready, 2);  // without timing
  if (code == 0) code = launch.event_create(&pending.done, 2);
  if (code == 0) code = launch.event_record(ready, stream);
  if (code == 0) code = launch.stream_wait_event(side.stream, ready, 0);
  if (code != 0) return failed("cuMemcpyDtoDAsync or an event", code);
  launch.event_destroy(ready);
  // The same arrays at their new places.
  int64_t ids_dims[1], perm_dims[1];
  const auto moved = [](ffi::AnyBuffer from, DevicePointer to, int64_t* dims) {
    XLA_FFI_Buffer raw = {};
    raw.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
    raw.dtype = static_cast<XLA_FFI_DataType>(from.element_type());
    raw.data = reinterpret_cast<void*>(to);
    raw.rank = 1;
    dims[0] = static_cast<int64_t>(from.element_count());
    raw.dims = dims;
    return raw;
  };
  XLA_FFI_Buffer raw_ids = moved(ids, own_ids, ids_dims), raw_perm = moved(perm, own_perm, perm_dims);
  ffi::Error error =
      Launch({table, ffi::AnyBuffer(&raw_ids), ffi::AnyBuffer(&raw_perm), slots, cache, scale, source, result,
              row_bytes, fan_out, mean, clip, raises, fill_value, fill, kernel, grid, align},
             reinterpret_cast<void*>(pending.data), out_bytes, reinterpret_cast<void*>(counter), context, side.stream);
  if (error.failure()) return error;
  if ((code = launch.event_record(pending.done, side.stream))) return failed("cuEventRecord", code);
  side.pending[{run.run_id, site}].push_back(pending);
  return ffi::Error::Success();
}

ffi::Error Done(cuda::Stream stream, ffi::RunId run, ffi::AnyBuffer, ffi::RemainingArgs,
                ffi::Result<ffi::AnyBuffer> out, int64_t site) {
  cuda::Context context = nullptr;
  if (auto error = Context(stream, &context); error.failure()) return error;
  cuda::CurrentContext current(context);
  const cuda::Api& api = *cuda::GetApi(nullptr);
  const cuda::LaunchApi& launch = *cuda::GetLaunchApi(nullptr);
  std::lock_guard<std::mutex> lock(SideMutex());
  Side& side = Sides()[context];
  const auto found = side.pending.find({run.run_id, site});
  if (found == side.pending.end() || found->second.empty() || found->second.front().bytes != out->size_bytes()) {
    return Failed(
        ffi::ErrorCode::kFailedPrecondition,
        "gather_done found no gather_start of its own in this execution; both must be in one jitted function");
  }
  const Pending pending = found->second.front();
  found->second.pop_front();
  if (found->second.empty()) side.pending.erase(found);
  cuda::Result code = launch.stream_wait_event(stream, pending.done, 0);
  if (code == 0 && pending.bytes) {
    code = launch.memcpy_dtod_async(reinterpret_cast<DevicePointer>(out->untyped_data()), pending.data, pending.bytes,
                                    stream);
  }
  if (code == 0) code = launch.mem_free_async(pending.data, stream);
  launch.event_destroy(pending.done);
  if (code != 0) return Failed(ffi::ErrorCode::kInternal, "gather_done failed: " + cuda::ErrorName(api, code));
  return ffi::Error::Success();
}

}  // namespace

int WaitForStarted(cuda::Context context, cuda::Stream stream) {
  std::lock_guard<std::mutex> lock(SideMutex());
  const auto side = Sides().find(context);
  if (side == Sides().end()) return 0;
  for (const auto& [key, queue] : side->second.pending) {
    for (const Pending& pending : queue) {
      if (auto result = cuda::GetLaunchApi(nullptr)->stream_wait_event(stream, pending.done, 0)) return result;
    }
  }
  return 0;
}

bool TakeGatherError(long long* id) {
  std::string why;
  if (cuda::GetLaunchApi(&why) == nullptr) return false;
  volatile long long* words = ErrorWords();
  if (words == nullptr || words[0] == 0) return false;
  *id = words[1];
  words[0] = 0;
  return true;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(TableGatherCuda, OnCuda,
                              ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cuda::Stream>>() DEJAX_GATHER_SIGNATURE,
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(TableGatherStart, Start,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cuda::Stream>>()
                                  .Ctx<ffi::RunId>() DEJAX_GATHER_OPERANDS.RemainingArgs()
                                      DEJAX_GATHER_RESULTS.RemainingRets() DEJAX_GATHER_ATTRIBUTES.Attr<int64_t>("site")
                                  .Attr<int64_t>("out_bytes"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(TableGatherDone, Done,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cuda::Stream>>()
                                  .Ctx<ffi::RunId>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("site"));

}  // namespace dejax
