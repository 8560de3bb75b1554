#include "tables/table_update.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

#include "driver/thread_pool.h"
#include "element_types.h"

namespace ffi = xla::ffi;

namespace dejax {
namespace {

constexpr int64_t kBytesPerRange = 128 * 1024;
constexpr int64_t kColumns = 1024;  // summed at once on the stack: the thread pool's bodies must not throw

struct UpdateRows {
  uint8_t* table;
  float* first;
  float* second;
  const void* ids;
  const int32_t* perm;
  const uint8_t* values;
  const float* hyper;
  int64_t n, rows, row_bytes, op;
};

template <typename Id>
void SetRows(const UpdateRows& u, int64_t begin, int64_t end) {
  const Id* ids = static_cast<const Id*>(u.ids);
  for (int64_t r = begin; r < end; ++r) {
    // Of equal ids the last one counts.
    if (ids[r] < 0 || ids[r] >= u.rows || (r + 1 < u.n && ids[r + 1] == ids[r])) continue;
    std::memcpy(u.table + ids[r] * u.row_bytes, u.values + u.perm[r] * u.row_bytes, u.row_bytes);
  }
}

// An element after an update: `x` before, `g` the sum of its values, `first` and `second` its state, which changes.
inline float Changed(int64_t op, const float* h, float x, float g, float* first, float* second) {
  if (op == kAdd) return x + g;
  if (op == kSgd) return x - h[0] * (g + h[6] * x);
  if (op == kAdagrad) {
    g = g + h[6] * x;
    *first += g * g;
    return x - h[0] * g / (std::sqrt(*first) + h[3]);
  }
  *first = h[1] * *first + (1.0f - h[1]) * g;
  *second = h[2] * *second + (1.0f - h[2]) * g * g;
  return x - h[0] * (*first / h[4] / (std::sqrt(*second / h[5]) + h[3]) + h[6] * x);
}

template <typename Id, int table_type, int values_type>
void ChangeRows(const UpdateRows& u, int64_t begin, int64_t end) {
  using T = Element<table_type>;
  using V = Element<values_type>;
  const Id* ids = static_cast<const Id*>(u.ids);
  const int64_t width = u.row_bytes / static_cast<int64_t>(sizeof(typename T::Storage));
  const auto* values = reinterpret_cast<const typename V::Storage*>(u.values);
  float sum[kColumns];
  for (int64_t r = begin; r < end; ++r) {
    const Id id = ids[r];
    if (id < 0 || id >= u.rows || (r > 0 && ids[r - 1] == id)) continue;
    for (int64_t begin_column = 0; begin_column < width; begin_column += kColumns) {
      const int64_t columns = std::min(kColumns, width - begin_column);
      std::fill(sum, sum + columns, 0.0f);
      for (int64_t k = r; k < u.n && ids[k] == id; ++k) {
        const auto* from = values + u.perm[k] * width + begin_column;
        for (int64_t c = 0; c < columns; ++c) sum[c] += V::Load(from[c]);
      }
      const int64_t at = id * width + begin_column;
      auto* row = reinterpret_cast<typename T::Storage*>(u.table) + at;
      float* first = u.op >= kAdagrad ? u.first + at : sum;  // not used without state
      float* second = u.op == kAdam ? u.second + at : sum;
      for (int64_t c = 0; c < columns; ++c) {
        row[c] = T::Store(Changed(u.op, u.hyper, T::Load(row[c]), sum[c], first + c, second + c));
      }
    }
  }
}

using Body = void (*)(const UpdateRows&, int64_t, int64_t);

template <typename Id, int table_type>
Body ForValues(int64_t values_type) {
  switch (values_type) {
    case kF32:
      return ChangeRows<Id, table_type, kF32>;
    case kBF16:
      return ChangeRows<Id, table_type, kBF16>;
    case kF16:
      return ChangeRows<Id, table_type, kF16>;
    default:
      return nullptr;
  }
}

template <typename Id>
Body ForTypes(int64_t op, int64_t table_type, int64_t values_type) {
  if (op == kSet) return SetRows<Id>;
  switch (table_type) {
    case kF32:
      return ForValues<Id, kF32>(values_type);
    case kBF16:
      return ForValues<Id, kBF16>(values_type);
    case kF16:
      return ForValues<Id, kF16>(values_type);
    default:
      return nullptr;
  }
}

void Update(const UpdateCall& call) {
  for (int k = 0; k < 3; ++k) {
    // XLA gives the results other memory if the arguments are still in use.
    if (call.bytes[k] && call.before[k] != call.after[k]) std::memcpy(call.after[k], call.before[k], call.bytes[k]);
  }
  const UpdateAttributes& how = call.how;
  const UpdateRows rows = {static_cast<uint8_t*>(call.after[0]),
                           static_cast<float*>(call.after[1]),
                           static_cast<float*>(call.after[2]),
                           call.ids.untyped_data(),
                           static_cast<const int32_t*>(call.perm.untyped_data()),
                           static_cast<const uint8_t*>(call.values.untyped_data()),
                           static_cast<const float*>(call.hyper.untyped_data()),
                           call.num_ids(),
                           call.rows,
                           how.row_bytes,
                           how.op};
  const Body body = call.ids_are_wide() ? ForTypes<int64_t>(how.op, how.table_type, how.values_type)
                                        : ForTypes<int32_t>(how.op, how.table_type, how.values_type);
  if (body == nullptr) {
    throw CallError(ffi::ErrorCode::kInvalidArgument, "the table must be of float32, bfloat16 or float16");
  }
  if (call.is_empty()) return;
  ThreadPool::Get().ParallelFor(rows.n, std::max<int64_t>(1, kBytesPerRange / how.row_bytes),
                                [&](int64_t begin, int64_t end) { body(rows, begin, end); });
}

ffi::Error OnCpu(ffi::AnyBuffer ids, ffi::AnyBuffer perm, ffi::AnyBuffer values, ffi::AnyBuffer hyper,
                 ffi::RemainingArgs args, ffi::RemainingRets rets, UpdateAttributes how) {
  return ReportedUpdate({ids, perm, values, hyper, how}, args, rets, Update);
}

DEJAX_FFI_HANDLER("dejax_table_update", "cpu", ffi::Ffi::Bind() DEJAX_UPDATE_SIGNATURE.To(OnCpu));

}  // namespace
}  // namespace dejax
