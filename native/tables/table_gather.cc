#include "tables/table_gather.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>

#include "driver/thread_pool.h"
#include "element_types.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace dejax {
namespace {

// Bytes of the result that one thread copies at a time. Waking another thread costs about 10 us, in which one core copies
// about that much.
constexpr int64_t kBytesPerRange = 128 * 1024;
constexpr int64_t kPrefetchRows = 8;
constexpr int64_t kPrefetchBytes = 256;
constexpr int64_t kColumns = 1024;  // of a mean, summed at once on the stack: the thread pool's bodies must not throw

struct Plan {
  const uint8_t* table;
  const uint8_t* cache;
  const int32_t* slots;  // where rows lie, as in table_gather.h; null if all lie in the table
  const void* ids;
  const float* scale;
  uint8_t* out;
  const uint8_t* fill;
  int64_t n, rows, row_bytes, width, scale_count, fan_out;
  bool mean, clip;
  float fill_value;
  std::atomic<int64_t>* outside;  // an id out of range
  std::atomic<bool>* found;       // whether there is one
};

// The row of ids[i]; -1 for a row of fill.
template <typename Id>
int64_t Row(const Plan& plan, int64_t i) {
  int64_t id = static_cast<const Id*>(plan.ids)[i];
  if (id >= 0 && id < plan.rows) return id;
  if (!plan.found->exchange(true)) *plan.outside = id;
  if (!plan.clip || plan.rows == 0) return -1;
  return std::clamp<int64_t>(id, 0, plan.rows - 1);
}

const uint8_t* At(const Plan& plan, int64_t row) {
  if (plan.slots == nullptr) return plan.table + row * plan.row_bytes;
  const int64_t slot = plan.slots[row];
  return slot >= 0 ? plan.cache + slot * plan.row_bytes : plan.table + ~slot * plan.row_bytes;
}

template <typename Id>
void Prefetch(const Plan& plan, int64_t i, int64_t end) {
  if (i >= end) return;
  const int64_t id = static_cast<const Id*>(plan.ids)[i];
  if (id < 0 || id >= plan.rows) return;
  const uint8_t* row = At(plan, id);
  for (int64_t byte = 0; byte < std::min(plan.row_bytes, kPrefetchBytes); byte += 64) __builtin_prefetch(row + byte);
}

template <typename Id>
void CopyRows(const Plan& plan, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    Prefetch<Id>(plan, i + kPrefetchRows, end);
    const int64_t row = Row<Id>(plan, i);
    uint8_t* out = plan.out + i * plan.row_bytes;
    if (row >= 0) {
      std::memcpy(out, At(plan, row), plan.row_bytes);
    } else {
      for (int64_t at = 0; at < plan.row_bytes; ++at) out[at] = plan.fill[at % 16];
    }
  }
}

float Scale(const Plan& plan, int64_t row) {
  return plan.scale_count == 0 ? 1.0f : plan.scale[plan.scale_count == 1 ? 0 : row];
}

// Converts elements to float. Those of 8 bits are looked up: 256 floats stay in the cache.
template <int source>
struct Loader {
  using Storage = typename Element<source>::Storage;
  const float* values = nullptr;

  Loader() {
    if constexpr (sizeof(Storage) == 1) {
      static const auto* const made = [] {
        auto* table = new std::array<float, 256>;
        for (int i = 0; i < 256; ++i) (*table)[i] = Element<source>::Load(static_cast<Storage>(i));
        return table;
      }();
      values = made->data();
    }
  }

  float operator()(Storage x) const {
    if constexpr (sizeof(Storage) == 1) {
      return values[static_cast<uint8_t>(x)];
    } else {
      return Element<source>::Load(x);
    }
  }
};

template <typename Id, int source, int result>
void ConvertRows(const Plan& plan, int64_t begin, int64_t end) {
  using From = Element<source>;
  using To = Element<result>;
  auto* out = reinterpret_cast<typename To::Storage*>(plan.out);
  const Loader<source> load;
  for (int64_t i = begin; i < end; ++i) {
    Prefetch<Id>(plan, i + kPrefetchRows, end);
    const int64_t row = Row<Id>(plan, i);
    const float scale = row < 0 ? 0 : Scale(plan, row);
    const auto* from = row < 0 ? nullptr : reinterpret_cast<const typename From::Storage*>(At(plan, row));
    for (int64_t c = 0; c < plan.width; ++c) {
      const float x = row < 0 ? plan.fill_value : load(from[c]) * scale;
      out[i * plan.width + c] = To::Store(x);
    }
  }
}

template <typename Id, int source, int result>
void AverageRows(const Plan& plan, int64_t begin, int64_t end) {
  using From = Element<source>;
  using To = Element<result>;
  auto* out = reinterpret_cast<typename To::Storage*>(plan.out);
  const Loader<source> load;
  float sum[kColumns];
  for (int64_t i = begin; i < end; ++i) {
    for (int64_t first = 0; first < plan.width; first += kColumns) {
      const int64_t columns = std::min(kColumns, plan.width - first);
      std::fill(sum, sum + columns, 0.0f);
      int64_t count = 0;
      for (int64_t k = i * plan.fan_out; k < (i + 1) * plan.fan_out; ++k) {
        Prefetch<Id>(plan, k + kPrefetchRows, end * plan.fan_out);
        const int64_t row = Row<Id>(plan, k);
        if (row < 0) continue;
        ++count;
        const float scale = Scale(plan, row);
        const auto* from = reinterpret_cast<const typename From::Storage*>(At(plan, row)) + first;
        for (int64_t c = 0; c < columns; ++c) sum[c] += scale * load(from[c]);
      }
      for (int64_t c = 0; c < columns; ++c) {
        out[i * plan.width + first + c] = To::Store(count ? sum[c] / count : plan.fill_value);
      }
    }
  }
}

