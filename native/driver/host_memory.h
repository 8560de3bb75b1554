// The memory of tables in the host: pinned and mapped by the driver, or ordinary; allocated, a mapped file, or owned by
// a caller. Python has a `HostMemory`, jax a DLPack capsule; both share ownership of the block.
#pragma once

#include <nanobind/nanobind.h>

namespace dejax {

void DefineHostMemory(nanobind::module_& m);

}  // namespace dejax
