#include "tables/table_gather.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>

#include "driver/thread_pool.h"
#include "element_types.h"

namespace ffi = xla::ffi;

namespace dejax {
namespace {

// Bytes of the result that one thread copies at a time. Waking another thread costs about 10 us, in which one core copies
// about that much.
constexpr int64_t kBytesPerRange = 128 * 1024;
constexpr int64_t kPrefetchRows = 8;
constexpr int64_t kPrefetchBytes = 256;
constexpr int64_t kColumns = 1024;  // of a mean, summed at once on the stack: the thread pool's bodies must not throw

struct GatherRows {
  const uint8_t* table;
  int64_t table_rows;     // without `slots`
  const uint8_t* beyond;  // the rows after them
  const uint8_t* cache;
  const uint64_t* peers;  // the addresses of the blocks of the cache; null for one block
  int64_t num_peers;
  const int32_t* slots;  // where rows lie, as in table_gather.h; null if all lie in the table
  const void* ids;
  const float* scale;
  uint8_t* out;
  const uint8_t* fill;
  int64_t rows, row_bytes, width, scale_count, fan_out;
  bool clip;
  float fill_value;
  std::atomic<int64_t>* outside;  // an id out of range
  std::atomic<bool>* found;       // whether there is one
};

// The row of ids[i]; -1 for a row of fill.
template <typename Id>
int64_t Row(const GatherRows& g, int64_t i) {
  int64_t id = static_cast<const Id*>(g.ids)[i];
  if (id >= 0 && id < g.rows) return id;
  if (!g.found->exchange(true)) *g.outside = id;
  if (!g.clip || g.rows == 0) return -1;
  return std::clamp<int64_t>(id, 0, g.rows - 1);
}

const uint8_t* At(const GatherRows& g, int64_t row) {
  if (g.slots == nullptr) {
    return row < g.table_rows ? g.table + row * g.row_bytes : g.beyond + (row - g.table_rows) * g.row_bytes;
  }
  const int64_t slot = g.slots[row];
  if (slot >= 0 && g.peers != nullptr) {
    return reinterpret_cast<const uint8_t*>(g.peers[slot % g.num_peers]) + slot / g.num_peers * g.row_bytes;
  }
  return slot >= 0 ? g.cache + slot * g.row_bytes : g.table + ~slot * g.row_bytes;
}

template <typename Id>
void Prefetch(const GatherRows& g, int64_t i, int64_t end) {
  if (i >= end) return;
  const int64_t id = static_cast<const Id*>(g.ids)[i];
  if (id < 0 || id >= g.rows) return;
  const uint8_t* row = At(g, id);
  for (int64_t byte = 0; byte < std::min(g.row_bytes, kPrefetchBytes); byte += 64) __builtin_prefetch(row + byte);
}

template <typename Id>
void CopyRows(const GatherRows& g, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    Prefetch<Id>(g, i + kPrefetchRows, end);
    const int64_t row = Row<Id>(g, i);
    uint8_t* out = g.out + i * g.row_bytes;
    if (row >= 0) {
      std::memcpy(out, At(g, row), g.row_bytes);
    } else {
      for (int64_t at = 0; at < g.row_bytes; ++at) out[at] = g.fill[at % 16];
    }
  }
}

float Scale(const GatherRows& g, int64_t row) {
  return g.scale_count == 0 ? 1.0f : g.scale[g.scale_count == 1 ? 0 : row];
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
void ConvertRows(const GatherRows& g, int64_t begin, int64_t end) {
  using From = Element<source>;
  using To = Element<result>;
  auto* out = reinterpret_cast<typename To::Storage*>(g.out);
  const Loader<source> load;
  for (int64_t i = begin; i < end; ++i) {
    Prefetch<Id>(g, i + kPrefetchRows, end);
    const int64_t row = Row<Id>(g, i);
    const float scale = row < 0 ? 0 : Scale(g, row);
    const auto* from = row < 0 ? nullptr : reinterpret_cast<const typename From::Storage*>(At(g, row));
    for (int64_t c = 0; c < g.width; ++c) {
      const float x = row < 0 ? g.fill_value : load(from[c]) * scale;
      out[i * g.width + c] = To::Store(x);
    }
  }
}

template <typename Id, int source, int result>
void AverageRows(const GatherRows& g, int64_t begin, int64_t end) {
  using From = Element<source>;
  using To = Element<result>;
  auto* out = reinterpret_cast<typename To::Storage*>(g.out);
  const Loader<source> load;
  float sum[kColumns];
  for (int64_t i = begin; i < end; ++i) {
    for (int64_t first = 0; first < g.width; first += kColumns) {
      const int64_t columns = std::min(kColumns, g.width - first);
      std::fill(sum, sum + columns, 0.0f);
      int64_t count = 0;
      for (int64_t k = i * g.fan_out; k < (i + 1) * g.fan_out; ++k) {
        Prefetch<Id>(g, k + kPrefetchRows, end * g.fan_out);
        const int64_t row = Row<Id>(g, k);
        if (row < 0) continue;
        ++count;
        const float scale = Scale(g, row);
        const auto* from = reinterpret_cast<const typename From::Storage*>(At(g, row)) + first;
        for (int64_t c = 0; c < columns; ++c) sum[c] += scale * load(from[c]);
      }
      for (int64_t c = 0; c < columns; ++c) {
        out[i * g.width + first + c] = To::Store(count ? sum[c] / count : g.fill_value);
      }
    }
  }
}

using Body = void (*)(const GatherRows&, int64_t, int64_t);

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

// What the attributes say, and the loop over `results` rows.
void Run(GatherRows* g, const GatherAttributes& how, int64_t results, bool ids_are_wide) {
  g->fill = how.fill.begin();
  g->row_bytes = how.row_bytes;
  g->width = how.source < 0 ? 0 : how.row_bytes / ElementBytes(how.source);
  g->fan_out = how.mean ? how.fan_out : 1;
  g->fill_value = how.fill_value;
  const Body body = ids_are_wide ? ForTypes<int64_t>(how.source, how.result, how.mean)
                                 : ForTypes<int32_t>(how.source, how.result, how.mean);
  if (body == nullptr) throw CallError(ffi::ErrorCode::kInvalidArgument, "no such conversion");
  if (results == 0 || how.row_bytes == 0) return;
  const int64_t grain = std::max<int64_t>(1, kBytesPerRange / (how.row_bytes * g->fan_out));
  ThreadPool::Get().ParallelFor(results, grain, [&](int64_t begin, int64_t end) { body(*g, begin, end); });
}

void Gather(const GatherCall& call, ffi::AnyBuffer out) {
  if (const char* misfit = call.Misfit(static_cast<int64_t>(out.size_bytes()))) {
    throw CallError(ffi::ErrorCode::kInvalidArgument, misfit);
  }
  const GatherAttributes& how = call.how;
  std::atomic<int64_t> outside{-1};
  std::atomic<bool> found{false};
  GatherRows g = {};
  g.table = static_cast<const uint8_t*>(call.table.untyped_data());
  g.cache = static_cast<const uint8_t*>(call.cache.untyped_data());
  g.peers = how.peers > 0 ? static_cast<const uint64_t*>(call.cache.untyped_data()) : nullptr;
  g.num_peers = how.peers;
  g.slots = how.split ? static_cast<const int32_t*>(call.slots.untyped_data()) : nullptr;
  g.ids = call.ids.untyped_data();
  g.scale = call.scale.typed_data();
  g.out = static_cast<uint8_t*>(out.untyped_data());
  g.rows = call.num_rows();
  g.table_rows = g.rows;
  g.scale_count = static_cast<int64_t>(call.scale.element_count());
  g.clip = how.clip;
  g.outside = &outside;
  g.found = &found;
  Run(&g, how, call.num_results(), call.ids_are_wide());
  if (how.raises && found) {
    throw CallError(ffi::ErrorCode::kOutOfRange, "id " + std::to_string(outside.load()) +
                                                     " is out of range for a table of " + std::to_string(g.rows) +
                                                     " rows");
  }
}

ffi::Error OnCpu(ffi::AnyBuffer table, ffi::AnyBuffer ids, ffi::AnyBuffer perm, ffi::AnyBuffer slots,
                 ffi::AnyBuffer cache, ffi::Buffer<ffi::F32> scale, ffi::Result<ffi::AnyBuffer> out,
                 ffi::Result<ffi::AnyBuffer>, GatherAttributes how) {
  return ReportedGather([&] { Gather({table, ids, perm, slots, cache, scale, how}, *out); });
}

DEJAX_FFI_HANDLER("dejax_table_gather", "cpu",
                  ffi::Ffi::Bind() DEJAX_GATHER_OPERANDS DEJAX_GATHER_RESULTS.Attrs<GatherAttributes>().To(OnCpu));

}  // namespace

void GatherFound(const FoundRows& rows, const GatherAttributes& how, const float* scale, void* out) {
  std::atomic<int64_t> outside{-1};
  std::atomic<bool> found{false};
  GatherRows g = {};
  g.table = reinterpret_cast<const uint8_t*>(rows.near);
  g.table_rows = rows.near_rows;
  g.beyond = reinterpret_cast<const uint8_t*>(rows.beyond);
  g.rows = rows.near_rows + rows.beyond_rows;
  g.ids = rows.places;
  g.scale = scale;
  g.scale_count = scale == nullptr ? 0 : 1;
  g.out = static_cast<uint8_t*>(out);
  g.outside = &outside;
  g.found = &found;
  Run(&g, how, rows.count, /*ids_are_wide=*/true);
}

}  // namespace dejax
