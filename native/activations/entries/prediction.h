// What earlier runs of a program say about the next one: how much it stores, and how often it fetches each tensor.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <unordered_set>

#include "activations/entries/entry.h"

namespace dejax::offload {

// The most that a run had stored at a time.
struct Peak {
  int64_t bytes = 0;
  int64_t top = 0;  // in ring bytes
};

// All calls hold the store's mutex.
class Prediction {
 public:
  // How often a site's tensors are fetched: more than once where XLA or JAX moved the store out of a loop.
  enum class Uses { kUnknown, kOnce, kRepeatedly };

  void RunBegins();
  // The site of a call: the call as made by one program. Earlier runs of the same program share it.
  int64_t SiteOf(Run* run, int64_t call);

  void Stored(int64_t site, bool none_unfetched);
  void Fetched(Entry* entry);
  // A call has asked for a tensor that is gone or was fetched before.
  void FetchedAgain(int64_t call);
  Uses UsesOf(int64_t site) const;
  // Whether the entry was fetched as often as in the run before.
  bool FetchedAsOftenAsBefore(const Entry& entry) const;

  const Peak* PeakOf(const Run& run) const;
  void SetPeak(const Run& run, const Peak& peak) { peaks_[run.first_site] = peak; }
  void ForgetPeak(const Run& run) { peaks_.erase(run.first_site); }

  // Whether an earlier run of the program was given up with nothing fetched.
  bool IsForwardOnly(const Run& run) const { return forward_only_.count(run.first_site) > 0; }
  void SetForwardOnly(const Run& run, bool value);

 private:
  struct Site {
    Uses uses = Uses::kUnknown;
    bool fetched = false;
    int fetches = 0;         // of one tensor, the most so far
    int fetches_before = 0;  // the most when the last run began
  };

  std::unordered_map<int64_t, Site> sites_;
  std::unordered_map<int64_t, std::unordered_set<int64_t>> sites_of_call_;  // one for each program that has the call
  std::unordered_map<int64_t, Peak> peaks_;                                 // by a run's first site
  std::unordered_set<int64_t> forward_only_;                                // likewise
};

}  // namespace dejax::offload
