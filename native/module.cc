// The extension dejax._dejax_native: FFI handlers, which dejax/_native.py registers, the probe of the CUDA driver, and the
// classes behind host_gather and offload.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>

#include "activations/bindings.h"
#include "driver/cuda_driver.h"
#include "driver/cuda_launch.h"
#include "driver/ffi_handlers.h"
#include "driver/host_memory.h"
#include "driver/thread_pool.h"
#include "state/bindings.h"
#include "tables/drive/bindings.h"
#include "tables/table_gather.h"
#include "testing/bindings.h"

namespace nb = nanobind;

namespace {

nb::list HandlersOfPython() {
  nb::list handlers;
  for (const dejax::Handler& handler : dejax::Handlers()) {
    handlers.append(nb::make_tuple(handler.name, handler.platform, nb::capsule(reinterpret_cast<void*>(handler.call))));
  }
  return handlers;
}

void DefineProbe(nb::module_& m) {
  using dejax::cuda::DeviceInfo;
  using dejax::cuda::DriverInfo;
  nb::class_<DeviceInfo>(m, "DeviceInfo")
      .def_ro("name", &DeviceInfo::name)
      .def_prop_ro("compute_capability",
                   [](const DeviceInfo& d) {
                     return nb::make_tuple(d.compute_capability_major, d.compute_capability_minor);
                   })
      .def_ro("total_memory", &DeviceInfo::total_memory)
      .def_ro("multiprocessors", &DeviceInfo::multiprocessors)
      .def_ro("l2_cache", &DeviceInfo::l2_cache)
      .def_ro("can_map_host_memory", &DeviceInfo::can_map_host_memory)
      .def_ro("can_use_registered_host_pointer", &DeviceInfo::can_use_registered_host_pointer)
      .def_ro("pageable_memory_access", &DeviceInfo::pageable_memory_access)
      .def_ro("integrated", &DeviceInfo::integrated);
  nb::class_<DriverInfo>(m, "DriverInfo")
      .def_ro("unavailable", &DriverInfo::unavailable)
      .def_ro("version", &DriverInfo::version)
      .def_ro("devices", &DriverInfo::devices);
  m.def("probe_cuda_driver", &dejax::cuda::Probe, nb::call_guard<nb::gil_scoped_release>(),
        "Version and devices of the CUDA driver.");
}

void DefineKernels(nb::module_& m) {
  m.def("add_kernel",
        [](int64_t key, nb::bytes image, const std::string& name, const std::vector<int>& ordinals) {
          return dejax::cuda::AddKernel(key, std::string(image.c_str(), image.size()), name, ordinals);
        },
        "Loads a kernel compiled for these GPUs and keeps it under a key. Returns an empty string or the error.");
  m.def("has_kernel", &dejax::cuda::HasKernel);
  m.def("set_kernel_finder",
        [](nb::object finder) {
          const nb::handle kept = finder.release();  // for the life of the process
          dejax::cuda::SetBinaryFinder([kept](int64_t key) -> dejax::cuda::KernelBinary {
            nb::gil_scoped_acquire gil;
            std::string why;
            try {
              const auto found = nb::cast<nb::tuple>(kept(key));
              const auto image = nb::cast<nb::bytes>(found[0]);
              return {std::string(image.c_str(), image.size()), nb::cast<int64_t>(found[1])};
            } catch (const nb::python_error& error) {
              why = nb::cast<std::string>(nb::str(error.value()));
            }
            throw std::runtime_error(why);
          });
        },
        "Sets the function that gives the image of a kernel's key, and its bytes of shared memory.");
  m.def("enable_peers", &dejax::cuda::EnablePeers, nb::arg("ordinals"), nb::call_guard<nb::gil_scoped_release>(),
        "Lets kernels of each of these GPUs read the memory of the others. Returns an empty string or the error.");
  m.def("synchronize_all", &dejax::cuda::SynchronizeAll, nb::call_guard<nb::gil_scoped_release>(),
        "Waits until all GPUs that this process uses are idle.");
  m.def("gathers_under_way", &dejax::GathersUnderWay,
        "The number of gathers that gather_start began and that were neither taken by gather_done nor dropped.");
  m.def("prepare_gather_errors", &dejax::PrepareGatherErrors,
        "Allocates the memory into which gathers of mode 'raise' report, on a CUDA device. False if there is none.");
  m.def("take_gather_error",
        []() -> nb::object {
          long long id = 0;
          return dejax::TakeGatherError(&id) ? nb::cast(id) : nb::none();
        },
        "An id out of range that a gather of mode 'raise' met since the last call, or None.");
}

}  // namespace

NB_MODULE(_dejax_native, m) {
  m.doc() = "XLA FFI handlers of dejax, the probe of the CUDA driver, host memory and the offload store.";
  // jax's caches of compiled functions keep a store until the process ends; its threads and files have ended by then.
  nb::set_leak_warnings(false);

  m.def("handlers", HandlersOfPython, "(name, platform, capsule) of each handler, for jax.ffi.register_ffi_target.");
  m.def("num_threads", [] { return dejax::ThreadPool::Get().num_threads(); },
        "Threads that a CPU handler uses, the calling one included.");
  m.attr("ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);

  DefineProbe(m);
  dejax::DefineHostMemory(m);
  DefineKernels(m);
  dejax::DefineRowReader(m);
  dejax::offload::BindActivations(m);
  dejax::offload::BindState(m);
  dejax::offload::BindTesting(m);
}
