// Which store a call of a program means. Programs carry a binding, a number that is the same in every process, and never
// a store: Python says which store a binding stands for now.
#pragma once

#include <cstdint>
#include <memory>

#include "store.h"

namespace dejax::offload {

// Stands for the process's own store, and so does a binding that stands for nothing now.
constexpr int64_t kDefaultBinding = 1;
// From here on a binding is of one store, opened for it, and is an error while that store is not open.
constexpr int64_t kFirstOwnBinding = int64_t{1} << 32;

// From now on the binding stands for the store with this id; 0: for none.
void BindStore(int64_t binding, int64_t store);

// A store closes: no binding stands for it any more, since its number is given again.
void UnbindStore(int64_t store);

// The store in which a run stores by this binding: the one that it stood for at the run's first call, also when it has
// come to stand for another one since. Throws std::runtime_error.
std::shared_ptr<Store> StoreOfRun(int64_t run, int device, int64_t binding);

// The same for a call that does not store: null where the run has stored nothing by this binding.
std::shared_ptr<Store> StoreOfRunIfAny(int64_t run, int device, int64_t binding);

// Fetches a tensor of a GPU from the store that its handle names. A run that has stored by this binding asks that store,
// which may foresee the handle; otherwise the handle is read first.
void FetchFromItsStore(int64_t run, int device, Stream stream, int64_t binding, int64_t site, DevicePointer handle,
                       DevicePointer data, int64_t bytes);

}  // namespace dejax::offload
