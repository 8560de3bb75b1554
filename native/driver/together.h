// Steps that run on several devices fail on all of them, or on none.
//
// A call that fails on one device leaves the others waiting for it in a collective operation: XLA ends the process then,
// or hangs. So a call on a shard (its layout is not 0) that fails notes why, fills its result with ones (NaN), and the
// step goes on. The first calls of the next step raise the failure, on all devices at the same place of the program.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace dejax::offload {

// What fails on every device at the same call, and so is raised by that call.
struct FailsEverywhere : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A call on a shard begins. Throws what failed in an earlier run: in all calls of the first run after it.
void BeginTogether(int64_t run);

// Bytes that a device stores in a run (or, negative, fetches): the failure's message tells how much a step needs.
void CountTogether(int64_t run, int device, int64_t bytes);

// of_state: a call on an optimizer's state failed, not one on activations.
void FailTogether(int64_t run, const std::string& why, bool of_state = false);

// All devices refuse what this run begins with: from now on its calls throw `why`.
void RefuseTogether(int64_t run, const std::string& why);

bool HasFailedTogether(int64_t run);

// The same, also after a later run has raised it.
bool WasFailedTogether(int64_t run);

// The failure that no step has raised yet; forgets it. Empty: there is none.
std::string TakeFailureOfShards();

}  // namespace dejax::offload
