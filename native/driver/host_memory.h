// The memory of tables in the host: pinned and mapped by the driver, or ordinary; allocated, a mapped file, or owned by
// a caller. Python has a `HostMemory`, jax a DLPack capsule; both share ownership of the block.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

namespace dejax {

void DefineHostMemory(nanobind::module_& m);

// Gives a `HostMemory` something that works in it: it lives as long as the memory, and ends first.
void SetUserOfMemory(nanobind::handle memory, std::shared_ptr<void> user);

}  // namespace dejax
