#include "activations/entries/registry.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "blocks/monitor.h"
#include "driver/together.h"

namespace dejax::offload {
namespace {

constexpr size_t kRecentRuns = 8;  // never stale

}  // namespace

RunPtr Registry::FindRun(int64_t id, int device) const {
  const auto found = by_id_.find({id, device});
  if (found == by_id_.end()) return nullptr;
  found->second->last_used = Seconds();
  return found->second;
}

RunPtr Registry::BeginRun(int64_t id, int device) {
  auto run = std::make_shared<Run>();
  run->id = id;
  run->device = device;
  run->number = stats_->runs++;
  run->last_used = Seconds();
  prediction_->RunBegins();
  by_id_[{id, device}] = run;
  begun_.push_back(run);
  return run;
}

std::vector<RunPtr> Registry::StaleRuns() const {
  std::vector<RunPtr> stale;
  const double now = Seconds();
  for (size_t i = 0; i + kRecentRuns < begun_.size(); ++i) {
    if (now - begun_[i]->last_used <= kIdleSeconds) break;  // later runs are hardly older
    stale.push_back(begun_[i]);
  }
  return stale;
}

void Registry::Forget(const RunPtr& run) {
  by_id_.erase({run->id, run->device});
  const auto at = std::find(begun_.begin(), begun_.end(), run);
  if (at != begun_.end()) begun_.erase(at);
}

EntryPtr Registry::Add(const RunPtr& run, int64_t call, int64_t bytes, const ShardPlace& place) {
  const int64_t site = prediction_->SiteOf(run.get(), call);
  auto entry = std::make_shared<Entry>();
  entry->serial = next_serial_++;
  entry->bytes = bytes;
  entry->site = site;
  entry->device = run->device;
  entry->place = place;
  entry->run = run;
  entries_[entry->serial] = entry;
  if (run->stack.empty() && run->peak_bytes == 0) run->first_site = site;
  run->stack.push_back(entry);
  if (++run->stored_by_site[site] > 1) run->loops = true;
  auto& unfetched = run->unfetched[site];
  prediction_->Stored(site, unfetched.empty());
  unfetched.push_back(entry->serial);
  run->live_bytes += bytes;
  run->peak_bytes = std::max(run->peak_bytes, run->live_bytes);
  stats_->stored_bytes += bytes;
  ++stats_->stored_count;
  stats_->live_bytes += bytes;
  ++stats_->live_count;
  stats_->peak_live_bytes = std::max(stats_->peak_live_bytes, stats_->live_bytes);
  return entry;
}

EntryPtr Registry::Find(uint64_t handle, int64_t call, int64_t bytes, int device, const ShardPlace& place) {
  const uint64_t serial = SerialOf(handle);
  if (StoreOf(handle) != store_) {
    throw std::runtime_error("offload: handle " + std::to_string(handle) + " is not of this store (number " +
                             std::to_string(store_) + "); run backward with the store that forward used");
  }
  const EntryPtr entry = FindBySerial(serial);
  if (!entry || !entry->live) prediction_->FetchedAgain(call);
  if (!entry) {
    throw std::runtime_error(
        "offload: the tensor of handle " + std::to_string(serial) + (serial < next_serial_
            ? " is gone: it was fetched before and its memory used again (backward ran twice), dropped by clear(), or "
              "given up for newer tensors when the store was full. Run forward again: from now on the store keeps "
              "tensors of this call for a second fetch"
            : " was never stored: the handle is damaged"));
  }
  if (entry->place.layout != place.layout) {
    throw FailsEverywhere(
        "offload: a tensor that forward stored in one sharding is fetched in another one by backward (another mesh, "
        "other devices, or another division among them). Run both under one mesh, with the same shardings");
  }
  if (entry->place.device != place.device) {
    throw FailsEverywhere("offload: a tensor that was stored on device " + std::to_string(entry->place.device) +
                             " was to be fetched on device " + std::to_string(place.device) +
                             "; run backward where forward ran, under the same mesh");
  }
  if (entry->bytes != bytes) {
    throw std::runtime_error("offload: the tensor of handle " + std::to_string(serial) + " has " +
                             std::to_string(entry->bytes) + " bytes, but " + std::to_string(bytes) +
                             " were asked for: the handles were mixed up between forward and backward");
  }
  if (entry->device != device) {
    throw std::runtime_error("offload: a tensor that was stored on device " + std::to_string(entry->device) +
                             " was to be fetched on device " + std::to_string(device) +
                             " (-1 is the CPU); run backward where forward ran");
  }
  return entry;
}

EntryPtr Registry::FindBySerial(uint64_t serial) const {
  const auto found = entries_.find(serial);
  return found == entries_.end() ? nullptr : found->second;
}

std::vector<EntryPtr> Registry::Live() const {
  std::vector<EntryPtr> live;
  for (const auto& [serial, entry] : entries_) {
    if (entry->live) live.push_back(entry);
  }
  return live;
}

void Registry::Leave(const EntryPtr& entry, const RunPtr& run) {
  stats_->live_bytes -= entry->bytes;
  --stats_->live_count;
  if (!run) return;
  run->live_bytes -= entry->bytes;
  auto& unfetched = run->unfetched[entry->site];
  const auto at = std::find(unfetched.rbegin(), unfetched.rend(), entry->serial);
  if (at != unfetched.rend()) unfetched.erase(std::next(at).base());
  while (!run->stack.empty() && !run->stack.back()->live) run->stack.pop_back();
  run->top = run->stack.empty() ? 0 : run->stack.back()->offset + run->stack.back()->span;
}

void Registry::Retire(EntryPtr entry) {
  entries_.erase(entry->serial);
  if (entry->slot != nullptr && entry->slot->serial == entry->serial) entry->slot->serial = 0;
  entry->slot = nullptr;
}

void Registry::Clear() {
  entries_.clear();
  by_id_.clear();
  begun_.clear();
}

}  // namespace dejax::offload
