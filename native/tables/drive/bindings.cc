#include "tables/drive/bindings.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "driver/host_memory.h"
#include "tables/drive/row_reader.h"

namespace nb = nanobind;

namespace dejax {
namespace {

std::vector<uint64_t> Words(uintptr_t address, int64_t count) {
  const auto* begin = reinterpret_cast<const uint64_t*>(address);
  return std::vector<uint64_t>(begin, begin + count);
}

// memory: of the number, and of the cache, which begins at `cache`. The reader lives as long.
std::shared_ptr<RowReader> OpenReader(nb::object memory, std::vector<std::string> paths, int64_t rows, int64_t row_bytes,
                                      int64_t first, int64_t stripe_rows, int64_t stripe_bytes, uintptr_t cache, int64_t slots,
                                      std::pair<uintptr_t, int64_t> wanted, std::pair<uintptr_t, int64_t> checksums,
                                      std::vector<int64_t> pages, bool direct, bool use_ring, int threads, int depth) {
  RowReader::Options options;
  options.paths = std::move(paths);
  options.layout = {rows, row_bytes, first, stripe_rows, stripe_bytes};
  options.cache = reinterpret_cast<char*>(cache);
  options.slots = slots;
  options.wanted = Words(wanted.first, wanted.second);
  options.checksums = Words(checksums.first, checksums.second);
  options.pages = std::move(pages);
  options.direct = direct;
  options.use_ring = use_ring;
  options.threads = threads;
  options.depth = depth;
  std::shared_ptr<RowReader> reader = RowReader::Open(std::move(options));
  // Others may still hold the reader when the memory goes, but it works no more then.
  SetUserOfMemory(memory, std::shared_ptr<void>(nullptr, [reader](void*) { reader->Close(); }));
  return reader;
}

nb::dict StatsOfReader(RowReader& reader) {
  const RowReader::Stats s = reader.GetStats();
  nb::dict d;
  d["device_rows"] = s.device_rows;
  d["cache_rows"] = s.cache_rows;
  d["drive_rows"] = s.drive_rows;
  d["read_bytes"] = s.read_bytes;
  d["reads"] = s.reads;
  d["waits"] = s.waits;
  d["wait_seconds"] = s.wait_seconds;
  d["rows_in_cache"] = reader.rows_in_cache();
  d["requests_open"] = reader.requests_kept();
  return d;
}

// Rows of int32 ids that a gather will need soon stay in the cache until they are released by the number.
int64_t ReadAhead(RowReader& reader, uintptr_t ids, int64_t count) {
  const RowReader::Use use(&reader);
  return reader.Keep(reader.Begin(reinterpret_cast<const int32_t*>(ids), count, /*clip=*/false, /*ahead=*/true));
}

void ReleaseAhead(RowReader& reader, int64_t number) {
  if (const auto request = reader.Take(number)) reader.Release(request);
}

}  // namespace

void DefineRowReader(nb::module_& m) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<RowReader>(m, "RowReader")
      .def_static("open", &OpenReader, nb::kw_only(), nb::arg("memory"), nb::arg("paths"), nb::arg("rows"), nb::arg("row_bytes"),
                  nb::arg("first"), nb::arg("stripe_rows"), nb::arg("stripe_bytes"), nb::arg("cache"), nb::arg("slots"),
                  nb::arg("wanted"), nb::arg("checksums"), nb::arg("pages"), nb::arg("direct"), nb::arg("use_ring"),
                  nb::arg("threads"), nb::arg("depth"))
      .def_static("find", &RowReader::Find)
      .def_prop_ro("number", &RowReader::number)
      .def_prop_ro("engine", &RowReader::engine)
      .def("require_unchanged", [](const RowReader& reader) { reader.files().RequireUnchanged(); })
      .def_prop_ro("open_paths", [](const RowReader& reader) { return reader.files().OpenPaths(); })
      .def_prop_ro("layout",
                   [](const RowReader& reader) {
                     const TableLayout& layout = reader.options().layout;
                     return nb::make_tuple(layout.first, layout.stripe_rows, layout.stripe_bytes);
                   })
      .def_prop_ro("cache", [](const RowReader& reader) { return reinterpret_cast<uintptr_t>(reader.options().cache); })
      .def_prop_ro("slots", [](const RowReader& reader) { return reader.options().slots; })
      .def("stats", &StatsOfReader)
      .def("read_ahead", &ReadAhead, Release())
      .def("release", &ReleaseAhead, Release())
      .def("close", &RowReader::Close, Release());
}

}  // namespace dejax
