// Entries of a store and the runs that stored them: who is live, what a run is expected to store, what is given up.
#include <algorithm>

#include "ring.h"
#include "store.h"
#include "store_internal.h"

namespace dejax::offload {
namespace {

// What a run that has fetched some of its entries left over is dropped when so many later runs have begun and nothing
// was heard of it for a while.
constexpr size_t kLeftoverRuns = 8;
constexpr double kPauseSeconds = 0.01;  // within which a forward pass that goes on stores again, mostly

int64_t Mix(uint64_t before, uint64_t next) {
  uint64_t mixed = (before ^ next) * 0x9e3779b97f4a7c15ull;
  mixed = (mixed ^ mixed >> 29) * 0xbf58476d1ce4e5b9ull;
  return static_cast<int64_t>((mixed ^ mixed >> 32) >> 1);
}

}  // namespace

// What is known of a call is known of it in one program. The first calls of all kinds in a run say which program it is: on
// a GPU one thread makes them, always in the same order. The CPU makes independent calls in any order; there the call
// alone counts, and nothing is foreseen.
int64_t Store::SiteIn(Run& run, int64_t call) {
  const auto [at, is_new] = run.site_of_call.emplace(call, call);
  if (is_new && run.device >= 0) {
    run.program = static_cast<uint64_t>(at->second = Mix(run.program, static_cast<uint64_t>(call)));
    sites_of_call_[call].insert(at->second);
  }
  return at->second;
}

int64_t Store::SiteIn(const RunPtr& run, int64_t call) const {
  if (!run) return call;
  const auto found = run->site_of_call.find(call);
  return found == run->site_of_call.end() ? call : found->second;
}

RunPtr Store::FindRun(int64_t id, int device, bool create) {
  const double now = Seconds();
  const auto found = runs_.find({id, device});
  if (found != runs_.end()) {
    found->second->last_used = now;
    return found->second;
  }
  if (!create) return nullptr;
  auto run = std::make_shared<Run>();
  run->id = id;
  run->device = device;
  run->number = stats_.runs++;
  for (auto& [site, known] : sites_) known.known_fetches = known.fetches;
  run->last_used = now;
  runs_[{id, device}] = run;
  recent_.push_back(run);
  for (size_t i = 0; i + kLeftoverRuns < recent_.size();) {
    const RunPtr old = recent_[i];
    if (now - old->last_used <= kIdleSeconds) break;  // so are all later ones, or nearly
    if (old->fetched) {
      const std::vector<EntryPtr> left = old->stack;
      for (const EntryPtr& entry : left) {
        if (entry->live) Drop(entry);
      }
    }
    if (old->stack.empty()) {
      runs_.erase({old->id, old->device});
      recent_.erase(recent_.begin() + i);
    } else {
      ++i;
    }
  }
  return run;
}

EntryPtr Store::Add(const RunPtr& run, int64_t call, int64_t bytes) {
  const int64_t site = SiteIn(*run, call);
  auto entry = std::make_shared<Entry>();
  entry->serial = next_serial_++;
  entry->bytes = bytes;
  entry->site = site;
  entry->device = run->device;
  entry->run = run;
  entries_[entry->serial] = entry;
  if (run->stack.empty() && run->peak_bytes == 0) run->first_site = site;
  run->stack.push_back(entry);
  if (++run->stored_by_site[site] > 1) run->loops = true;
  auto& serials = run->by_site[site];
  Site& known = sites_[site];
  if (known.uses == Site::Uses::kUnknown && known.fetched && serials.empty()) known.uses = Site::Uses::kOne;
  serials.push_back(entry->serial);
  run->live_bytes += bytes;
  run->peak_bytes = std::max(run->peak_bytes, run->live_bytes);
  stats_.stored_bytes += bytes;
  ++stats_.stored_count;
  stats_.live_bytes += bytes;
  ++stats_.live_count;
  stats_.peak_live_bytes = std::max(stats_.peak_live_bytes, stats_.live_bytes);
  return entry;
}

EntryPtr Store::Find(uint64_t handle, int64_t call, int64_t bytes, int device) {
  const uint64_t serial = handle & ((1ull << kSerialBits) - 1);
  if (handle >> kSerialBits != static_cast<uint64_t>(id_)) {
    throw std::runtime_error("offload: handle " + std::to_string(handle) + " is not of this store (number " +
                             std::to_string(id_) + "); run backward with the store that forward used");
  }
  const auto found = entries_.find(serial);
  if (found == entries_.end() || !found->second->live) {
    sites_[call].uses = Site::Uses::kMany;
    for (const int64_t site : sites_of_call_[call]) sites_[site].uses = Site::Uses::kMany;
  }
  if (found == entries_.end()) {
    throw std::runtime_error(
        "offload: the tensor of handle " + std::to_string(serial) + (serial < next_serial_
            ? " is gone: it was fetched before and its memory used again (backward ran twice), dropped by clear(), or "
              "given up for newer ones when the store was full. Run forward again: from now on this call's tensors stay "
              "for a second fetch"
            : " was never stored: the handle is damaged"));
  }
  if (found->second->bytes != bytes) {
    throw std::runtime_error("offload: handle " + std::to_string(serial) + " stands for " +
                             std::to_string(found->second->bytes) + " bytes, " + std::to_string(bytes) +
                             " were asked for: the handles were mixed up on their way from forward to backward");
  }
  if (found->second->device != device) {
    throw std::runtime_error("offload: a tensor that was stored on device " + std::to_string(found->second->device) +
                             " was to be fetched on device " + std::to_string(device) +
                             " (-1 is the CPU); run backward where forward ran");
  }
  return found->second;
}

// Made on first use; only a whole one is kept.
Ring& Store::RingOf(Lock& lock, int device, Stream compute) {
  const auto found = rings_.find(device);
  if (found != rings_.end()) return *found->second;
  std::unique_ptr<Ring> made;
  {
    const Unlocked unlocked(this, lock);
    made = std::make_unique<Ring>(this, device, compute);
  }
  std::unique_ptr<Ring>& ring = rings_[device];
  if (!ring) ring.swap(made);
  if (made) {  // another thread was quicker
    const Unlocked unlocked(this, lock);
    made.reset();
  }
  return *rings_[device];
}

// By value: the caller may name it by the very map that it leaves.
void Store::Retire(EntryPtr entry) {
  entries_.erase(entry->serial);
  if (entry->slot != nullptr && entry->slot->serial == entry->serial) entry->slot->serial = 0;
  entry->slot = nullptr;
}

// Takes an entry out of its run: it was fetched, or is given up.
void Store::Fetched(const EntryPtr& entry, const RunPtr& run) {
  Site& site = sites_[entry->site];
  site.fetches = std::max(site.fetches, ++entry->fetches);
  if (!entry->live) return;
  entry->live = false;
  site.fetched = true;
  stats_.live_bytes -= entry->bytes;
  --stats_.live_count;
  written_.erase(entry->serial);
  if (entry->disk == Entry::Disk::kQueued && entry->pending > 0) stats_.cancelled_bytes += entry->bytes;
  if (entry->pending == 0 && disk_) {
    for (const Chunk& chunk : entry->chunks) disk_->Free(chunk);
    entry->chunks.clear();
  }
  if (entry->slot != nullptr) {
    ReleaseSlot(entry->slot);
  } else {
    Retire(entry);
  }
  if (run) {
    run->live_bytes -= entry->bytes;
    expected_[run->first_site] = {run->peak_bytes, run->peak_top};
    auto& serials = run->by_site[entry->site];
    const auto at = std::find(serials.rbegin(), serials.rend(), entry->serial);
    if (at != serials.rend()) serials.erase(std::next(at).base());
    while (!run->stack.empty() && !run->stack.back()->live) run->stack.pop_back();
    run->top = run->stack.empty() ? 0 : run->stack.back()->offset + run->stack.back()->span;
  }
  changed_.notify_all();
}

// Something of the run is asked for.
void Store::Asked(const RunPtr& run, bool by_itself) {
  run->last_used = Seconds();
  run->fetched |= by_itself;
  run->reading_back = true;
  forward_only_.erase(run->first_site);
}

void Store::Drop(const EntryPtr& entry) {
  const RunPtr run = entry->run.lock();
  for (auto& [device, ring] : rings_) ring->Leave(entry);
  const int64_t peak = run ? run->peak_bytes : 0;
  const auto known = run ? expected_.find(run->first_site) : expected_.end();
  const Expected before = known != expected_.end() ? known->second : Expected{-1, 0};
  Fetched(entry, run);
  if (run && peak > 0) {  // what was dropped says nothing about how much a whole run stores
    if (before.bytes < 0) {
      expected_.erase(run->first_site);
    } else {
      expected_[run->first_site] = before;
    }
  }
  ++stats_.dropped_count;
  Retire(entry);
}

void Store::FailRun(const RunPtr& run, const std::string& why) {
  if (!run) return;
  if (run->failure.empty()) run->failure = why;
  const std::vector<EntryPtr> left = run->stack;
  for (const EntryPtr& entry : left) {
    if (entry->live) Drop(entry);
  }
}

// Gives up what the oldest run left that was not heard of for a while. Runs of a program of which an earlier one was given
// up so, with nothing fetched, are forward passes alone: for the next one nobody waits again.
bool Store::DropOldest(const Run* current) {
  const double now = Seconds();
  const auto being_stored = [](const EntryPtr& entry) {
    return entry->live && entry->slot == nullptr && !entry->in_ring && entry->disk != Entry::Disk::kWritten;
  };
  for (const RunPtr& old : recent_) {
    const RunPtr run = old;
    if (run.get() == current || run->stack.empty()) continue;
    const bool alone = forward_only_.count(run->first_site) > 0 && current != nullptr && run->number < current->number &&
                       std::none_of(run->stack.begin(), run->stack.end(), being_stored);
    if (now - run->last_used < (alone ? kPauseSeconds : kIdleSeconds)) continue;
    if (!run->reading_back) forward_only_.insert(run->first_site);
    FailRun(run);
    return true;
  }
  return false;
}

}  // namespace dejax::offload
