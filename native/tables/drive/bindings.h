// `RowReader` in Python.
#pragma once

#include <nanobind/nanobind.h>

namespace dejax {

void DefineRowReader(nanobind::module_& m);

}  // namespace dejax
