// The CUDA handlers of table_gather.h: they launch the kernels of dejax/host_gather/kernels/gather.cu.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>

#include "cuda_launch.h"
#include "table_gather_cuda.h"

namespace ffi = xla::ffi;

namespace dejax {
namespace {

using cuda::DevicePointer;

constexpr unsigned kThreads = 1024;
constexpr int64_t kMaxRowBytes = 1 << 30;  // the kernel counts bytes of a row in 32 bits

ffi::Error Failed(ffi::ErrorCode code, const std::string& what) { return GatherError(code, what); }

std::atomic<volatile long long*> error_words{nullptr};

// Two words of pinned memory into which kernels report an id out of range; made on first use, in the current context, and
// seen by all devices. Null where there is no memory: the next call tries again.
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

// Which lanes of a warp read which chunks of rows that touch `touched` bytes: no line is read by two instructions.
void SetLanes(int64_t touched, int64_t align, GatherParams* p) {
  int64_t chunks = (touched + 15) / 16;
  if (align == 128) chunks = (chunks + 7) / 8 * 8;
  p->chunks = static_cast<int>(chunks);
  p->lanes = static_cast<int>(chunks % 8 == 0 || chunks > 32 ? 32 : 32 / chunks * chunks);
  p->align = static_cast<int>(align);
}

}  // namespace

ffi::Error LaunchGather(const GatherCall& g, void* out, int64_t out_bytes, void* ticket, cuda::Context context,
                        cuda::Stream stream) {
  if (g.fill.size() != 16 || g.fan_out < 1 || g.row_bytes < 0 || g.row_bytes > kMaxRowBytes || g.grid < 1 ||
      (g.align & (g.align - 1)) != 0 || g.align < 16) {
    return Failed(ffi::ErrorCode::kInvalidArgument, "the attributes do not fit together");
  }
  const int64_t ids = static_cast<int64_t>(g.ids.element_count()), rows = g.table.dimensions()[0];
  GatherSizes sizes;
  sizes.ids = ids;
  sizes.ids_are_integers =
      g.ids.element_type() == ffi::DataType::S64 || g.ids.element_type() == ffi::DataType::S32;
  sizes.perm = static_cast<int64_t>(g.perm.element_count());
  sizes.slots = static_cast<int64_t>(g.slots.element_count());
  sizes.cache_bytes = static_cast<int64_t>(g.cache.size_bytes());
  sizes.scale = static_cast<int64_t>(g.scale.element_count());
  sizes.rows = rows;
  sizes.table_bytes = static_cast<int64_t>(g.table.size_bytes());
  sizes.out_bytes = out_bytes;
  sizes.source = g.source;
  sizes.result = g.result;
  sizes.row_bytes = g.row_bytes;
  sizes.fan_out = g.fan_out;
  sizes.mean = g.mean;
  if (const char* misfit = sizes.Misfit()) return Failed(ffi::ErrorCode::kInvalidArgument, misfit);
  if (ids == 0 || g.row_bytes == 0) return ffi::Error::Success();
  std::string why;
  cuda::Function kernel = cuda::FindKernel(g.kernel, context, &why);
  if (kernel == nullptr) return Failed(ffi::ErrorCode::kInternal, why);
  GatherParams p = {};
  p.table = static_cast<const char*>(g.table.untyped_data());
  p.table_end = p.table + g.table.size_bytes();
  p.ids = g.ids.untyped_data();
  const bool sorted = g.perm.element_count() > 0;
  p.perm = sorted ? static_cast<const int*>(g.perm.untyped_data()) : nullptr;
  p.slots = static_cast<const int*>(g.slots.untyped_data());
  p.cache = static_cast<const char*>(g.cache.untyped_data());
  p.cache_end = p.cache + g.cache.size_bytes();
  p.scale = g.scale.typed_data();
  p.out = static_cast<char*>(out);
  p.ticket = static_cast<unsigned long long*>(ticket);
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
  SetLanes(g.row_bytes + offset, align, &p);
  p.fan_out = static_cast<int>(g.fan_out);
  p.clip = g.clip;
  p.fill_value = g.fill_value;
  std::memcpy(p.fill.bytes, g.fill.begin(), 16);
  if (g.raises) {
    volatile long long* words = ErrorWords();
    if (words == nullptr) {
      return Failed(ffi::ErrorCode::kResourceExhausted,
                    "no pinned memory for the 64 bytes into which mode='raise' reports ids out of range");
    }
    p.error = words;
    if (words[0] != 0) {
      const long long id = words[1];
      words[0] = 0;
      return Failed(ffi::ErrorCode::kOutOfRange, "id " + std::to_string(id) + " was out of range in an earlier call");
    }
  }
  const cuda::Api& api = *cuda::GetApi(nullptr);
  const cuda::LaunchApi& launch = *cuda::GetLaunchApi(nullptr);
  // No more warps than there is work.
  const int64_t steps = (p.n * p.chunks + p.lanes * kUnroll - 1) / (p.lanes * kUnroll);
  const unsigned threads = static_cast<unsigned>(std::clamp<int64_t>((steps + g.grid - 1) / g.grid * 32, 32, kThreads));
  const unsigned grid = static_cast<unsigned>(std::min<int64_t>(g.grid, std::max<int64_t>(1, steps)));
  void* arguments[] = {&p};
  if (auto result = launch.launch_kernel(kernel, grid, 1, 1, threads, 1, 1, 0, stream, arguments, nullptr)) {
    return Failed(ffi::ErrorCode::kInternal, "cuLaunchKernel failed: " + cuda::ErrorName(api, result));
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
  // While a stream is captured into a graph it cannot be asked; XLA makes the context current before it captures.
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
                  int64_t row_bytes, int64_t fan_out, bool mean, bool clip, bool raises, float fill_value,
                  ffi::Span<const uint8_t> fill, int64_t kernel, int64_t grid, int64_t align) {
  cuda::Context context = nullptr;
  if (auto error = StreamContext(stream, &context); error.failure()) return error;
  cuda::CurrentContext current(context);
  void* ticket = perm.element_count() > 0 ? scratch->untyped_data() : nullptr;
  if (ticket != nullptr) {
    if (auto error = ZeroTicket(ticket, stream); error.failure()) return error;
  }
  return LaunchGather({table, ids, perm, slots, cache, scale, source, result, row_bytes, fan_out, mean, clip, raises,
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
  volatile long long* words = error_words;  // none where no gather has asked for them
  if (words == nullptr || words[0] == 0) return false;
  *id = words[1];
  words[0] = 0;
  return true;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(TableGatherCuda, OnCuda,
                              ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cuda::Stream>>() DEJAX_GATHER_SIGNATURE,
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace dejax
