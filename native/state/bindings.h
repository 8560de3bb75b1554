// The Python binding of training state in files.
#pragma once

#include <nanobind/nanobind.h>

namespace dejax::offload {

void BindState(nanobind::module_& m);

}  // namespace dejax::offload
