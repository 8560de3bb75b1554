#include "bindings.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "current.h"
#include "pieces.h"
#include "store.h"

namespace nb = nanobind;

namespace dejax::offload {

void Bind(nb::module_& m) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Store>(m, "OffloadStore")
      .def_static(
          "open",
          [](int64_t device_bytes, int64_t host_bytes, int64_t disk_bytes, std::vector<std::string> folders,
             int64_t chunk_bytes, int num_threads, bool direct, bool checksum, bool external) {
            Options options;
            options.device_bytes = device_bytes;
            options.host_bytes = host_bytes;
            options.disk_bytes = disk_bytes;
            options.folders = std::move(folders);
            options.chunk_bytes = chunk_bytes;
            options.num_threads = num_threads;
            options.direct = direct;
            options.checksum = checksum;
            options.external = external;
            return Store::Open(options);
          },
          nb::kw_only(), nb::arg("device_bytes"), nb::arg("host_bytes"), nb::arg("disk_bytes"), nb::arg("folders"),
          nb::arg("chunk_bytes"), nb::arg("num_threads"), nb::arg("direct"), nb::arg("checksum"), nb::arg("external"))
      .def_prop_ro("id", &Store::id)
      .def("begin_close", &Store::BeginClose, Release())
      .def("close", &Store::Close, Release())
      .def("check", &Store::RaisePending, Release())
      .def("clear", &Store::Clear, Release())
      .def("drain", &Store::Drain, Release())
      .def("inject", &Store::Inject, nb::arg("kind"), nb::arg("count"))
      .def("slow", &Store::Slow, nb::arg("seconds"))
      .def(
          "store_on_cuda",
          [](Store& store, int64_t run, int device, uintptr_t stream, int64_t site, int64_t ring, uintptr_t data,
             int64_t bytes, uintptr_t handle) {
            store.StoreOnCuda(run, device, reinterpret_cast<Stream>(stream), site, ring, data, bytes, handle);
          },
          Release(), "The CUDA handler's work, by addresses: for tests with a driver made for them.")
      .def(
          "fetch_on_cuda",
          [](Store& store, int64_t run, int device, uintptr_t stream, int64_t site, uintptr_t handle, uintptr_t data,
             int64_t bytes) {
            store.FetchOnCuda(run, device, reinterpret_cast<Stream>(stream), site, handle, data, bytes);
          },
          Release(), "Likewise.")
      .def("set_prediction", &Store::SetPrediction, nb::arg("mode"))
      .def(
          "next_job",
          [](Store& store, double seconds) -> nb::object {
            bool closed = false;
            Job job;
            {
              nb::gil_scoped_release release;
              job = store.NextJob(seconds, &closed);
            }
            if (closed) return nb::none();
            return nb::make_tuple(job.id, job.write, job.path, job.index, reinterpret_cast<uintptr_t>(job.data),
                                  job.bytes);
          },
          nb::arg("seconds"),
          "(id, write, path, index, address, bytes) of the next chunk; id 0: none yet; None: the store closes.")
      .def("finish_job", &Store::FinishJob, nb::arg("id"), nb::arg("error"), Release())
      .def("stats", [](Store& store) {
        Stats s;
        {
          nb::gil_scoped_release release;
          s = store.GetStats();
        }
        nb::dict d;
#define DEJAX_STAT(name) d[#name] = s.name
        DEJAX_STAT(stored_bytes);
        DEJAX_STAT(stored_count);
        DEJAX_STAT(fetched_bytes);
        DEJAX_STAT(fetched_count);
        DEJAX_STAT(ring_hit_bytes);
        DEJAX_STAT(prefetched_bytes);
        DEJAX_STAT(demand_bytes);
        DEJAX_STAT(copied_out_bytes);
        DEJAX_STAT(forwarded_bytes);
        DEJAX_STAT(written_bytes);
        DEJAX_STAT(read_bytes);
        DEJAX_STAT(cancelled_bytes);
        DEJAX_STAT(dropped_count);
        DEJAX_STAT(value_reads);
        DEJAX_STAT(mismatches);
        DEJAX_STAT(store_stall_seconds);
        DEJAX_STAT(fetch_stall_seconds);
        DEJAX_STAT(launch_seconds);
        DEJAX_STAT(device_store_stall_seconds);
        DEJAX_STAT(device_fetch_stall_seconds);
        DEJAX_STAT(live_bytes);
        DEJAX_STAT(live_count);
        DEJAX_STAT(peak_live_bytes);
        DEJAX_STAT(host_bytes);
        DEJAX_STAT(peak_host_bytes);
        DEJAX_STAT(disk_bytes);
        DEJAX_STAT(ring_bytes);
        DEJAX_STAT(runs);
#undef DEJAX_STAT
        return d;
      });
  m.def("bind_offload_store", &BindStore, nb::arg("binding"), nb::arg("store"),
        "From now on calls with this binding mean the store with this id; 0: none.");
  m.def(
      "offload_store_on_cuda",
      [](int64_t binding, int64_t run, int device, uintptr_t stream, int64_t site, int64_t ring, uintptr_t data,
         int64_t bytes, uintptr_t handle) {
        StoreOfRun(run, device, binding)
            ->StoreOnCuda(run, device, reinterpret_cast<Stream>(stream), site, ring, data, bytes, handle);
      },
      Release(), "The CUDA handler's work in the store of a binding: for tests.");
  m.def(
      "offload_fetch_on_cuda",
      [](int64_t binding, int64_t run, int device, uintptr_t stream, int64_t site, uintptr_t handle, uintptr_t data,
         int64_t bytes) {
        FetchFromItsStore(run, device, reinterpret_cast<Stream>(stream), binding, site, handle, data, bytes);
      },
      Release(), "Likewise.");
  using Address = std::pair<uintptr_t, size_t>;
  using Place = std::tuple<int64_t, int64_t, int64_t>;
  m.def(
      "call_pieces_on_cuda",
      [](int64_t run, int64_t site, uintptr_t stream, int64_t first_tag, int64_t staging_bytes, bool finish,
         const std::vector<Address>& arrays, const std::vector<Place>& pulls, const std::vector<Place>& pushes,
         const std::vector<uintptr_t>& pushed, const std::vector<Address>& taken) {
        PiecesRequest request;
        request.run = run;
        request.site = site;
        request.first_tag = first_tag;
        request.staging_bytes = staging_bytes;
        request.finish = finish;
        for (const auto& [address, bytes] : arrays) {
          request.arrays.push_back(static_cast<int64_t>(request.arrays.size()));
          request.addresses.push_back(reinterpret_cast<char*>(address));
          request.sizes.push_back(bytes);
        }
        for (const auto& [array, offset, bytes] : pulls) request.pulls.push_back({array, offset, bytes});
        for (const auto& [array, offset, bytes] : pushes) request.pushes.push_back({array, offset, bytes});
        for (uintptr_t address : pushed) request.pushed.push_back(reinterpret_cast<void*>(address));
        for (const auto& [address, bytes] : taken) request.taken.push_back({reinterpret_cast<void*>(address), bytes});
        CallPieces(0, request, reinterpret_cast<Stream>(stream));
      },
      Release(), "The CUDA handler's work on pieces of an optimizer's state, by addresses: for tests.");
}

}  // namespace dejax::offload
