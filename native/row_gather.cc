#include "row_gather.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "thread_pool.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace dejax {
namespace {

// Bytes of the result that one thread copies at a time; a smaller result is copied by one thread. Waking another thread
// costs about 10 us, in which one core copies about that much.
constexpr int64_t kBytesPerRange = 128 * 1024;
// Rows are far apart, so the hardware does not predict them: prefetch some rows ahead, at most so many bytes of each.
constexpr int64_t kPrefetchRows = 8;
constexpr int64_t kPrefetchBytes = 256;

// A large result is fresh memory. Touching it first in pages of 4 KiB costs as much as the copy: 128 MiB took 105 ms on two
// busy cores instead of 60 ms with huge pages.
constexpr int64_t kHugePage = 2 << 20;

void AskForHugePages(uint8_t* data, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kHugePage * kHugePage;
  // This is advice: if the kernel declines, nothing is lost.
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

struct Plan {
  const uint8_t* table;
  const void* ids;
  uint8_t* out;
  const uint8_t* fill_row;
  int64_t rows;  // of one table
  int64_t row_bytes;
  int64_t ids_per_batch;
  int64_t count;                      // rows of the result
  std::vector<int64_t> batch;         // batch dimensions of the result
  std::vector<int64_t> table_stride;  // in tables, 0 for a broadcast dimension
  std::vector<int64_t> ids_stride;    // in blocks of ids, 0 for a broadcast dimension
  bool clip;
};

// The table and the block of ids of batch index `b` (row-major over plan.batch).
void Locate(const Plan& plan, int64_t b, int64_t* table, int64_t* ids) {
  *table = 0;
  *ids = 0;
  for (size_t d = plan.batch.size(); d-- > 0;) {
    const int64_t i = b % plan.batch[d];
    b /= plan.batch[d];
    *table += i * plan.table_stride[d];
    *ids += i * plan.ids_stride[d];
  }
}

// A row size that the compiler knows becomes a single move; 0 means any size.
template <typename Id, int64_t kRowBytes>
void CopyRange(const Plan& plan, int64_t begin, int64_t end) {
  const int64_t row_bytes = kRowBytes ? kRowBytes : plan.row_bytes;
  while (begin < end) {
    const int64_t b = begin / plan.ids_per_batch;
    const int64_t stop = std::min(end, (b + 1) * plan.ids_per_batch);
    int64_t table_index, ids_index;
    Locate(plan, b, &table_index, &ids_index);
    const uint8_t* table = plan.table + table_index * plan.rows * row_bytes;
    // Indexed by the position in the whole result, like `begin`.
    const Id* ids = static_cast<const Id*>(plan.ids) + (ids_index - b) * plan.ids_per_batch;
    for (int64_t i = begin; i < stop; ++i) {
      if (i + kPrefetchRows < stop) {
        const int64_t ahead = ids[i + kPrefetchRows];
        if (ahead >= 0 && ahead < plan.rows) {
          const uint8_t* row = table + ahead * row_bytes;
          for (int64_t byte = 0; byte < std::min(row_bytes, kPrefetchBytes); byte += 64) __builtin_prefetch(row + byte);
        }
      }
      int64_t id = ids[i];
      if (plan.clip && plan.rows > 0) id = std::clamp<int64_t>(id, 0, plan.rows - 1);
      const bool inside = id >= 0 && id < plan.rows;
      std::memcpy(plan.out + i * row_bytes, inside ? table + id * row_bytes : plan.fill_row, row_bytes);
    }
    begin = stop;
  }
}

template <typename Id>
void Copy(const Plan& plan, int64_t begin, int64_t end) {
  switch (plan.row_bytes) {
    case 1: return CopyRange<Id, 1>(plan, begin, end);
    case 2: return CopyRange<Id, 2>(plan, begin, end);
    case 4: return CopyRange<Id, 4>(plan, begin, end);
    case 8: return CopyRange<Id, 8>(plan, begin, end);
    case 16: return CopyRange<Id, 16>(plan, begin, end);
    default: return CopyRange<Id, 0>(plan, begin, end);
  }
}

ffi::Error Invalid(const std::string& what) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "dejax_row_gather: " + what);
}

