// The offload store's Python binding.
#pragma once

#include <nanobind/nanobind.h>

namespace dejax::offload {

void Bind(nanobind::module_& m);

}  // namespace dejax::offload
