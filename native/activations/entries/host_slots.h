// The host tier: slots of pinned or ordinary memory within a cap, and which tensor's slot is taken for a new one.
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <list>
#include <map>

#include "activations/entries/entry.h"
#include "activations/entries/prediction.h"
#include "activations/entries/registry.h"
#include "blocks/monitor.h"

namespace dejax::offload {

constexpr uint64_t kAnySerial = std::numeric_limits<uint64_t>::max();

// All calls hold the store's mutex. Those that get the lock release it for a while: whatever the caller knew of entries
// may have changed.
class HostSlots {
 public:
  HostSlots(int64_t cap, Monitor* monitor, Registry* registry, const Prediction* prediction, Counters* stats)
      : cap_(cap), monitor_(monitor), registry_(registry), prediction_(prediction), stats_(stats) {}

  bool CanHold(int64_t bytes) const { return CapacityFor(bytes) <= cap_; }
  // A slot; null where there is no room now.
  //   victims_below: entries on disk with a lower serial may lose their slot.
  //   last_resort: so may fetched tensors that are probably fetched again.
  Slot* TryTake(Lock& lock, int64_t bytes, bool pinned, uint64_t victims_below = kAnySerial, bool last_resort = false);
  // Nobody needs the slot's bytes any more, but for a second fetch.
  void Release(Slot* slot);

  // The entry is on disk and in a slot: the slot may be taken.
  void AddVictim(const EntryPtr& entry) { victims_[entry->serial] = entry; }
  void RemoveVictim(const Entry& entry) { victims_.erase(entry.serial); }

  // Whether the entry is probably fetched more than once, and so needs a slot after its first fetch.
  bool IsShared(const Entry& entry) const { return ReuseOf(entry) > Reuse::kLikelyFree; }

  // Whether a free slot is still being copied, written or read.
  bool HasBusyFreeSlot() const;
  int64_t allocated() const { return allocated_; }
  // A store that closes: all slots, to be given to Free.
  std::list<Slot> TakeAll();
  // Gives memory back, after what the GPU still does with it. Without the mutex.
  static void Free(std::list<Slot>* slots);

 private:
  // Whether a free slot's former tensor may be fetched again.
  enum class Reuse { kFree, kLikelyFree, kLikelyShared, kNo };
  struct Request;

  static int64_t CapacityFor(int64_t bytes);
  Reuse ReuseOf(const Entry& entry) const;
  Reuse ReuseOf(const Slot& slot) const;
  Slot* FindFree(const Request& request, Reuse at_most);
  void Shrink(Request* request, Reuse at_most);
  Slot* FindVictim(Request* request, uint64_t victims_below);
  Slot* Take(Slot* slot);
  bool HasRoom(const Request& request) const;
  void GiveBack(Request* request, Slot* slot);
  Slot* Exchange(Lock& lock, Request* request, bool make);

  const int64_t cap_;
  Monitor* const monitor_;
  Registry* const registry_;
  const Prediction* const prediction_;
  Counters* const stats_;
  std::list<Slot> slots_;
  std::deque<Slot*> free_;               // oldest first
  std::map<uint64_t, EntryPtr> victims_;  // by serial
  int64_t allocated_ = 0;
};

}  // namespace dejax::offload
