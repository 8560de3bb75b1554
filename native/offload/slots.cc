// The host tier: slots of pinned or ordinary memory within the cap, and who makes room.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>

#include "store.h"
#include "store_internal.h"

namespace dejax::offload {

namespace {

// Null where there is none.
void* GetMemory(int64_t capacity, bool pinned) {
  void* data = nullptr;
  if (pinned) {
    constexpr unsigned kPortable = 1, kDeviceMap = 2;
    const Result result = GetCalls().host_alloc(&data, static_cast<size_t>(capacity), kPortable | kDeviceMap);
    return result == 0 ? data : nullptr;
  }
  data = mmap(nullptr, capacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return nullptr;
#ifdef MADV_HUGEPAGE
  if (capacity >= 4 << 20) madvise(data, capacity, MADV_HUGEPAGE);
#endif
  return data;
}

int64_t CapacityFor(int64_t bytes) { return RoundUp(std::max<int64_t>(bytes, 1), kPage); }

}  // namespace

// Waits for what the GPU still does with the memory. Without the mutex.
void Store::FreeMemory(std::list<Slot>* slots) {
  for (Slot& slot : *slots) {
    for (Event* event : {&slot.last_read, &slot.last_write}) {
      // An error here is the device's, and shows in the step that it belongs to.
      if (*event) GetCalls().event_synchronize(event->get());
      event->reset();
    }
    if (slot.pinned) {
      GetCalls().host_free(slot.data);
    } else {
      munmap(slot.data, slot.capacity);
    }
  }
  slots->clear();
}

// Gives the memory of `leaving`, which is nobody's any more, back, then makes a slot; with capacity 0 it makes none. Null
// where there is no memory. Lets go of the mutex.
Slot* Store::Exchange(Lock& lock, std::list<Slot>* leaving, int64_t capacity, bool pinned) {
  int64_t freed = 0;
  for (const Slot& slot : *leaving) freed += slot.capacity;
  // What comes may take the place of what leaves.
  const int64_t more = std::max<int64_t>(0, capacity - freed);
  host_allocated_ += more;
  void* data = nullptr;
  {
    const Unlocked unlocked(this, lock);
    FreeMemory(leaving);
    if (capacity > 0) data = GetMemory(capacity, pinned);
  }
  host_allocated_ += (data != nullptr ? capacity : 0) - freed - more;
  if (data == nullptr) return nullptr;
  stats_.peak_host_bytes = std::max(stats_.peak_host_bytes, host_allocated_);
  slots_.emplace_back();
  Slot* slot = &slots_.back();
  slot->data = data;
  slot->capacity = capacity;
  slot->pinned = pinned;
  return slot;
}

void Store::ReleaseSlot(Slot* slot) {
  slot->free = true;
  free_.push_back(slot);
}

// Whether a free slot's former bytes may be fetched once more. In a program's first run nobody knows: what one call
// stored where others stored several was taken out of a loop, most likely, each turn of which fetches it. Later one knows
// how often that was, and needs not rely on it while there is other memory.
Store::Reuse Store::MayReuse(const Slot& slot) const {
  const auto entry = slot.serial == 0 ? entries_.end() : entries_.find(slot.serial);
  if (entry == entries_.end()) return Reuse::kFree;
  const RunPtr run = entry->second->run.lock();
  if (!run || (stats_.runs - run->number > 4 && Seconds() - run->last_used > kIdleSeconds)) return Reuse::kFree;
  const auto site = sites_.find(entry->second->site);
  if (site == sites_.end()) return Reuse::kFree;
  switch (site->second.uses) {
    case Site::Uses::kOne: return Reuse::kFree;
    case Site::Uses::kMany: {
      const int known = site->second.known_fetches;
      return known > 0 && entry->second->fetches >= known ? Reuse::kLikelyFree : Reuse::kNo;
    }
    default: break;
  }
  return run->loops && run->stored_by_site[entry->second->site] == 1 ? Reuse::kLikelyShared : Reuse::kLikelyFree;
}

// Null where there is no room now.
Slot* Store::TryTakeSlot(Lock& lock, int64_t bytes, bool pinned, uint64_t victims_below, bool last_resort) {
  const int64_t capacity = CapacityFor(bytes);
  std::list<Slot> leaving;
  int64_t leaving_bytes = 0;
  const auto room = [&] { return host_allocated_ - leaving_bytes + capacity <= options_.host_bytes; };
  const auto fits = [&](const Slot& slot) {
    return slot.pinned == pinned && slot.capacity >= capacity && slot.capacity <= capacity + capacity / 4;
  };
  const auto take = [&](Slot* slot) {
    if (slot->serial != 0) {
      const auto former = entries_.find(slot->serial);
      if (former != entries_.end()) Retire(former->second);
    }
    slot->free = false;
    slot->serial = 0;
    return slot;
  };
  const auto give_back = [&](Slot* slot) {
    const auto at = std::find_if(slots_.begin(), slots_.end(), [&](const Slot& other) { return &other == slot; });
    leaving_bytes += slot->capacity;
    leaving.splice(leaving.end(), slots_, at);
  };
  const auto find_free = [&](Reuse at_most) -> Slot* {
    auto best = free_.end();  // the smallest, of equal ones the oldest: a tight budget has none to waste
    for (auto at = free_.begin(); at != free_.end(); ++at) {
      const Slot& slot = **at;
      if (slot.pins > 0 || !fits(slot) || (best != free_.end() && (*best)->capacity <= slot.capacity)) continue;
      if (MayReuse(slot) <= at_most) best = at;
    }
    if (best == free_.end()) return nullptr;
    Slot* slot = *best;
    free_.erase(best);
    return take(slot);
  };
  // Memory of other sizes that nobody needs.
  const auto shrink = [&](Reuse at_most) {
    for (auto at = free_.begin(); at != free_.end() && !room();) {
      Slot* slot = *at;
      if (slot->pins > 0 || MayReuse(*slot) > at_most) {
        ++at;
        continue;
      }
      at = free_.erase(at);
      give_back(take(slot));
    }
  };
  // Memory whose bytes are on disk too: the oldest, which is fetched last.
  const auto find_written = [&]() -> Slot* {
    for (auto at = written_.begin(); at != written_.end() && at->first < victims_below && !room();) {
      const EntryPtr entry = at->second;
      Slot* slot = entry->slot;
      if (slot == nullptr || slot->pins > 0) {
        ++at;
        continue;
      }
      at = written_.erase(at);
      entry->slot = nullptr;
      slot->serial = 0;
      if (fits(*slot)) return slot;
      give_back(slot);
    }
    return nullptr;
  };
  if (Slot* slot = find_free(Reuse::kFree)) return slot;
  if (room()) {
    if (Slot* slot = Exchange(lock, &leaving, capacity, pinned)) return slot;
  }
  if (Slot* slot = find_free(Reuse::kLikelyFree)) return slot;
  shrink(Reuse::kLikelyFree);
  Slot* found = find_written();
  if (found == nullptr && !room() && last_resort) {
    found = find_free(Reuse::kLikelyShared);
    if (found == nullptr) shrink(Reuse::kLikelyShared);
  }
  const bool make = found == nullptr && room();
  if (make || !leaving.empty()) {
    Slot* made = Exchange(lock, &leaving, make ? capacity : 0, pinned);
    if (make) return made;
  }
  return found;
}

// Writes that nobody foresaw: the oldest entries that are nowhere but in host memory.
bool Store::ForceWrites() {
  if (!disk_) return false;
  std::vector<EntryPtr> candidates;
  for (const auto& [serial, entry] : entries_) {
    if (entry->live && entry->disk == Entry::Disk::kNone && entry->slot != nullptr && entry->slot->pins == 0 &&
        (!entry->slot->pinned || entry->copied_out)) {
      candidates.push_back(entry);
    }
  }
  std::sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) { return a->serial < b->serial; });
  if (candidates.size() > 4) candidates.resize(4);
  bool any = false;
  for (const EntryPtr& entry : candidates) {
    QueueWrite(entry);
    any |= entry->disk == Entry::Disk::kQueued;
  }
  return any;
}

