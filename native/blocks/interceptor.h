// An observer of a store's operations that may make them fail. Only tests and benchmarks attach one.
#pragma once

#include "blocks/block_source.h"

namespace dejax::offload {

enum class Operation { kStore, kFetch, kWrite, kRead };

// Any thread calls it, for stores and fetches with the store's mutex held.
class Interceptor {
 public:
  virtual ~Interceptor() = default;
  // May throw std::runtime_error: then the operation fails. Reads and writes may be delayed.
  virtual void Before(Operation operation) = 0;
  // A chunk was written; its checksum may be changed.
  virtual void Written(Chunk* chunk) = 0;
};

}  // namespace dejax::offload
