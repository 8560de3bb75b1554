#include "driver/together.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <set>

namespace dejax::offload {
namespace {

constexpr size_t kMostRuns = 64;  // whose bytes are counted

struct Bytes {
  int64_t live = 0, peak = 0;
};

struct State {
  std::mutex mutex;
  std::map<int64_t, std::map<int, Bytes>> bytes;  // by run and device
  bool any = false;
  int64_t failed_run = 0;
  std::set<int64_t> failed;  // all runs that have failed
  std::string why;
  bool of_state = false;
  bool refused = false;  // by the run that raises it
  bool raised = false;
  int64_t raised_in = 0;  // the run whose calls all raise it

  std::string Message() const {
    if (refused) return why;
    if (of_state) {
      return why + " (on one device of several: the updates of that step are NaN, and no device keeps its new state. Go on "
                   "from the parameters and the state before that step, or from a checkpoint)";
    }
    int64_t sum = 0;
    const auto found = bytes.find(failed_run);
    if (found != bytes.end()) {
      for (const auto& [device, count] : found->second) sum += count.peak;
    }
    return why + " (on one device of several: the gradients of that step are NaN. The devices of this process store " +
           std::to_string(sum) + " bytes in it, which must fit)";
  }
};

State& Get() {
  static State* const state = new State;  // never destroyed: handlers may run while the process exits
  return *state;
}

}  // namespace

void BeginTogether(int64_t run) {
  State& state = Get();
  std::lock_guard<std::mutex> lock(state.mutex);
  if (!state.any || run == state.failed_run) return;
  if (!state.raised) {
    state.raised = true;
    state.raised_in = run;
  }
  if (run == state.raised_in) throw std::runtime_error(state.Message());
  state.any = false;
}

void CountTogether(int64_t run, int device, int64_t bytes) {
  State& state = Get();
  std::lock_guard<std::mutex> lock(state.mutex);
  if (state.bytes.size() >= kMostRuns && state.bytes.count(run) == 0) {
    for (auto at = state.bytes.begin(); at != state.bytes.end();) {
      at = state.any && at->first == state.failed_run ? std::next(at) : state.bytes.erase(at);
    }
  }
  Bytes& count = state.bytes[run][device];
  count.live += bytes;
  count.peak = std::max(count.peak, count.live);
}

void FailTogether(int64_t run, const std::string& why, bool of_state) {
  State& state = Get();
  std::lock_guard<std::mutex> lock(state.mutex);
  state.failed.insert(run);
  if (state.any) return;  // what failed first is the cause
  state.any = true;
  state.failed_run = run;
  state.why = why;
  state.of_state = of_state;
  state.refused = state.raised = false;
}

void RefuseTogether(int64_t run, const std::string& why) {
  State& state = Get();
  std::lock_guard<std::mutex> lock(state.mutex);
  state.failed.insert(run);
  if (state.any) return;
  state.any = state.refused = state.raised = true;
  state.failed_run = 0;
  state.raised_in = run;
  state.why = why;
}

bool HasFailedTogether(int64_t run) {
  State& state = Get();
  std::lock_guard<std::mutex> lock(state.mutex);
  return state.any && state.failed_run == run;
}

bool WasFailedTogether(int64_t run) {
  State& state = Get();
  std::lock_guard<std::mutex> lock(state.mutex);
  return state.failed.count(run) != 0;
}

std::string TakeFailureOfShards() {
  State& state = Get();
  std::lock_guard<std::mutex> lock(state.mutex);
  if (!state.any || state.raised) return "";
  state.any = false;
  return state.Message();
}

}  // namespace dejax::offload
