#include "activations/entries/host_slots.h"

#include <sys/mman.h>

#include <algorithm>

namespace dejax::offload {
namespace {

// Null where there is none.
void* GetMemory(int64_t capacity, bool pinned) {
  void* data = nullptr;
  if (pinned) {
    constexpr unsigned kPortable = 1, kDeviceMap = 2;
    const Result result = GetDriver().host_alloc(&data, static_cast<size_t>(capacity), kPortable | kDeviceMap);
    return result == 0 ? data : nullptr;
  }
  data = mmap(nullptr, capacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return nullptr;
#ifdef MADV_HUGEPAGE
  if (capacity >= 4 << 20) madvise(data, capacity, MADV_HUGEPAGE);
#endif
  return data;
}

}  // namespace

struct HostSlots::Request {
  int64_t capacity = 0;
  bool pinned = false;
  std::list<Slot> leaving;  // slots whose memory makes room
  int64_t leaving_bytes = 0;

  bool Fits(const Slot& slot) const {
    return slot.pinned == pinned && slot.capacity >= capacity && slot.capacity <= capacity + capacity / 4;
  }
};

int64_t HostSlots::CapacityFor(int64_t bytes) { return RoundUp(std::max<int64_t>(bytes, 1), kPage); }

void HostSlots::Free(std::list<Slot>* slots) {
  for (Slot& slot : *slots) {
    for (Event* event : {&slot.last_read, &slot.last_write}) {
      // An error here is the device's, and shows in the step that caused it.
      if (*event) GetDriver().event_synchronize(event->get());
      event->reset();
    }
    if (slot.pinned) {
      GetDriver().host_free(slot.data);
    } else {
      munmap(slot.data, slot.capacity);
    }
  }
  slots->clear();
}

std::list<Slot> HostSlots::TakeAll() {
  victims_.clear();
  free_.clear();
  allocated_ = 0;
  std::list<Slot> slots;
  slots.swap(slots_);
  return slots;
}

void HostSlots::Release(Slot* slot) {
  slot->free = true;
  free_.push_back(slot);
}

bool HostSlots::HasBusyFreeSlot() const {
  return std::any_of(free_.begin(), free_.end(), [](const Slot* slot) { return slot->pins > 0; });
}

// In a program's first run nobody knows how often a tensor is fetched. Where one call stored once and others several
// times, XLA most likely moved the one out of a loop, and each turn fetches its tensor. In later runs the store knows how
// often the run before fetched it, and relies on that only while there is no other memory.
HostSlots::Reuse HostSlots::ReuseOf(const Entry& entry) const {
  const RunPtr run = entry.run.lock();
  if (!run || (stats_->runs - run->number > 4 && Seconds() - run->last_used > kIdleSeconds)) return Reuse::kFree;
  switch (prediction_->UsesOf(entry.site)) {
    case Prediction::Uses::kOnce: return Reuse::kFree;
    case Prediction::Uses::kRepeatedly:
      return prediction_->FetchedAsOftenAsBefore(entry) ? Reuse::kLikelyFree : Reuse::kNo;
    default: return run->loops && run->stored_by_site[entry.site] == 1 ? Reuse::kLikelyShared : Reuse::kLikelyFree;
  }
}

HostSlots::Reuse HostSlots::ReuseOf(const Slot& slot) const {
  const EntryPtr entry = slot.serial == 0 ? nullptr : registry_->FindBySerial(slot.serial);
  return entry ? ReuseOf(*entry) : Reuse::kFree;
}

// Makes a free slot the caller's: what it held is forgotten.
Slot* HostSlots::Take(Slot* slot) {
  const EntryPtr former = slot->serial == 0 ? nullptr : registry_->FindBySerial(slot->serial);
  if (former) registry_->Retire(former);
  slot->free = false;
  slot->serial = 0;
  return slot;
}

bool HostSlots::HasRoom(const Request& request) const {
  return allocated_ - request.leaving_bytes + request.capacity <= cap_;
}

void HostSlots::GiveBack(Request* request, Slot* slot) {
  const auto at = std::find_if(slots_.begin(), slots_.end(), [&](const Slot& other) { return &other == slot; });
  request->leaving_bytes += slot->capacity;
  request->leaving.splice(request->leaving.end(), slots_, at);
}

// The smallest free slot that fits, the oldest of equal ones: a tight budget has no memory to waste.
Slot* HostSlots::FindFree(const Request& request, Reuse at_most) {
  auto best = free_.end();
  for (auto at = free_.begin(); at != free_.end(); ++at) {
    const Slot& slot = **at;
    if (slot.pins > 0 || !request.Fits(slot)) continue;
    if (best != free_.end() && (*best)->capacity <= slot.capacity) continue;
    if (ReuseOf(slot) <= at_most) best = at;
  }
  if (best == free_.end()) return nullptr;
  Slot* slot = *best;
  free_.erase(best);
  return Take(slot);
}

// Gives up free slots of other sizes until there is room.
void HostSlots::Shrink(Request* request, Reuse at_most) {
  for (auto at = free_.begin(); at != free_.end() && !HasRoom(*request);) {
    Slot* slot = *at;
    if (slot->pins > 0 || ReuseOf(*slot) > at_most) {
      ++at;
      continue;
    }
    at = free_.erase(at);
    GiveBack(request, Take(slot));
  }
}

// Takes slots whose bytes are on disk too, oldest first: backward fetches those last. Null where none fits.
Slot* HostSlots::FindVictim(Request* request, uint64_t victims_below) {
  for (auto at = victims_.begin(); at != victims_.end() && at->first < victims_below && !HasRoom(*request);) {
    const EntryPtr entry = at->second;
    Slot* slot = entry->slot;
    if (slot == nullptr || slot->pins > 0) {
      ++at;
      continue;
    }
    at = victims_.erase(at);
    entry->slot = nullptr;
    slot->serial = 0;
    if (request->Fits(*slot)) return slot;
    GiveBack(request, slot);
  }
  return nullptr;
}

// Frees the memory of the slots that leave, then makes a slot if asked to. Null where there is no memory.
Slot* HostSlots::Exchange(Lock& lock, Request* request, bool make) {
  const int64_t capacity = make ? request->capacity : 0, freed = request->leaving_bytes;
  // The new slot may take the place of those that leave.
  const int64_t more = std::max<int64_t>(0, capacity - freed);
  allocated_ += more;
  void* data = nullptr;
  {
    const Unlocked unlocked(monitor_, lock);
    Free(&request->leaving);
    if (make) data = GetMemory(capacity, request->pinned);
  }
  request->leaving_bytes = 0;
  allocated_ += (data != nullptr ? capacity : 0) - freed - more;
  if (data == nullptr) return nullptr;
  stats_->peak_host_bytes = std::max(stats_->peak_host_bytes, allocated_);
  slots_.emplace_back();
  Slot* slot = &slots_.back();
  slot->data = data;
  slot->capacity = capacity;
  slot->pinned = request->pinned;
  return slot;
}

Slot* HostSlots::TryTake(Lock& lock, int64_t bytes, bool pinned, uint64_t victims_below, bool last_resort) {
  Request request;
  request.capacity = CapacityFor(bytes);
  request.pinned = pinned;
  if (Slot* slot = FindFree(request, Reuse::kFree)) return slot;
  if (HasRoom(request)) {
    if (Slot* slot = Exchange(lock, &request, /*make=*/true)) return slot;
  }
  if (Slot* slot = FindFree(request, Reuse::kLikelyFree)) return slot;
  Shrink(&request, Reuse::kLikelyFree);
  Slot* found = FindVictim(&request, victims_below);
  if (found == nullptr && !HasRoom(request) && last_resort) {
    found = FindFree(request, Reuse::kLikelyShared);
    if (found == nullptr) Shrink(&request, Reuse::kLikelyShared);
  }
  const bool make = found == nullptr && HasRoom(request);
  if (make || !request.leaving.empty()) {
    Slot* made = Exchange(lock, &request, make);
    if (make) return made;
  }
  return found;
}

}  // namespace dejax::offload
