#include "activations/current.h"

#include <deque>
#include <map>
#include <mutex>
#include <stdexcept>
#include <tuple>
#include <unordered_map>

#include "driver/together.h"

namespace dejax::offload {
namespace {

// Runs whose stores are remembered: a run ends long before so many others have begun.
constexpr size_t kMostRuns = 4096;

using RunKey = std::tuple<int64_t, int, int64_t>;  // run, device, binding

struct Table {
  std::mutex mutex;
  std::unordered_map<int64_t, int64_t> stores;  // by binding
  std::map<RunKey, std::weak_ptr<Store>> runs;
  std::deque<RunKey> oldest;
};

Table& GetTable() {
  static Table* const table = new Table;  // never destroyed: handlers may run while the process exits
  return *table;
}

int64_t IdOf(const Table& table, int64_t binding) {
  auto found = table.stores.find(binding);
  if (found == table.stores.end() && binding < kFirstOwnBinding) found = table.stores.find(kDefaultBinding);
  return found == table.stores.end() ? 0 : found->second;
}

std::shared_ptr<Store> Resolve(int64_t binding, int64_t id) {
  if (id != 0) return FindStore(id);
  if (binding >= kFirstOwnBinding) {
    throw FailsEverywhere(
        "offload: the store that this step was traced with (`store=`) was closed before this step ran, or was never "
        "opened in this process; keep it open until the last step has ended, or open one with the same arguments");
  }
  throw FailsEverywhere(
      "offload: no store is current; run the step inside `with ActivationStore(...)`, or call "
      "dejax.offload.default_store() once");
}

}  // namespace

void BindStore(int64_t binding, int64_t store) {
  Table& table = GetTable();
  std::lock_guard<std::mutex> lock(table.mutex);
  if (store == 0) {
    table.stores.erase(binding);
  } else {
    table.stores[binding] = store;
  }
}

void UnbindStore(int64_t store) {
  Table& table = GetTable();
  std::lock_guard<std::mutex> lock(table.mutex);
  for (auto at = table.stores.begin(); at != table.stores.end();) {
    at = at->second == store ? table.stores.erase(at) : std::next(at);
  }
}

std::shared_ptr<Store> StoreOfRun(int64_t run, int device, int64_t binding) {
  Table& table = GetTable();
  const RunKey key{run, device, binding};
  int64_t id = 0;
  {
    std::lock_guard<std::mutex> lock(table.mutex);
    const auto found = table.runs.find(key);
    if (found != table.runs.end()) {
      if (auto known = found->second.lock()) return known;
    }
    id = IdOf(table, binding);
  }
  const std::shared_ptr<Store> store = Resolve(binding, id);
  std::lock_guard<std::mutex> lock(table.mutex);
  const auto [at, is_new] = table.runs.emplace(key, store);
  if (!is_new) {
    // Another device's thread was quicker, or XLA gave the number again.
    if (auto first = at->second.lock()) return first;
    at->second = store;
    return store;
  }
  table.oldest.push_back(key);
  if (table.oldest.size() > kMostRuns) {
    table.runs.erase(table.oldest.front());
    table.oldest.pop_front();
  }
  return store;
}

}  // namespace dejax::offload
