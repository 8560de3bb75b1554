#include "activations/open_stores.h"

#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <vector>

#include "activations/current.h"
#include "activations/store.h"

namespace dejax::offload {
namespace {

struct OpenStores {
  std::mutex mutex;
  std::map<int64_t, std::shared_ptr<Store>> by_number;
  std::set<int64_t> taken;
};

OpenStores& Get() {
  static OpenStores* const stores = new OpenStores;  // never destroyed: handlers may run while the process exits
  return *stores;
}

int64_t TakeNumber() {
  OpenStores& stores = Get();
  const std::lock_guard<std::mutex> lock(stores.mutex);
  int64_t number = 1;
  for (const int64_t taken : stores.taken) {
    if (taken != number) break;
    ++number;
  }
  if (number >= int64_t{1} << (64 - kSerialBits)) {
    throw std::runtime_error("offload: 65,535 stores are open; close those that are not needed");
  }
  stores.taken.insert(number);
  return number;
}

}  // namespace

StoreNumber::StoreNumber() : value_(TakeNumber()) {}

void StoreNumber::GiveBack() {
  OpenStores& stores = Get();
  const std::lock_guard<std::mutex> lock(stores.mutex);
  if (taken_) stores.taken.erase(value_);
  taken_ = false;
}

void AddOpenStore(const std::shared_ptr<Store>& store) {
  OpenStores& stores = Get();
  const std::lock_guard<std::mutex> lock(stores.mutex);
  stores.by_number[store->id()] = store;
}

void RemoveOpenStore(const Store& store) {
  OpenStores& stores = Get();
  const std::lock_guard<std::mutex> lock(stores.mutex);
  const auto found = stores.by_number.find(store.id());
  if (found == stores.by_number.end() || found->second.get() != &store) return;  // another one has the number by now
  UnbindStore(store.id());
  stores.by_number.erase(found);
}

std::shared_ptr<Store> FindStore(int64_t number) {
  OpenStores& stores = Get();
  const std::lock_guard<std::mutex> lock(stores.mutex);
  const auto found = stores.by_number.find(number);
  if (found == stores.by_number.end()) {
    if (number == 0) {
      throw std::runtime_error("offload: a fetch must have a handle, got none: its tensor was stored in a branch that was "
                               "not taken. `jax.vmap` of `cond` or `switch` by a batched index runs all branches: offload "
                               "around the branches in place of inside, or map with jax.lax.map");
    }
    throw std::runtime_error("offload: the store was closed before this step ran; keep it open until the last step has "
                             "ended (jax.block_until_ready)");
  }
  return found->second;
}

void GiveUpRun(int64_t run, int device) {
  OpenStores& stores = Get();
  std::vector<std::shared_ptr<Store>> open;
  {
    const std::lock_guard<std::mutex> lock(stores.mutex);
    for (const auto& [number, store] : stores.by_number) open.push_back(store);
  }
  for (const auto& store : open) store->GiveUpRun(run, device);
}

}  // namespace dejax::offload
