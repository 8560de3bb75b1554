// The ways of an entry between the tiers, and what is given up to make room.
#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <vector>

#include "activations/ring.h"
#include "activations/store.h"

namespace dejax::offload {
namespace {

using std::chrono::milliseconds;

constexpr double kPauseSeconds = 0.01;  // a forward pass that goes on mostly stores again within this time
constexpr size_t kWritesAtOnce = 4;     // of those that nobody planned

std::string Megabytes(int64_t bytes) {
  return bytes < 10000000 ? std::to_string(bytes) + " bytes" : std::to_string(bytes / 1000000) + " MB";
}

bool IsOnlyOnDisk(const EntryPtr& entry) {
  return entry->live && entry->slot == nullptr && !entry->in_ring && entry->disk == Entry::Disk::kWritten &&
         entry->error.empty();
}

bool IsBeingStored(const EntryPtr& entry) {
  return entry->live && entry->slot == nullptr && !entry->in_ring && entry->disk != Entry::Disk::kWritten;
}

}  // namespace

RunPtr Store::RunOf(int64_t id, int device) {
  if (RunPtr run = registry_.FindRun(id, device)) return run;
  const RunPtr run = registry_.BeginRun(id, device);
  for (const RunPtr& old : registry_.StaleRuns()) {
    if (old->fetched) DropLive(old);  // its backward pass did not fetch everything
    if (old->stack.empty()) registry_.Forget(old);
  }
  return run;
}

void Store::FetchBegins(const RunPtr& run, bool by_itself) {
  run->last_used = Seconds();
  run->fetched |= by_itself;
  run->reading_back = true;
  prediction_.SetForwardOnly(*run, false);
}

// Takes an entry out of its run: it was fetched, or is given up.
void Store::Remove(const EntryPtr& entry, const RunPtr& run) {
  prediction_.Fetched(entry.get());
  if (!entry->live) return;
  entry->live = false;
  host_.RemoveVictim(*entry);
  io_.Discard(entry.get());
  if (entry->slot != nullptr) {
    host_.Release(entry->slot);
  } else {
    registry_.Retire(entry);
  }
  registry_.Leave(entry, run);
  if (run) prediction_.SetPeak(*run, {run->peak_bytes, run->peak_top});
  monitor_.changed.notify_all();
}

void Store::Drop(const EntryPtr& entry) {
  const RunPtr run = entry->run.lock();
  for (auto& [device, ring] : rings_) ring->Leave(entry);
  const Peak* const known = run ? prediction_.PeakOf(*run) : nullptr;
  const Peak before = known != nullptr ? *known : Peak{-1, 0};
  Remove(entry, run);
  if (run && run->peak_bytes > 0) {  // a run that is given up does not tell how much a whole one stores
    if (before.bytes < 0) {
      prediction_.ForgetPeak(*run);
    } else {
      prediction_.SetPeak(*run, before);
    }
  }
  ++stats_.dropped_count;
  registry_.Retire(entry);
}

void Store::DropLive(const RunPtr& run) {
  const std::vector<EntryPtr> stack = run->stack;
  for (const EntryPtr& entry : stack) {
    if (entry->live) Drop(entry);
  }
}

void Store::FailRun(const RunPtr& run, const std::string& why) {
  if (!run) return;
  if (run->failure.empty()) run->failure = why;
  DropLive(run);
}

void Store::GiveUpRun(int64_t id, int device) {
  const Lock lock(monitor_.mutex);
  if (!monitor_.closing) FailRun(registry_.FindRun(id, device));
}

// Gives up the oldest run that has been idle for a while. A program of which an earlier run was given up with nothing
// fetched is taken for a forward pass alone: the store does not wait for its runs again.
bool Store::DropOldest(const Run* current) {
  const double now = Seconds();
  for (const RunPtr& old : registry_.runs()) {
    const RunPtr run = old;
    if (run.get() == current || run->stack.empty()) continue;
    const bool alone = prediction_.IsForwardOnly(*run) && current != nullptr && run->number < current->number &&
                       std::none_of(run->stack.begin(), run->stack.end(), IsBeingStored);
    if (now - run->last_used < (alone ? kPauseSeconds : kIdleSeconds)) continue;
    if (!run->reading_back) prediction_.SetForwardOnly(*run, true);
    FailRun(run);
    return true;
  }
  return false;
}

bool Store::IsRoomComing() const { return !io_.idle() || host_.HasBusyFreeSlot() || monitor_.active > 0; }

// What other threads' runs fetch makes room, and so does this run where it fetches already.
bool Store::OthersMayMakeRoom(const RunPtr& run) const {
  return !run || run->reading_back || std::any_of(registry_.runs().begin(), registry_.runs().end(), [&](const RunPtr& r) {
    return r != run && !r->stack.empty();
  });
}

std::string Store::HostTierIsFull() const {
  std::string why = "offload: the host tier is full: host_bytes=" + std::to_string(options_.host_bytes) + ", " +
                    std::to_string(stats_.live_count) + " tensors of " + Megabytes(stats_.live_bytes) + " are stored";
  if (!io_.has_disk()) return why + "; raise host_bytes, or give the store a path for a disk tier";
  return io_.last_error().empty() ? why : why + "; the disk tier failed: " + io_.last_error();
}

Slot* Store::TakeSlot(Lock& lock, const EntryPtr& entry, bool pinned) {
  const int64_t bytes = entry->bytes;
  if (!host_.CanHold(bytes)) {
    throw std::runtime_error("offload: a tensor of " + Megabytes(bytes) + " is larger than host_bytes=" +
                             std::to_string(options_.host_bytes) + "; raise host_bytes" +
                             (io_.has_disk() ? ", through which tensors pass on their way to disk, too" : ""));
  }
  const RunPtr run = entry->run.lock();
  if (Slot* slot = host_.TryTake(lock, bytes, pinned)) return slot;
  const Stopwatch stopwatch(&stats_.store_stall_seconds);
  const double begin = Seconds();
  while (true) {
    RequireOpen();
    if (Slot* slot = host_.TryTake(lock, bytes, pinned)) return slot;
    if (IsRoomComing() || ForceWrites()) {
      monitor_.WaitForOthers(lock, milliseconds(200));
      continue;
    }
    if (Slot* slot = host_.TryTake(lock, bytes, pinned, kAnySerial, /*last_resort=*/true)) return slot;
    if (DropOldest(run.get())) continue;
    if (!OthersMayMakeRoom(run) || Seconds() - begin >= kIdleSeconds + 0.1) throw std::runtime_error(HostTierIsFull());
    monitor_.WaitForOthers(lock, milliseconds(20));
  }
}

// Writes that nobody planned: the oldest entries that are in host memory alone.
bool Store::ForceWrites() {
  if (!io_.has_disk()) return false;
  std::vector<EntryPtr> candidates;
  for (const EntryPtr& entry : registry_.Live()) {
    if (entry->disk == Entry::Disk::kNone && entry->slot != nullptr && entry->slot->pins == 0 &&
        (!entry->slot->pinned || entry->copied_out)) {
      candidates.push_back(entry);
    }
  }
  std::sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) { return a->serial < b->serial; });
  if (candidates.size() > kWritesAtOnce) candidates.resize(kWritesAtOnce);
  bool any = false;
  for (const EntryPtr& entry : candidates) {
    io_.QueueWrite(entry);
    any |= entry->disk == Entry::Disk::kQueued;
  }
  return any;
}

