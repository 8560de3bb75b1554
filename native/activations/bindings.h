// The offload store's Python binding.
#pragma once

#include <nanobind/nanobind.h>

namespace dejax::offload {

void BindActivations(nanobind::module_& m);

}  // namespace dejax::offload
