// Sorts, sums and numbers integers on a CPU, each by one call where XLA compiles a dozen loops; dejax/cuda/ordering.cu has the
// same for a GPU.
#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <numeric>

#include "driver/ffi_handlers.h"

namespace dejax {
namespace {

namespace ffi = xla::ffi;

struct Pairs {
  uint32_t* keys;
  int32_t* values;
};

// Sorts keys of so many bits with their values, stably, by the lowest digit first. `from.values` may be null: positions.
// The result lies in `into`.
void SortPairs(Pairs from, Pairs into, int64_t size, int64_t bits) {
  constexpr int64_t kDigit = 11;
  constexpr int64_t kBins = 1 << kDigit;
  const int64_t passes = std::max<int64_t>(1, (bits + kDigit - 1) / kDigit);
  const auto keys = std::make_unique<uint32_t[]>(size);
  const auto values = std::make_unique<int32_t[]>(size);
  const Pairs spare{keys.get(), values.get()};
  for (int64_t pass = 0; pass < passes; ++pass) {
    const Pairs to = (passes - 1 - pass) % 2 == 0 ? into : spare;
    const auto digit = [&](int64_t i) { return from.keys[i] >> (pass * kDigit) & (kBins - 1); };
    std::array<int64_t, kBins + 1> starts{};
    for (int64_t i = 0; i < size; ++i) ++starts[digit(i) + 1];
    std::partial_sum(starts.begin(), starts.end(), starts.begin());
    for (int64_t i = 0; i < size; ++i) {
      const int64_t at = starts[digit(i)]++;
      to.keys[at] = from.keys[i];
      to.values[at] = from.values == nullptr ? static_cast<int32_t>(i) : from.values[i];
    }
    from = to;
  }
}

uint32_t* KeysOf(ffi::AnyBuffer& buffer) { return static_cast<uint32_t*>(buffer.untyped_data()); }
int32_t* ValuesOf(ffi::AnyBuffer& buffer) { return static_cast<int32_t*>(buffer.untyped_data()); }

// Rows and the size of a row.
std::array<int64_t, 2> RowsOf(const ffi::AnyBuffer& buffer) {
  return {buffer.dimensions()[0], buffer.dimensions()[1]};
}

ffi::Error Sort(ffi::AnyBuffer keys, ffi::RemainingArgs values, ffi::Result<ffi::AnyBuffer> sorted_keys,
                ffi::Result<ffi::AnyBuffer> sorted_values, int64_t bits) {
  return Reported("dejax_sort_pairs: ", ffi::ErrorCode::kInternal, [&] {
    const auto [rows, size] = RowsOf(keys);
    ffi::AnyBuffer given = values.size() > 0 ? *values.get<ffi::AnyBuffer>(0) : keys;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t begin = row * size;
      SortPairs({KeysOf(keys) + begin, values.size() > 0 ? ValuesOf(given) + begin : nullptr},
                {KeysOf(*sorted_keys) + begin, ValuesOf(*sorted_values) + begin}, size, bits);
    }
  });
}

ffi::Error Sums(ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> sums) {
  const auto [rows, size] = RowsOf(x);
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t* const begin = ValuesOf(x) + row * size;
    std::partial_sum(begin, begin + size, ValuesOf(*sums) + row * size);
  }
  return ffi::Error::Success();
}

// `sizes`: known nodes, the key of no node; of each type its first key, then the first number of new nodes, then the number
// after the last.
ffi::Error Number(ffi::AnyBuffer keys, ffi::Result<ffi::AnyBuffer> nodes, ffi::Result<ffi::AnyBuffer> numbers,
                  ffi::Result<ffi::AnyBuffer> added, ffi::Span<const int64_t> sizes) {
  return Reported("dejax_number: ", ffi::ErrorCode::kInternal, [&] {
    const auto [rows, size] = RowsOf(keys);
    const int64_t types = added->dimensions()[1], places = nodes->dimensions()[1];
    const int64_t known = sizes[0], none = sizes[1];
    const int64_t *first_keys = sizes.begin() + 2, *first_numbers = first_keys + types, *ends = first_numbers + types;
    const auto type_of = [&](int64_t key) {
      return std::upper_bound(first_keys, first_keys + types, key) - first_keys - 1;
    };
    int64_t bits = 0;
    while (none >> bits != 0) ++bits;
    const auto sorted = std::make_unique<uint32_t[]>(size);
    const auto order = std::make_unique<int32_t[]>(size);
    for (int64_t row = 0; row < rows; ++row) {
      uint32_t* const own = KeysOf(keys) + row * size;
      int32_t *node = ValuesOf(*nodes) + row * places, *number_of = ValuesOf(*numbers) + row * (size - known);
      int32_t* const count = ValuesOf(*added) + row * types;
      std::fill_n(node, places, -1);
      std::fill_n(count, types, 0);
      for (int64_t i = 0; i < known; ++i) {
        const int64_t key = own[i];
        if (key < none) node[i] = static_cast<int32_t>(key - first_keys[type_of(key)]);
      }
      SortPairs({own, nullptr}, {sorted.get(), order.get()}, size, bits);
      int64_t before = -1, number = -1;
      for (int64_t i = 0; i < size; ++i) {
        const int64_t key = sorted[i], at = order[i];
        if (key != before) {  // a run of equal keys begins with a known node, or else makes a new one
          before = key;
          number = -1;
          if (key < none && at < known) number = at;
          if (key < none && at >= known) {
            const int64_t type = type_of(key), next = first_numbers[type] + count[type]++;
            if (next < ends[type]) {
              number = next;
              node[next] = static_cast<int32_t>(key - first_keys[type]);
            }
          }
        }
        if (at >= known) number_of[at - known] = static_cast<int32_t>(number);
      }
    }
  });
}

DEJAX_FFI_HANDLER("dejax_sort_pairs", "cpu",
                  ffi::Ffi::Bind()
                      .Arg<ffi::AnyBuffer>()
                      .RemainingArgs()
                      .Ret<ffi::AnyBuffer>()
                      .Ret<ffi::AnyBuffer>()
                      .Attr<int64_t>("bits")
                      .To(Sort));
DEJAX_FFI_HANDLER("dejax_sums", "cpu", ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().To(Sums));
DEJAX_FFI_HANDLER("dejax_number", "cpu",
                  ffi::Ffi::Bind()
                      .Arg<ffi::AnyBuffer>()
                      .Ret<ffi::AnyBuffer>()
                      .Ret<ffi::AnyBuffer>()
                      .Ret<ffi::AnyBuffer>()
                      .Attr<ffi::Span<const int64_t>>("sizes")
                      .To(Number));

}  // namespace
}  // namespace dejax