Slot* Store::TakeSlot(Lock& lock, const EntryPtr& entry, bool pinned) {
  const int64_t bytes = entry->bytes;
  if (CapacityFor(bytes) > options_.host_bytes) {
    throw std::runtime_error("offload: a tensor of " + Megabytes(bytes) + " is larger than host_bytes=" +
                             std::to_string(options_.host_bytes) + "; raise host_bytes" +
                             (disk_ ? ", through which goes what is on disk too" : ""));
  }
  const RunPtr run = entry->run.lock();
  if (Slot* slot = TryTakeSlot(lock, bytes, pinned, kAnySerial)) return slot;
  const Stopwatch stopwatch(&stats_.store_stall_seconds);
  const double begin = Seconds();
  while (true) {
    RequireOpen();
    if (Slot* found = TryTakeSlot(lock, bytes, pinned, kAnySerial)) return found;
    const bool underway = running_jobs_ > 0 || !writes_.empty() || !reads_.empty() || !external_jobs_.empty() ||
                          std::any_of(free_.begin(), free_.end(), [](const Slot* free) { return free->pins > 0; }) ||
                          active_ > 0;
    if (!underway && !ForceWrites()) {
      if (Slot* found = TryTakeSlot(lock, bytes, pinned, kAnySerial, /*last_resort=*/true)) return found;
      if (DropOldest(run.get())) continue;
      // Other runs may go on in other threads: what they fetch makes room too. So may this one, where it fetches already.
      const bool others = !run || run->reading_back || std::any_of(recent_.begin(), recent_.end(), [&](const RunPtr& r) {
        return r != run && !r->stack.empty();
      });
      if (others && Seconds() - begin < kIdleSeconds + 0.1) {
        ++waiting_;
        changed_.wait_for(lock, std::chrono::milliseconds(20));
        --waiting_;
        if (closing_) changed_.notify_all();
        continue;
      }
      std::string why = "offload: the host tier is full: host_bytes=" + std::to_string(options_.host_bytes) + ", " +
                        std::to_string(stats_.live_count) + " tensors of " + Megabytes(stats_.live_bytes) +
                        " are stored";
      why += disk_ ? (disk_error_.empty() ? "" : "; the disk tier failed: " + disk_error_)
                   : "; raise host_bytes, or give the store a path for a disk tier";
      throw std::runtime_error(why);
    }
    ++waiting_;  // not active: two that wait for room must not take each other for work under way
    changed_.wait_for(lock, std::chrono::milliseconds(200));
    --waiting_;
    changed_.notify_all();
  }
}

}  // namespace dejax::offload
