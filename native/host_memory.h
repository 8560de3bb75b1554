// Memory of the host that tables live in: pinned and mapped by the driver, or ordinary; allocated, a mapped file, or a
// caller's own. Python sees `HostMemory`, jax a DLPack capsule of it; both hold the block, which goes when the last one
// does.
#pragma once

#include <nanobind/nanobind.h>

namespace dejax {

void DefineHostMemory(nanobind::module_& m);

}  // namespace dejax
