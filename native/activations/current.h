// Which store a call of a program uses. A program carries a binding, a number that is the same in every process. Python
// sets which store a binding stands for.
#pragma once

#include <cstdint>
#include <memory>

#include "activations/store.h"

namespace dejax::offload {

// Stands for the process's own store. Bindings of no store fall back to it.
constexpr int64_t kDefaultBinding = 1;
// From here on a binding belongs to one store (`store=`), and using it is an error while that store is not open.
constexpr int64_t kFirstOwnBinding = int64_t{1} << 32;

// From now on the binding stands for the store with this number; 0: for none.
void BindStore(int64_t binding, int64_t store);

// The store closes: no binding stands for it any more. Its number will be another store's.
void UnbindStore(int64_t store);

// The store in which a run stores under this binding: the one that the binding stood for at the run's first call. A run
// keeps it when the binding changes. Throws std::runtime_error.
std::shared_ptr<Store> StoreOfRun(int64_t run, int device, int64_t binding);

}  // namespace dejax::offload
