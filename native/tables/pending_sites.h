// Matches each done with its start. Both are traced with the number of their site, but one site may run several times at
// once: a program may call a jitted function that starts a gather twice. A start is therefore identified by its ticket:
// a small array on the device that its done takes as an operand. No other living array has its address.
//
// The starts of a loop form a chain: each passes the ticket on, and they are done in order. XLA may move a ticket, for
// instance at the border of a loop. Then a done takes the only chain of its site. If there are several chains it is an
// error, never the rows of another start.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <iterator>
#include <map>
#include <thread>
#include <utility>
#include <vector>

namespace dejax {

enum class ChainPlace : int64_t { kAlone = 0, kFirst = 1, kNext = 2 };  // dejax/host_gather/pipeline.py has the same numbers
enum class Found { kYes, kNone, kSeveral };

template <typename Gather>
class PendingSites {
 public:
  // Adds a start whose ticket came in at address `from` and leaves at `to`. Unless it returns kYes, the caller still owns
  // the gather.
  Found Add(int64_t run, int64_t site, ChainPlace place, const void* from, const void* to, const Gather& gather) {
    auto& chains = sites_[{run, site}];
    Chain* chain = nullptr;
    if (place == ChainPlace::kNext) {
      if (const Found found = Find(chains, from, &chain); found != Found::kYes) return found;
    } else {
      chains.emplace_back();
      chain = &chains.back();
    }
    chain->ticket = to;
    chain->thread = std::this_thread::get_id();
    chain->gathers.push_back(gather);
    return Found::kYes;
  }

  // Takes the gather of a done whose ticket is at address `ticket`.
  Found Take(int64_t run, int64_t site, const void* ticket, Gather* gather) {
    const auto at = sites_.find({run, site});
    if (at == sites_.end()) return Found::kNone;
    Chain* chain = nullptr;
    if (const Found found = Find(at->second, ticket, &chain); found != Found::kYes) return found;
    *gather = chain->gathers.front();
    chain->gathers.pop_front();
    if (chain->gathers.empty()) at->second.erase(at->second.begin() + (chain - at->second.data()));
    if (at->second.empty()) sites_.erase(at);
    return Found::kYes;
  }

  // Drops the gathers that this thread has begun in executions other than `run`. A thread launches one execution after the
  // other, so their dones will never come: a call between start and done failed.
  template <typename F>
  void DropOthers(int64_t run, const F& drop) {
    for (auto it = sites_.begin(); it != sites_.end();) {
      auto& chains = it->second;
      for (size_t k = 0; it->first.first != run && k < chains.size();) {
        if (chains[k].thread != std::this_thread::get_id()) {
          ++k;
          continue;
        }
        for (const Gather& gather : chains[k].gathers) drop(gather);
        chains.erase(chains.begin() + static_cast<std::ptrdiff_t>(k));
      }
      it = chains.empty() ? sites_.erase(it) : std::next(it);
    }
  }

  template <typename F>
  void ForEach(const F& visit) const {
    for (const auto& [key, chains] : sites_) {
      for (const Chain& chain : chains) {
        for (const Gather& gather : chain.gathers) visit(gather);
      }
    }
  }

 private:
  struct Chain {
    const void* ticket = nullptr;
    std::thread::id thread;
    std::deque<Gather> gathers;
  };

  // Among several chains with one ticket, the youngest: the ticket of an older one was moved, or its address would not be
  // free again.
  static Found Find(std::vector<Chain>& chains, const void* ticket, Chain** chain) {
    for (auto it = chains.rbegin(); it != chains.rend(); ++it) {
      if (it->ticket == ticket) return *chain = &*it, Found::kYes;
    }
    if (chains.size() == 1) return *chain = &chains[0], Found::kYes;
    return chains.empty() ? Found::kNone : Found::kSeveral;
  }

  std::map<std::pair<int64_t, int64_t>, std::vector<Chain>> sites_;  // by run and site
};

}  // namespace dejax
