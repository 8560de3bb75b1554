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

struct Plan {
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
void SetRows(const Plan& plan, int64_t begin, int64_t end) {
  const Id* ids = static_cast<const Id*>(plan.ids);
  for (int64_t r = begin; r < end; ++r) {
    // Of equal ids the last one counts.
    if (ids[r] < 0 || ids[r] >= plan.rows || (r + 1 < plan.n && ids[r + 1] == ids[r])) continue;
    std::memcpy(plan.table + ids[r] * plan.row_bytes, plan.values + plan.perm[r] * plan.row_bytes, plan.row_bytes);
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
void ChangeRows(const Plan& plan, int64_t begin, int64_t end) {
  using T = Element<table_type>;
  using V = Element<values_type>;
  const Id* ids = static_cast<const Id*>(plan.ids);
  const int64_t width = plan.row_bytes / static_cast<int64_t>(sizeof(typename T::Storage));
  const auto* values = reinterpret_cast<const typename V::Storage*>(plan.values);
  float sum[kColumns];
  for (int64_t r = begin; r < end; ++r) {
    const Id id = ids[r];
    if (id < 0 || id >= plan.rows || (r > 0 && ids[r - 1] == id)) continue;
    for (int64_t begin_column = 0; begin_column < width; begin_column += kColumns) {
      const int64_t columns = std::min(kColumns, width - begin_column);
      std::fill(sum, sum + columns, 0.0f);
      for (int64_t k = r; k < plan.n && ids[k] == id; ++k) {
        const auto* from = values + plan.perm[k] * width + begin_column;
        for (int64_t c = 0; c < columns; ++c) sum[c] += V::Load(from[c]);
      }
      const int64_t at = id * width + begin_column;
      auto* row = reinterpret_cast<typename T::Storage*>(plan.table) + at;
      float* first = plan.op >= kAdagrad ? plan.first + at : sum;  // not used without state
      float* second = plan.op == kAdam ? plan.second + at : sum;
      for (int64_t c = 0; c < columns; ++c) {
        row[c] = T::Store(Changed(plan.op, plan.hyper, T::Load(row[c]), sum[c], first + c, second + c));
      }
    }
  }
}

using Body = void (*)(const Plan&, int64_t, int64_t);

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

ffi::Error OnCpu(ffi::AnyBuffer ids, ffi::AnyBuffer perm, ffi::AnyBuffer values, ffi::AnyBuffer hyper,
                 ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t op, int64_t table_type, int64_t values_type,
                 int64_t row_bytes, int64_t, int64_t) {
  const auto invalid = [](const char* what) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::string("dejax.host_gather: ") + what);
  };
  UpdateTables tables;
  const int64_t n = static_cast<int64_t>(ids.element_count());
  if (!tables.Read(args, rets, op, row_bytes, table_type) ||
      !ValuesFit(values, n, op, row_bytes, table_type, values_type) ||
      static_cast<int64_t>(perm.element_count()) != n || hyper.element_count() < 7) {
    return invalid("table, ids, values and state do not fit together");
  }
  for (int k = 0; k < 3; ++k) {
    // XLA gives the results other memory if the arguments are still in use.
    if (tables.bytes[k] && tables.before[k] != tables.after[k]) {
      std::memcpy(tables.after[k], tables.before[k], tables.bytes[k]);
    }
  }
  Plan plan = {static_cast<uint8_t*>(tables.after[0]),
               static_cast<float*>(tables.after[1]),
               static_cast<float*>(tables.after[2]),
               ids.untyped_data(),
               static_cast<const int32_t*>(perm.untyped_data()),
               static_cast<const uint8_t*>(values.untyped_data()),
               static_cast<const float*>(hyper.untyped_data()),
               n,
               tables.rows,
               row_bytes,
               op};
  const Body body = ids.element_type() == ffi::DataType::S64 ? ForTypes<int64_t>(op, table_type, values_type)
                                                             : ForTypes<int32_t>(op, table_type, values_type);
  if (body == nullptr) return invalid("the table must be of float32, bfloat16 or float16");
  if (n == 0 || row_bytes == 0) return ffi::Error::Success();
  ThreadPool::Get().ParallelFor(n, std::max<int64_t>(1, kBytesPerRange / row_bytes),
                                [&](int64_t begin, int64_t end) { body(plan, begin, end); });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TableUpdateCpu, OnCpu, ffi::Ffi::Bind() DEJAX_UPDATE_SIGNATURE);

}  // namespace dejax
