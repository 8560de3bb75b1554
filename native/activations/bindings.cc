#include "activations/bindings.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "activations/current.h"
#include "activations/store.h"
#include "driver/together.h"

namespace nb = nanobind;

namespace dejax::offload {
namespace {

std::shared_ptr<Store> Open(int64_t device_bytes, int64_t host_bytes, int64_t disk_bytes,
                            std::vector<std::string> folders, int64_t chunk_bytes, int num_threads, bool checksum,
                            bool external) {
  StoreOptions options;
  static_cast<DiskOptions&>(options) = {std::move(folders), disk_bytes, chunk_bytes, num_threads, checksum};
  options.device_bytes = device_bytes;
  options.host_bytes = host_bytes;
  options.external = external;
  return Store::Open(options);
}

nb::object NextJob(Store& store, double seconds) {
  bool closed = false;
  ChunkJob job;
  {
    nb::gil_scoped_release release;
    job = store.NextJob(seconds, &closed);
  }
  if (closed) return nb::none();
  return nb::make_tuple(job.id, job.write, job.path, job.index, reinterpret_cast<uintptr_t>(job.data), job.bytes);
}

nb::dict StatsOf(Store& store) {
  Counters s;
  {
    nb::gil_scoped_release release;
    s = store.GetStats();
  }
  nb::dict d;
#define DEJAX_ITEM(type, name) d[#name] = s.name;
  DEJAX_COUNTERS(DEJAX_ITEM)
#undef DEJAX_ITEM
  return d;
}

}  // namespace

void BindActivations(nb::module_& m) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Store>(m, "OffloadStore")
      .def_static("open", &Open, nb::kw_only(), nb::arg("device_bytes"), nb::arg("host_bytes"), nb::arg("disk_bytes"),
                  nb::arg("folders"), nb::arg("chunk_bytes"), nb::arg("num_threads"), nb::arg("checksum"),
                  nb::arg("external"))
      .def_prop_ro("id", &Store::id)
      .def("begin_close", &Store::BeginClose, Release())
      .def("close", &Store::Close, Release())
      .def("clear", &Store::Clear, Release())
      .def("drain", &Store::Drain, Release())
      .def("next_job", &NextJob, nb::arg("seconds"),
           "(id, write, path, index, address, bytes) of the next chunk; id 0: none yet; None: the store closes.")
      .def("finish_job", &Store::FinishJob, nb::arg("id"), nb::arg("error"), Release())
      .def("stats", &StatsOf);
  m.def("bind_offload_store", &BindStore, nb::arg("binding"), nb::arg("store"),
        "From now on calls with this binding use the store with this number; 0: none.");
  m.def("take_failure_of_shards", &TakeFailureOfShards,
        "Why a step failed on one device of several; empty where none did, or a later step has raised it.");
}

}  // namespace dejax::offload