// Checks dimensions and fills all of the plan but its pointers.
ffi::Error MakePlan(ffi::AnyBuffer table, ffi::AnyBuffer ids, ffi::AnyBuffer out, int64_t ids_rank,
                    ffi::Span<const uint8_t> fill, Plan* plan) {
  const auto table_dims = table.dimensions();
  const auto ids_dims = ids.dimensions();
  const auto out_dims = out.dimensions();
  const int64_t batch_rank = static_cast<int64_t>(ids_dims.size()) - ids_rank;
  const int64_t row_rank = static_cast<int64_t>(table_dims.size()) - batch_rank - 1;
  if (ids_rank < 0 || batch_rank < 0 || row_rank < 0 || fill.size() == 0 ||
      static_cast<int64_t>(out_dims.size()) != batch_rank + ids_rank + row_rank ||
      table.element_type() != out.element_type()) {
    return Invalid("ranks or types of table, ids and result do not fit together");
  }

  plan->rows = table_dims[batch_rank];
  plan->ids_per_batch = 1;
  plan->row_bytes = static_cast<int64_t>(fill.size());
  for (int64_t d = 0; d < ids_rank; ++d) {
    plan->ids_per_batch *= ids_dims[batch_rank + d];
    if (out_dims[batch_rank + d] != ids_dims[batch_rank + d]) {
      return Invalid("an index dimension differs from the result's");
    }
  }
  for (int64_t d = 0; d < row_rank; ++d) {
    plan->row_bytes *= table_dims[batch_rank + 1 + d];
    if (out_dims[batch_rank + ids_rank + d] != table_dims[batch_rank + 1 + d]) {
      return Invalid("a row dimension differs from the result's");
    }
  }
  plan->count = plan->ids_per_batch;
  plan->batch.resize(batch_rank);
  plan->table_stride.resize(batch_rank);
  plan->ids_stride.resize(batch_rank);
  int64_t table_stride = 1, ids_stride = 1;
  for (int64_t d = batch_rank; d-- > 0;) {
    const int64_t size = out_dims[d];
    if ((table_dims[d] != size && table_dims[d] != 1) || (ids_dims[d] != size && ids_dims[d] != 1)) {
      return Invalid("a batch dimension is neither 1 nor the result's");
    }
    plan->batch[d] = size;
    plan->table_stride[d] = table_dims[d] == 1 ? 0 : table_stride;
    plan->ids_stride[d] = ids_dims[d] == 1 ? 0 : ids_stride;
    table_stride *= table_dims[d];
    ids_stride *= ids_dims[d];
    plan->count *= size;
  }
  return ffi::Error::Success();
}

ffi::Error RowGatherImpl(ffi::AnyBuffer table, ffi::AnyBuffer ids, ffi::Result<ffi::AnyBuffer> out, int64_t ids_rank,
                         bool clip, ffi::Span<const uint8_t> fill) {
  Plan plan;
  if (auto error = MakePlan(table, ids, *out, ids_rank, fill, &plan); error.failure()) return error;
  if (plan.count == 0 || plan.row_bytes == 0) return ffi::Error::Success();

  plan.clip = clip;
  plan.table = static_cast<const uint8_t*>(table.untyped_data());
  plan.ids = ids.untyped_data();
  plan.out = static_cast<uint8_t*>(out->untyped_data());
  std::vector<uint8_t> fill_row(plan.row_bytes);
  for (int64_t at = 0; at < plan.row_bytes; at += fill.size()) {
    std::copy(fill.begin(), fill.end(), fill_row.begin() + at);
  }
  plan.fill_row = fill_row.data();

  AskForHugePages(plan.out, plan.count * plan.row_bytes);
  const int64_t grain = std::max<int64_t>(1, kBytesPerRange / plan.row_bytes);
  switch (ids.element_type()) {
    case ffi::DataType::S32:
      ThreadPool::Get().ParallelFor(plan.count, grain, [&](int64_t begin, int64_t end) { Copy<int32_t>(plan, begin, end); });
      return ffi::Error::Success();
    case ffi::DataType::S64:
      ThreadPool::Get().ParallelFor(plan.count, grain, [&](int64_t begin, int64_t end) { Copy<int64_t>(plan, begin, end); });
      return ffi::Error::Success();
    default:
      return Invalid("ids must be int32 or int64");
  }
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(RowGather, RowGatherImpl,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("ids_rank")
                                  .Attr<bool>("clip")
                                  .Attr<ffi::Span<const uint8_t>>("fill"));

}  // namespace dejax
