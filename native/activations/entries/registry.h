// The entries of a store and the runs that stored them.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "activations/entries/entry.h"
#include "activations/entries/prediction.h"

namespace dejax::offload {

// A handle: the store's number, then the entry's serial.
constexpr uint64_t kSerialBits = 48;
constexpr uint64_t SerialOf(uint64_t handle) { return handle & ((1ull << kSerialBits) - 1); }
constexpr int64_t StoreOf(uint64_t handle) { return static_cast<int64_t>(handle >> kSerialBits); }

// All calls hold the store's mutex.
class Registry {
 public:
  Registry(int64_t store, Prediction* prediction, Counters* stats)
      : store_(store), prediction_(prediction), stats_(stats) {}

  uint64_t HandleOf(uint64_t serial) const { return static_cast<uint64_t>(store_) << kSerialBits | serial; }

  RunPtr FindRun(int64_t id, int device) const;
  RunPtr BeginRun(int64_t id, int device);
  // In the order in which they began.
  const std::deque<RunPtr>& runs() const { return begun_; }
  // Runs that began long ago and have been idle since.
  std::vector<RunPtr> StaleRuns() const;
  void Forget(const RunPtr& run);

  EntryPtr Add(const RunPtr& run, int64_t call, int64_t bytes, const ShardPlace& place);
  // Throws std::runtime_error where the handle stands for no tensor of this size and place.
  EntryPtr Find(uint64_t handle, int64_t call, int64_t bytes, int device, const ShardPlace& place);
  EntryPtr FindBySerial(uint64_t serial) const;
  std::vector<EntryPtr> Live() const;
  // Takes an entry that was fetched or dropped out of its run's accounts.
  void Leave(const EntryPtr& entry, const RunPtr& run);
  // Forgets an entry: its slot belongs to another one. By value: the caller may hold a reference into the map.
  void Retire(EntryPtr entry);
  void Clear();

 private:
  const int64_t store_;
  Prediction* const prediction_;
  Counters* const stats_;
  // Shared by all stores of the process: a handle of a closed store never names another store's tensor.
  inline static std::atomic<uint64_t> next_serial_{1};
  std::unordered_map<uint64_t, EntryPtr> entries_;
  std::map<std::pair<int64_t, int>, RunPtr> by_id_;
  std::deque<RunPtr> begun_;
};

}  // namespace dejax::offload