using Body = void (*)(const Plan&, int64_t, int64_t);

template <typename Id, int source>
Body ForResult(int64_t result, bool mean) {
  switch (result) {
    case kF32:
      return mean ? AverageRows<Id, source, kF32> : ConvertRows<Id, source, kF32>;
    case kBF16:
      return mean ? AverageRows<Id, source, kBF16> : ConvertRows<Id, source, kBF16>;
    case kF16:
      return mean ? AverageRows<Id, source, kF16> : ConvertRows<Id, source, kF16>;
    default:
      return nullptr;
  }
}

template <typename Id>
Body ForTypes(int64_t source, int64_t result, bool mean) {
  switch (source) {
    case -1:
      return CopyRows<Id>;
    case kF32:
      return ForResult<Id, kF32>(result, mean);
    case kF64:
      return ForResult<Id, kF64>(result, mean);
    case kBF16:
      return ForResult<Id, kBF16>(result, mean);
    case kF16:
      return ForResult<Id, kF16>(result, mean);
    case kF8E4M3:
      return ForResult<Id, kF8E4M3>(result, mean);
    case kF8E5M2:
      return ForResult<Id, kF8E5M2>(result, mean);
    case kS8:
      return ForResult<Id, kS8>(result, mean);
    case kU8:
      return ForResult<Id, kU8>(result, mean);
    case kS16:
      return ForResult<Id, kS16>(result, mean);
    case kU16:
      return ForResult<Id, kU16>(result, mean);
    case kS32:
      return ForResult<Id, kS32>(result, mean);
    case kU32:
      return ForResult<Id, kU32>(result, mean);
    default:
      return nullptr;
  }
}

ffi::Error OnCpu(ffi::AnyBuffer table, ffi::AnyBuffer ids, ffi::AnyBuffer, ffi::AnyBuffer slots, ffi::AnyBuffer cache,
                 ffi::Buffer<ffi::F32> scale, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer>,
                 int64_t source, int64_t result, int64_t row_bytes, int64_t fan_out, bool mean, bool clip, bool raises,
                 bool split, float fill_value, ffi::Span<const uint8_t> fill, int64_t, int64_t, int64_t) {
  const auto invalid = [](const char* what) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::string("dejax.host_gather.gather: ") + what);
  };
  if (fill.size() != 16 || table.dimensions().size() == 0) return invalid("the attributes do not fit together");
  const bool wide = ids.element_type() == ffi::DataType::S64;
  GatherSizes sizes;
  sizes.ids = static_cast<int64_t>(ids.element_count());
  sizes.ids_are_integers = wide || ids.element_type() == ffi::DataType::S32;
  sizes.scale = static_cast<int64_t>(scale.element_count());
  sizes.slots = static_cast<int64_t>(slots.element_count());
  sizes.cache_bytes = static_cast<int64_t>(cache.size_bytes());
  sizes.table_rows = table.dimensions()[0];
  sizes.rows = split ? sizes.slots : sizes.table_rows;
  sizes.split = split;
  sizes.table_bytes = static_cast<int64_t>(table.size_bytes());
  sizes.out_bytes = static_cast<int64_t>(out->size_bytes());
  sizes.source = source;
  sizes.result = result;
  sizes.row_bytes = row_bytes;
  sizes.fan_out = fan_out;
  sizes.mean = mean;
  if (const char* misfit = sizes.Misfit()) return invalid(misfit);
  std::atomic<int64_t> outside{-1};
  std::atomic<bool> found{false};
  Plan plan;
  plan.table = static_cast<const uint8_t*>(table.untyped_data());
  plan.cache = static_cast<const uint8_t*>(cache.untyped_data());
  plan.slots = split ? static_cast<const int32_t*>(slots.untyped_data()) : nullptr;
  plan.ids = ids.untyped_data();
  plan.scale = scale.typed_data();
  plan.out = static_cast<uint8_t*>(out->untyped_data());
  plan.fill = fill.begin();
  plan.n = mean ? sizes.ids / fan_out : sizes.ids;
  plan.rows = sizes.rows;
  plan.row_bytes = row_bytes;
  plan.scale_count = sizes.scale;
  plan.fan_out = mean ? fan_out : 1;
  plan.mean = mean;
  plan.clip = clip;
  plan.fill_value = fill_value;
  plan.outside = &outside;
  plan.found = &found;
  const Body body = wide ? ForTypes<int64_t>(source, result, mean) : ForTypes<int32_t>(source, result, mean);
  if (body == nullptr) return invalid("no such conversion");
  plan.width = source < 0 ? 0 : row_bytes / ElementBytes(source);
  if (plan.n == 0 || row_bytes == 0) return ffi::Error::Success();
  const int64_t grain = std::max<int64_t>(1, kBytesPerRange / (row_bytes * plan.fan_out));
  ThreadPool::Get().ParallelFor(plan.n, grain, [&](int64_t begin, int64_t end) { body(plan, begin, end); });
  if (raises && found) {
    return ffi::Error(ffi::ErrorCode::kOutOfRange, "dejax.host_gather.gather: id " + std::to_string(outside.load()) +
                                                       " is out of range for a table of " + std::to_string(plan.rows) +
                                                       " rows");
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TableGatherCpu, OnCpu, ffi::Ffi::Bind() DEJAX_GATHER_SIGNATURE);

}  // namespace dejax
