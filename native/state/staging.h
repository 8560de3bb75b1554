// Memory on the device between the host's arrays and XLA's buffers: one ring for each device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>

#include "driver/cuda_calls.h"

namespace dejax::offload {

constexpr size_t kStagingAlignment = 256;  // of the pieces in a region: that of XLA's own buffers

inline size_t Aligned(size_t bytes) {
  return (bytes + kStagingAlignment - 1) / kStagingAlignment * kStagingAlignment;
}

// A part of the ring. It holds the pieces that one call pulls or pushes.
struct StagingRegion {
  DevicePointer memory = 0;
  size_t bytes = 0;
  int held = 0;  // pieces in it that are not taken yet: it must stay as it is
  Event free;    // after it other pieces may use the memory
};
using StagingRegionPtr = std::shared_ptr<StagingRegion>;

// Regions are given out one after the other. A new one overwrites those that were given out longest ago, and the stream
// waits until they are free: they become free in nearly this order, so nobody asks the driver which of them are.
class Staging {
 public:
  // A region that `stream` may write to. The caller sets `held` and `free`.
  // cap: bytes of the ring. It grows beyond them only where regions that are held leave no room.
  StagingRegionPtr Take(size_t bytes, size_t cap, Stream stream);

 private:
  struct Memory {
    DevicePointer memory = 0;
    size_t bytes = 0;
    std::map<size_t, StagingRegionPtr> regions;  // by their first byte
  };
  using Regions = std::map<size_t, StagingRegionPtr>;

  std::optional<size_t> Find(size_t bytes);
  void Replace(size_t wanted, size_t least);
  void FreeRetired(bool wait);
  Regions::iterator FirstAfter(size_t offset);

  Memory ring_;
  size_t next_ = 0;            // where the next region begins, if it has room there
  size_t asked_ = 0;           // the size that the ring was to have; the device may have had less memory left
  int small_ = 0;              // calls in a row that would do with less than half of it
  std::list<Memory> retired_;  // former rings, until nothing uses them
};

}  // namespace dejax::offload
