// The CUDA handler of table_gather.h. It launches the kernels of dejax/host_gather/kernels/gather.cu.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>

#include "driver/cuda_launch.h"
#include "tables/table_gather_cuda.h"

namespace ffi = xla::ffi;

namespace dejax {
namespace {

using cuda::DevicePointer;

constexpr unsigned kThreads = 1024;
constexpr int64_t kMaxRowBytes = 1 << 30;  // the kernel counts the bytes of a row in 32 bits

ffi::Error Failed(ffi::ErrorCode code, const std::string& what) { return GatherError(code, what); }

std::atomic<volatile long long*> error_words{nullptr};

// Two words of pinned memory into which kernels report an id out of range. They are allocated on first use, in the
// current context, and all devices can write them. Null where there is no memory: the next call tries again.
volatile long long* ErrorWords() {
  static auto* const mutex = new std::mutex;
  std::lock_guard<std::mutex> lock(*mutex);
  if (error_words == nullptr) {
    void* data = nullptr;
    if (cuda::GetLaunchApi(nullptr)->mem_host_alloc(&data, 64, 3) != 0) return nullptr;
    std::memset(data, 0, 64);
    error_words = static_cast<volatile long long*>(data);
  }
  return error_words;
}

ffi::Error CheckCall(const GatherCall& call, int64_t out_bytes) {
  if (call.fill.size() != 16 || call.fan_out < 1 || call.row_bytes < 0 || call.row_bytes > kMaxRowBytes ||
      call.grid < 1 || (call.align & (call.align - 1)) != 0 || call.align < 16) {
    return Failed(ffi::ErrorCode::kInvalidArgument, "the attributes do not fit together");
  }
  GatherSizes sizes;
  sizes.ids = static_cast<int64_t>(call.ids.element_count());
  sizes.ids_are_integers =
      call.ids.element_type() == ffi::DataType::S64 || call.ids.element_type() == ffi::DataType::S32;
  sizes.perm = static_cast<int64_t>(call.perm.element_count());
  sizes.slots = static_cast<int64_t>(call.slots.element_count());
  sizes.cache_bytes = static_cast<int64_t>(call.cache.size_bytes());
  sizes.scale = static_cast<int64_t>(call.scale.element_count());
  sizes.rows = call.rows();
  sizes.table_rows = call.table.dimensions()[0];
  sizes.split = call.split;
  sizes.table_bytes = static_cast<int64_t>(call.table.size_bytes());
  sizes.out_bytes = out_bytes;
  sizes.source = call.source;
  sizes.result = call.result;
  sizes.row_bytes = call.row_bytes;
  sizes.fan_out = call.fan_out;
  sizes.mean = call.mean;
  if (const char* misfit = sizes.Misfit()) return Failed(ffi::ErrorCode::kInvalidArgument, misfit);
  return ffi::Error::Success();
}

// The kernel's parameters except lanes and errors.
GatherParams Params(const GatherCall& call, void* out, void* ticket) {
  GatherParams p = {};
  p.table = static_cast<const char*>(call.table.untyped_data());
  p.table_end = p.table + call.table.size_bytes();
  p.ids = call.ids.untyped_data();
  p.perm = call.perm.element_count() > 0 ? static_cast<const int*>(call.perm.untyped_data()) : nullptr;
  p.slots = static_cast<const int*>(call.slots.untyped_data());
  p.cache = static_cast<const char*>(call.cache.untyped_data());
  p.cache_end = p.cache + call.cache.size_bytes();
  p.scale = call.scale.typed_data();
  p.out = static_cast<char*>(out);
  p.ticket = static_cast<unsigned long long*>(ticket);
  const int64_t ids = static_cast<int64_t>(call.ids.element_count());
  p.n = call.mean ? ids / call.fan_out : ids;
  p.rows = call.rows();
  p.scale_count = static_cast<long long>(call.scale.element_count());
  p.row_bytes = static_cast<int>(call.row_bytes);
  p.fan_out = static_cast<int>(call.fan_out);
  p.clip = call.clip;
  p.fill_value = call.fill_value;
  std::memcpy(p.fill.bytes, call.fill.begin(), 16);
  return p;
}

// Assigns the chunks of a row to lanes of a warp, such that no two instructions read the same line.
void SetLanes(const GatherCall& call, GatherParams* p) {
  // Rows of whole lines begin at the beginning of a line only if the table does.
  const bool aligned = reinterpret_cast<uintptr_t>(p->table) % static_cast<uintptr_t>(call.align) == 0;
  const int64_t align = aligned ? call.align : 16, unit = call.row_bytes & -call.row_bytes;
  // The most bytes between a boundary of `align` and the beginning of a row after it.
  const int64_t offset = unit >= align ? 0 : align - std::min<int64_t>(unit, 16);
  int64_t chunks = (call.row_bytes + offset + 15) / 16;
  if (align == 128) chunks = (chunks + 7) / 8 * 8;
  p->chunks = static_cast<int>(chunks);
  p->lanes = static_cast<int>(chunks % 8 == 0 || chunks > 32 ? 32 : 32 / chunks * chunks);
  p->align = static_cast<int>(align);
}

// Lets the kernel report ids out of range; fails if an earlier kernel has reported one.
ffi::Error ReportErrors(GatherParams* p) {
  volatile long long* words = ErrorWords();
  if (words == nullptr) {
    return Failed(ffi::ErrorCode::kResourceExhausted,
                  "no pinned memory for the 64 bytes into which mode='raise' reports ids out of range");
  }
  p->error = words;
  if (words[0] == 0) return ffi::Error::Success();
  const long long id = words[1];
  words[0] = 0;
  return Failed(ffi::ErrorCode::kOutOfRange, "id " + std::to_string(id) + " was out of range in an earlier call");
}

}  // namespace

ffi::Error LaunchGather(const GatherCall& call, void* out, int64_t out_bytes, void* ticket, cuda::Context context,
                        cuda::Stream stream) {
  if (auto error = CheckCall(call, out_bytes); error.failure()) return error;
  if (call.ids.element_count() == 0 || call.row_bytes == 0) return ffi::Error::Success();
  std::string why;
  cuda::Function kernel = cuda::FindKernel(call.kernel, context, &why);
  if (kernel == nullptr) return Failed(ffi::ErrorCode::kInternal, why);
  GatherParams p = Params(call, out, ticket);
  if (reinterpret_cast<uintptr_t>(p.table) % 16 != 0) {
    return Failed(ffi::ErrorCode::kInvalidArgument, "the table does not begin at a multiple of 16 bytes");
  }
  SetLanes(call, &p);
  if (call.raises) {
    if (auto error = ReportErrors(&p); error.failure()) return error;
  }
  // No more warps than there is work.
  const int64_t steps = (p.n * p.chunks + p.lanes * kUnroll - 1) / (p.lanes * kUnroll);
  const unsigned threads =
      static_cast<unsigned>(std::clamp<int64_t>((steps + call.grid - 1) / call.grid * 32, 32, kThreads));
  const unsigned grid = static_cast<unsigned>(std::min<int64_t>(call.grid, std::max<int64_t>(1, steps)));
  void* arguments[] = {&p};
  const cuda::LaunchApi& launch = *cuda::GetLaunchApi(nullptr);
  if (auto result = launch.launch_kernel(kernel, grid, 1, 1, threads, 1, 1, 0, stream, arguments, nullptr)) {
    return Failed(ffi::ErrorCode::kInternal,
                  "cuLaunchKernel failed: " + cuda::ErrorName(*cuda::GetApi(nullptr), result));
  }
  return ffi::Error::Success();
}

ffi::Error ZeroTicket(void* ticket, cuda::Stream stream) {
  const auto at = reinterpret_cast<DevicePointer>(ticket);
  if (auto result = cuda::GetLaunchApi(nullptr)->memset_d8_async(at, 0, 8, stream)) {
    return Failed(ffi::ErrorCode::kInternal,
                  "cuMemsetD8Async failed: " + cuda::ErrorName(*cuda::GetApi(nullptr), result));
  }
  return ffi::Error::Success();
}

ffi::Error StreamContext(cuda::Stream stream, cuda::Context* context) {
  std::string why;
  const cuda::LaunchApi* launch = cuda::GetLaunchApi(&why);
  if (launch == nullptr) return Failed(ffi::ErrorCode::kUnavailable, why);
  // A stream that is being captured into a graph has no context to ask for. XLA makes the context current before.
  if (launch->ctx_get_current(context) != 0 || *context == nullptr) {
    if (auto result = cuda::GetApi(nullptr)->stream_get_ctx(stream, context)) {
      return Failed(ffi::ErrorCode::kInternal,
                    "cuStreamGetCtx failed: " + cuda::ErrorName(*cuda::GetApi(nullptr), result));
    }
  }
  return ffi::Error::Success();
}

namespace {

ffi::Error OnCuda(cuda::Stream stream, ffi::AnyBuffer table, ffi::AnyBuffer ids, ffi::AnyBuffer perm,
                  ffi::AnyBuffer slots, ffi::AnyBuffer cache, ffi::Buffer<ffi::F32> scale,
                  ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> scratch, int64_t source, int64_t result,
                  int64_t row_bytes, int64_t fan_out, bool mean, bool clip, bool raises, bool split, float fill_value,
                  ffi::Span<const uint8_t> fill, int64_t kernel, int64_t grid, int64_t align) {
  cuda::Context context = nullptr;
  if (auto error = StreamContext(stream, &context); error.failure()) return error;
  cuda::CurrentContext current(context);
  void* ticket = perm.element_count() > 0 ? scratch->untyped_data() : nullptr;
  if (ticket != nullptr) {
    if (auto error = ZeroTicket(ticket, stream); error.failure()) return error;
  }
  return LaunchGather({table, ids, perm, slots, cache, scale, source, result, row_bytes, fan_out, mean, clip, raises, split,
                       fill_value, fill, kernel, grid, align},
                      out->untyped_data(), static_cast<int64_t>(out->size_bytes()), ticket, context, stream);
}

}  // namespace

bool PrepareGatherErrors(int ordinal) {
  std::string why;
  cuda::Context context = cuda::PrimaryContext(ordinal, &why);
  if (context == nullptr) return false;
  cuda::CurrentContext current(context);
  return ErrorWords() != nullptr;
}

bool TakeGatherError(long long* id) {
  volatile long long* words = error_words;  // null if no gather has needed them
  if (words == nullptr || words[0] == 0) return false;
  *id = words[1];
  words[0] = 0;
  return true;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(TableGatherCuda, OnCuda,
                              ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cuda::Stream>>() DEJAX_GATHER_SIGNATURE,
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace dejax