bool Store::ShouldWrite(const RunPtr& run, const Entry& entry) const {
  if (!io_.has_disk() || entry.bytes == 0 || entry.slot == nullptr || entry.disk != Entry::Disk::kNone) return false;
  const Prediction::Uses uses = prediction_.UsesOf(entry.site);
  if (uses == Prediction::Uses::kRepeatedly) return false;
  const Peak* const peak = prediction_.PeakOf(*run);
  if (peak == nullptr) return true;  // the first run: nobody knows yet what will stay in memory
  // The top of the stack that fits into memory is not written: it is fetched first. Its very top stays in the ring.
  int64_t on_device = 0;
  const auto ring = rings_.find(run->device);
  if (ring != rings_.end() && entry.span > 0 && uses == Prediction::Uses::kOnce) {
    on_device = ring->second->capacity() / entry.span * entry.bytes;
  }
  return peak->bytes - run->live_bytes + entry.bytes - on_device > options_.host_bytes - options_.host_bytes / 8;
}

// Reads the tensors that a run will fetch next, in reverse order of creation, as far as there is memory for them.
void Store::ReadAhead(const RunPtr& run, Lock& lock) {
  if (!io_.has_disk() || !run) return;
  while (!monitor_.closing) {
    const auto next = std::find_if(run->stack.rbegin(), run->stack.rend(), IsOnlyOnDisk);
    if (next == run->stack.rend()) return;
    const EntryPtr entry = *next;
    Slot* slot = host_.TryTake(lock, entry->bytes, run->device >= 0, entry->serial);
    if (slot == nullptr) return;
    if (monitor_.closing || !IsOnlyOnDisk(entry)) {  // while the mutex was free
      host_.Release(slot);
      continue;
    }
    io_.QueueRead(entry, slot);
  }
}

// Returns when the entry's slot holds its bytes, or work that brings them there has been submitted.
void Store::AwaitHost(Lock& lock, const EntryPtr& entry, bool pinned) {
  const auto is_there = [&] { return entry->slot != nullptr && !entry->reading; };
  if (is_there()) {
    if (io_.has_disk() && entry->live && entry->disk != Entry::Disk::kWritten) stats_.forwarded_bytes += entry->bytes;
    return;
  }
  const Stopwatch stopwatch(&stats_.fetch_stall_seconds);
  while (!is_there()) {
    RequireOpen();
    if (!entry->error.empty()) throw std::runtime_error(entry->error);
    if (entry->slot == nullptr) {
      if (!entry->live || entry->disk != Entry::Disk::kWritten) {
        throw std::runtime_error("offload: the tensor of handle " + std::to_string(entry->serial) +
                                 " was given up before it was fetched; run forward again");
      }
      Slot* slot = TakeSlot(lock, entry, pinned);
      if (entry->slot != nullptr || !entry->live) {  // another thread was quicker
        host_.Release(slot);
        continue;
      }
      io_.QueueRead(entry, slot);
    }
    monitor_.WaitForOthers(lock, milliseconds(200));
  }
  if (!entry->error.empty()) throw std::runtime_error(entry->error);
}

// A tensor that was read goes on to the device's ring at once, as far as there is room: the launch thread may be far
// ahead, and not come by before the GPU needs it.
void Store::Prefetch(const RunPtr& run) {
  const auto ring = run && !monitor_.closing ? rings_.find(run->device) : rings_.end();
  if (ring == rings_.end()) return;
  try {
    const ContextScope scope(ring->second->context());
    ring->second->Prefetch(run);
  } catch (const std::runtime_error&) {
    // The fetch will meet the same error, and can report it.
  }
}

}  // namespace dejax::offload
