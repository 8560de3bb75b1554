// The submodule `offload_testing`, for tests and benchmarks alone.
#pragma once

#include <nanobind/nanobind.h>

namespace dejax::offload {

void BindTesting(nanobind::module_& m);

}  // namespace dejax::offload
