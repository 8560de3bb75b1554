#include "testing/bindings.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <utility>
#include <vector>

#include "activations/current.h"
#include "activations/store.h"
#include "state/pieces.h"
#include "state/state_disk.h"
#include "tables/drive/row_reader.h"
#include "testing/interceptor.h"

namespace nb = nanobind;

namespace dejax::offload {
namespace {

using Release = nb::call_guard<nb::gil_scoped_release>;
using Address = std::pair<uintptr_t, size_t>;

StoreCall CallOf(int64_t run, int device, uintptr_t stream, int64_t site) {
  return {run, device, site, {0, device}, reinterpret_cast<Stream>(stream)};
}

// The first or the last call of a chain.
void CallChainByAddress(int64_t run, int64_t site, uintptr_t stream, int64_t staging_bytes, bool finish,
                        const std::vector<Address>& arrays) {
  PiecesRequest request;
  request.run = run;
  request.site = site;
  request.staging_bytes = staging_bytes;
  request.finish = finish;
  for (const auto& [address, bytes] : arrays) {
    request.arrays.push_back(static_cast<int64_t>(request.arrays.size()));
    request.addresses.push_back(reinterpret_cast<char*>(address));
    request.sizes.push_back(bytes);
  }
  CallPieces(0, request, reinterpret_cast<Stream>(stream));
}

using Row = std::tuple<int64_t, int64_t, int64_t, int64_t>;  // array, offset, bytes, stride

void CallRowsByAddress(int64_t run, int64_t site, uintptr_t stream, int64_t call, int64_t staging_bytes,
                       int64_t pull_iterations, const std::vector<Row>& takes, const std::vector<Row>& pulls,
                       const std::vector<Row>& pushes, const std::vector<uintptr_t>& pushed,
                       const std::vector<Address>& taken) {
  PiecesRequest request;
  request.run = run;
  request.site = site;
  request.call = call;
  request.staging_bytes = staging_bytes;
  request.pull_iterations = pull_iterations;
  for (const auto& [array, offset, bytes, stride] : takes) request.takes.push_back({array, offset, bytes, stride});
  for (const auto& [array, offset, bytes, stride] : pulls) request.pulls.push_back({array, offset, bytes, stride});
  for (const auto& [array, offset, bytes, stride] : pushes) request.pushes.push_back({array, offset, bytes, stride});
  for (uintptr_t address : pushed) request.pushed.push_back(reinterpret_cast<void*>(address));
  for (const auto& [address, bytes] : taken) request.taken.push_back({reinterpret_cast<void*>(address), bytes});
  CallPieces(0, request, reinterpret_cast<Stream>(stream));
}

// Opens (with tickets) or commits arrays in files.
void CallFilesByAddress(int64_t run, int64_t site, uintptr_t stream, int64_t staging_bytes,
                        const std::vector<int64_t>& numbers, const std::vector<int64_t>& sizes, uintptr_t tickets) {
  PiecesRequest request;
  request.run = run;
  request.site = site;
  request.staging_bytes = staging_bytes;
  if (tickets != 0) {
    request.opened = numbers;
    request.opened_bytes = sizes;
    request.tickets = reinterpret_cast<const void*>(tickets);
  } else {
    request.committed = numbers;
  }
  CallPieces(0, request, reinterpret_cast<Stream>(stream));
}

}  // namespace

void BindTesting(nb::module_& parent) {
  nb::module_ m = parent.def_submodule("offload_testing", "The offload store as tests drive it.");
  nb::class_<TestInterceptor>(m, "Interceptor")
      .def(nb::new_([](const std::shared_ptr<Store>& store) {
             auto interceptor = std::make_shared<TestInterceptor>();
             store->Intercept(interceptor);
             return interceptor;
           }),
           nb::arg("store"), "Attaches itself to a store.")
      .def_static(
          "of_state",
          [](StateDisk& disk) {
            auto interceptor = std::make_shared<TestInterceptor>();
            disk.Intercept(interceptor);
            return interceptor;
          },
          nb::arg("disk"), "One that is attached to a store of state.")
      .def_static(
          "of_reader",
          [](RowReader& reader) {
            auto interceptor = std::make_shared<TestInterceptor>();
            reader.Intercept(interceptor);
            return interceptor;
          },
          nb::arg("reader"), "One that is attached to the reader of a table on a drive.")
      .def("inject", &TestInterceptor::Inject, nb::arg("kind"), nb::arg("count"))
      .def("slow", &TestInterceptor::Slow, nb::arg("seconds"));
  // The work of the CUDA handlers, by addresses: for a driver made for tests.
  m.def(
      "store_on_cuda",
      [](Store& store, int64_t run, int device, uintptr_t stream, int64_t call, int64_t ring, uintptr_t data,
         int64_t bytes, uintptr_t handle) {
        store.StoreOnCuda(CallOf(run, device, stream, call), ring, data, bytes, handle);
      },
      Release());
  m.def(
      "fetch_on_cuda",
      [](int64_t run, int device, uintptr_t stream, int64_t call, uintptr_t handle, uintptr_t data, int64_t bytes) {
        const uint64_t value = ReadHandle(handle, reinterpret_cast<Stream>(stream));
        FindStore(StoreOf(value))->FetchOnCuda(CallOf(run, device, stream, call), value, data, bytes);
      },
      Release());
  m.def(
      "store_by_binding_on_cuda",
      [](int64_t binding, int64_t run, int device, uintptr_t stream, int64_t call, int64_t ring, uintptr_t data,
         int64_t bytes, uintptr_t handle) {
        StoreOfRun(run, device, binding)->StoreOnCuda(CallOf(run, device, stream, call), ring, data, bytes, handle);
      },
      Release());
  m.def("call_chain_on_cuda", &CallChainByAddress, Release());
  m.def("call_rows_on_cuda", &CallRowsByAddress, Release());
  m.def("call_files_on_cuda", &CallFilesByAddress, Release());
}

}  // namespace dejax::offload
