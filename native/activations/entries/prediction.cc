#include "activations/entries/prediction.h"

#include <algorithm>

namespace dejax::offload {
namespace {

int64_t Mix(uint64_t before, uint64_t next) {
  uint64_t mixed = (before ^ next) * 0x9e3779b97f4a7c15ull;
  mixed = (mixed ^ mixed >> 29) * 0xbf58476d1ce4e5b9ull;
  return static_cast<int64_t>((mixed ^ mixed >> 32) >> 1);
}

}  // namespace

void Prediction::RunBegins() {
  for (auto& [number, site] : sites_) site.fetches_before = site.fetches;
}

// The first calls of a run tell which program it is: on a GPU one thread makes them, always in the same order. The CPU
// makes independent calls in any order. There the site is the call.
int64_t Prediction::SiteOf(Run* run, int64_t call) {
  const auto [at, is_new] = run->site_of_call.emplace(call, call);
  if (is_new && run->device >= 0) {
    run->program = static_cast<uint64_t>(at->second = Mix(run->program, static_cast<uint64_t>(call)));
    sites_of_call_[call].insert(at->second);
  }
  return at->second;
}

void Prediction::Stored(int64_t number, bool none_unfetched) {
  Site& site = sites_[number];
  if (site.uses == Uses::kUnknown && site.fetched && none_unfetched) site.uses = Uses::kOnce;
}

void Prediction::Fetched(Entry* entry) {
  Site& site = sites_[entry->site];
  site.fetches = std::max(site.fetches, ++entry->fetches);
  if (entry->live) site.fetched = true;
}

void Prediction::FetchedAgain(int64_t call) {
  sites_[call].uses = Uses::kRepeatedly;
  for (const int64_t site : sites_of_call_[call]) sites_[site].uses = Uses::kRepeatedly;
}

Prediction::Uses Prediction::UsesOf(int64_t site) const {
  const auto found = sites_.find(site);
  return found == sites_.end() ? Uses::kUnknown : found->second.uses;
}

bool Prediction::FetchedAsOftenAsBefore(const Entry& entry) const {
  const auto found = sites_.find(entry.site);
  return found != sites_.end() && found->second.fetches_before > 0 && entry.fetches >= found->second.fetches_before;
}

const Peak* Prediction::PeakOf(const Run& run) const {
  const auto found = peaks_.find(run.first_site);
  return found == peaks_.end() ? nullptr : &found->second;
}

void Prediction::SetForwardOnly(const Run& run, bool value) {
  if (value) {
    forward_only_.insert(run.first_site);
  } else {
    forward_only_.erase(run.first_site);
  }
}

}  // namespace dejax::offload
