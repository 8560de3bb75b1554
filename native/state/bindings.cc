#include "state/bindings.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "state/state_disk.h"

namespace nb = nanobind;

namespace dejax::offload {
namespace {

std::shared_ptr<StateDisk> OpenStateDisk(std::vector<std::string> folders, int64_t disk_bytes, int64_t host_bytes,
                                         int64_t chunk_bytes, int num_threads, bool checksum) {
  StateDisk::Options options;
  static_cast<DiskOptions&>(options) = {std::move(folders), disk_bytes, chunk_bytes, num_threads, checksum};
  options.host_bytes = host_bytes;
  return StateDisk::Open(options);
}

nb::dict StatsOfState(const StateDisk& disk) {
  const StateDisk::Stats s = disk.GetStats();
  nb::dict d;
  d["read_bytes"] = s.read_bytes;
  d["written_bytes"] = s.written_bytes;
  d["disk_bytes"] = s.disk_bytes;
  d["peak_host_bytes"] = s.peak_host_bytes;
  d["wait_seconds"] = s.wait_seconds;
  return d;
}

}  // namespace

void BindState(nb::module_& m) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<StateDisk>(m, "StateDisk")
      .def_static("open", &OpenStateDisk, nb::kw_only(), nb::arg("folders"), nb::arg("disk_bytes"),
                  nb::arg("host_bytes"), nb::arg("chunk_bytes"), nb::arg("num_threads"), nb::arg("checksum"))
      .def_prop_ro("number", &StateDisk::number)
      .def("create", &StateDisk::Create, nb::arg("nbytes"), nb::arg("unit_bytes"), nb::arg("lane") = 0, Release())
      .def("share", &StateDisk::Share, nb::arg("array"), nb::arg("lane"), Release())
      .def("join", &StateDisk::Join, nb::arg("arrays"), Release())
      .def("remove", &StateDisk::Remove, nb::arg("array"), Release())
      .def(
          "put",
          [](StateDisk& disk, int64_t array, int64_t offset, uintptr_t address, int64_t bytes) {
            disk.Put(array, offset, reinterpret_cast<const void*>(address), bytes);
          },
          nb::arg("array"), nb::arg("offset"), nb::arg("address"), nb::arg("nbytes"), Release())
      .def(
          "get",
          [](StateDisk& disk, int64_t array, int64_t version, int64_t offset, uintptr_t address, int64_t bytes) {
            disk.Get(array, version, offset, reinterpret_cast<void*>(address), bytes);
          },
          nb::arg("array"), nb::arg("version"), nb::arg("offset"), nb::arg("address"), nb::arg("nbytes"), Release())
      .def("drain", &StateDisk::Drain, Release())
      .def("close", &StateDisk::Close, Release())
      .def("stats", &StatsOfState);
}

}  // namespace dejax::offload
