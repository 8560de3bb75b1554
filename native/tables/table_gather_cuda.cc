// The CUDA handler of table_gather.h. It launches the kernels of dejax/host_gather/kernels/gather.cu.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>

#include "driver/cuda_launch.h"
#include "tables/table_gather_cuda.h"

namespace ffi = xla::ffi;

namespace dejax {
namespace {

using cuda::DevicePointer;

constexpr unsigned kThreads = 1024;
constexpr int64_t kMaxRowBytes = 1 << 30;  // the kernel counts the bytes of a row in 32 bits

std::atomic<volatile long long*> error_words{nullptr};

// Two words of pinned memory into which kernels report an id out of range. They are allocated on first use, in the
// current context, and all devices can write them. Null where there is no memory: the next call tries again.
volatile long long* ErrorWords() {
  static auto* const mutex = new std::mutex;
  std::lock_guard<std::mutex> lock(*mutex);
  if (error_words == nullptr) {
    void* data = nullptr;
    if (cuda::GetDriver(cuda::kTables).host_alloc(&data, 64, 3) != 0) return nullptr;
    std::memset(data, 0, 64);
    error_words = static_cast<volatile long long*>(data);
  }
  return error_words;
}

void CheckCall(const GatherCall& call, int64_t out_bytes) {
  const GatherAttributes& how = call.how;
  const bool fits = how.row_bytes <= kMaxRowBytes && how.grid >= 1 && (how.align & (how.align - 1)) == 0 && how.align >= 16;
  const char* const misfit = fits ? call.Misfit(out_bytes) : "the attributes do not fit together";
  if (misfit != nullptr) throw CallError(ffi::ErrorCode::kInvalidArgument, misfit);
}

// The kernel's parameters except lanes and errors.
GatherParams Params(const GatherCall& call, void* out, void* ticket) {
  GatherParams p = {};
  p.table = static_cast<const char*>(call.table.untyped_data());
  p.table_end = p.table + call.table.size_bytes();
  p.ids = call.ids.untyped_data();
  p.perm = call.perm.element_count() > 0 ? static_cast<const int*>(call.perm.untyped_data()) : nullptr;
  p.slots = static_cast<const int*>(call.slots.untyped_data());
  if (call.how.peers > 0) {
    p.peers = static_cast<const unsigned long long*>(call.cache.untyped_data());
    p.peer_bytes = call.peer_bytes();
  } else {
    p.cache = static_cast<const char*>(call.cache.untyped_data());
    p.cache_end = p.cache + call.cache.size_bytes();
  }
  p.scale = call.scale.typed_data();
  p.out = static_cast<char*>(out);
  p.ticket = static_cast<unsigned long long*>(ticket);
  p.n = call.num_results();
  p.rows = call.num_rows();
  p.scale_count = static_cast<long long>(call.scale.element_count());
  p.row_bytes = static_cast<int>(call.how.row_bytes);
  p.fan_out = static_cast<int>(call.how.fan_out);
  p.clip = call.how.clip;
  p.fill_value = call.how.fill_value;
  std::memcpy(p.fill.bytes, call.how.fill.begin(), 16);
  return p;
}

// Assigns the chunks of a row to lanes of a warp, such that no two instructions read the same line.
void SetLanes(const GatherCall& call, GatherParams* p) {
  // Rows of whole lines begin at the beginning of a line only if the table does.
  const bool aligned = reinterpret_cast<uintptr_t>(p->table) % static_cast<uintptr_t>(call.how.align) == 0;
  const int64_t align = aligned ? call.how.align : 16, unit = call.how.row_bytes & -call.how.row_bytes;
  // The most bytes between a boundary of `align` and the beginning of a row after it.
  const int64_t offset = unit >= align ? 0 : align - std::min<int64_t>(unit, 16);
  int64_t chunks = (call.how.row_bytes + offset + 15) / 16;
  if (align == 128) chunks = (chunks + 7) / 8 * 8;
  p->chunks = static_cast<int>(chunks);
  p->lanes = static_cast<int>(chunks % 8 == 0 || chunks > 32 ? 32 : 32 / chunks * chunks);
  p->align = static_cast<int>(align);
}

// Lets the kernel report ids out of range; throws if an earlier kernel has reported one.
void ReportErrors(GatherParams* p) {
  volatile long long* words = ErrorWords();
  if (words == nullptr) {
    throw CallError(ffi::ErrorCode::kResourceExhausted,
                    "no pinned memory for the 64 bytes into which mode='raise' reports ids out of range");
  }
  p->error = words;
  if (words[0] == 0) return;
  const long long id = words[1];
  words[0] = 0;
  throw CallError(ffi::ErrorCode::kOutOfRange, "id " + std::to_string(id) + " was out of range in an earlier call");
}

}  // namespace

void LaunchGather(const GatherCall& call, void* out, int64_t out_bytes, void* ticket, cuda::Context context,
                  cuda::Stream stream) {
  CheckCall(call, out_bytes);
  if (call.num_ids() == 0 || call.how.row_bytes == 0) return;
  std::string why;
  cuda::Function kernel = cuda::FindKernel(call.how.kernel, context, &why);
  if (kernel == nullptr) throw std::runtime_error(why);
  GatherParams p = Params(call, out, ticket);
  if (reinterpret_cast<uintptr_t>(p.table) % 16 != 0) {
    throw CallError(ffi::ErrorCode::kInvalidArgument, "the table does not begin at a multiple of 16 bytes");
  }
  SetLanes(call, &p);
  if (call.how.raises) ReportErrors(&p);
  // No more warps than there is work.
  const int64_t steps = (p.n * p.chunks + p.lanes * kUnroll - 1) / (p.lanes * kUnroll);
  const unsigned threads =
      static_cast<unsigned>(std::clamp<int64_t>((steps + call.how.grid - 1) / call.how.grid * 32, 32, kThreads));
  const unsigned grid = static_cast<unsigned>(std::min<int64_t>(call.how.grid, std::max<int64_t>(1, steps)));
  void* arguments[] = {&p};
  cuda::Check(cuda::GetDriver(cuda::kTables).launch_kernel(kernel, grid, 1, 1, threads, 1, 1, 0, stream, arguments, nullptr),
              "cuLaunchKernel");
}

void ZeroTicket(void* ticket, cuda::Stream stream) {
  cuda::Check(cuda::GetDriver(cuda::kTables).memset_d8(reinterpret_cast<DevicePointer>(ticket), 0, 8, stream),
              "cuMemsetD8Async");
}

cuda::Context StreamContext(cuda::Stream stream) {
  std::string why;
  const cuda::Driver* driver = cuda::FindDriver(cuda::kTables, &why);
  if (driver == nullptr) throw CallError(ffi::ErrorCode::kUnavailable, why);
  // A stream that is being captured into a graph has no context to ask for. XLA makes the context current before.
  cuda::Context context = nullptr;
  if (driver->ctx_get_current(&context) != 0 || context == nullptr) {
    cuda::Check(driver->stream_get_ctx(stream, &context), "cuStreamGetCtx");
  }
  return context;
}

namespace {

ffi::Error OnCuda(cuda::Stream stream, ffi::AnyBuffer table, ffi::AnyBuffer ids, ffi::AnyBuffer perm,
                  ffi::AnyBuffer slots, ffi::AnyBuffer cache, ffi::Buffer<ffi::F32> scale,
                  ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> scratch, GatherAttributes how) {
  return ReportedGather([&] {
    const cuda::Context context = StreamContext(stream);
    const cuda::ContextScope scope(context);
    void* ticket = perm.element_count() > 0 ? scratch->untyped_data() : nullptr;
    if (ticket != nullptr) ZeroTicket(ticket, stream);
    LaunchGather({table, ids, perm, slots, cache, scale, how}, out->untyped_data(),
                 static_cast<int64_t>(out->size_bytes()), ticket, context, stream);
  });
}

DEJAX_FFI_HANDLER("dejax_table_gather", "CUDA",
                  ffi::Ffi::Bind()
                      .Ctx<ffi::PlatformStream<cuda::Stream>>() DEJAX_GATHER_OPERANDS DEJAX_GATHER_RESULTS
                      .Attrs<GatherAttributes>()
                      .To(OnCuda, {ffi::Traits::kCmdBufferCompatible}));

}  // namespace

bool PrepareGatherErrors(int ordinal) {
  std::string why;
  cuda::Context context = cuda::PrimaryContext(ordinal, &why);
  if (context == nullptr) return false;
  const cuda::ContextScope scope(context);
  return ErrorWords() != nullptr;
}

bool TakeGatherError(long long* id) {
  volatile long long* words = error_words;  // null if no gather has needed them
  if (words == nullptr || words[0] == 0) return false;
  *id = words[1];
  words[0] = 0;
  return true;
}

}  // namespace dejax
