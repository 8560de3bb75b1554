#include "state/staging.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace dejax::offload {
namespace {

constexpr int kMostSmall = 4096;  // calls, after which a ring that a larger model has left is replaced

}  // namespace

StagingRegionPtr Staging::Take(size_t bytes, size_t cap, Stream stream) {
  if (!retired_.empty()) FreeRetired(/*wait=*/false);
  const size_t size = std::max(Aligned(bytes), kStagingAlignment);
  const size_t wanted = std::max(Aligned(cap), size);
  small_ = wanted < asked_ / 2 ? small_ + 1 : 0;
  if (wanted > asked_ || small_ > kMostSmall) Replace(wanted, size);
  std::optional<size_t> found = Find(size);
  if (!found) {
    Replace(std::max(wanted, ring_.bytes + size), size);
    found = Find(size);
  }
  const size_t begin = found.value(), end = begin + size;
  Event last;
  for (auto at = FirstAfter(begin); at != ring_.regions.end() && at->first < end;) {
    const StagingRegionPtr old = at->second;
    if (old->free != last) Wait(stream, last = old->free);
    const size_t old_end = at->first + old->bytes;
    at = ring_.regions.erase(at);
    if (old_end > end) {  // what is left of it
      old->memory += end - (old_end - old->bytes);
      old->bytes = old_end - end;
      at = ring_.regions.emplace(end, old).first;
    }
  }
  auto region = std::make_shared<StagingRegion>();
  region->memory = ring_.memory + begin;
  region->bytes = size;
  ring_.regions.emplace(begin, region);
  next_ = end;
  return region;
}

// The first region that ends after `offset`.
Staging::Regions::iterator Staging::FirstAfter(size_t offset) {
  auto at = ring_.regions.upper_bound(offset);
  if (at == ring_.regions.begin()) return at;
  const auto before = std::prev(at);
  return before->first + before->second->bytes > offset ? before : at;
}

// Where a region of this size may begin: the next place that overlaps no region that is held.
std::optional<size_t> Staging::Find(size_t bytes) {
  if (bytes > ring_.bytes) return std::nullopt;
  size_t begin = next_;
  for (int turns = 0; turns < 2;) {
    if (begin + bytes > ring_.bytes) {
      begin = 0;
      ++turns;
      continue;
    }
    auto at = FirstAfter(begin);
    while (at != ring_.regions.end() && at->first < begin + bytes && at->second->held == 0) ++at;
    if (at == ring_.regions.end() || at->first >= begin + bytes) return begin;
    begin = at->first + at->second->bytes;
  }
  return std::nullopt;
}

// A ring of `wanted` bytes, or of at least `least` where the device has no more.
void Staging::Replace(size_t wanted, size_t least) {
  if (ring_.memory != 0) retired_.push_back(std::move(ring_));
  ring_ = Memory();
  FreeRetired(/*wait=*/true);
  asked_ = wanted;
  next_ = 0;
  small_ = 0;
  for (size_t size = wanted;; size = std::max(Aligned(size / 2), least)) {
    if (GetDriver().mem_alloc(&ring_.memory, size) == 0) {
      ring_.bytes = size;
      return;
    }
    ring_ = Memory();
    if (size > least) continue;
    asked_ = 0;
    throw std::runtime_error("offload.optimizer: no device memory is left for staging " + std::to_string(least) +
                             " bytes; leave some to other users than XLA (XLA_PYTHON_CLIENT_MEM_FRACTION), or give "
                             "optimizer a smaller piece_bytes");
  }
}

void Staging::FreeRetired(bool wait) {
  for (auto at = retired_.begin(); at != retired_.end();) {
    const bool unused = std::all_of(at->regions.begin(), at->regions.end(), [&](const auto& entry) {
      const StagingRegion& region = *entry.second;
      if (region.held > 0) return false;
      if (!region.free) return true;
      if (!wait) return GetDriver().event_query(region.free.get()) == 0;
      Check(GetDriver().event_synchronize(region.free.get()), "cuEventSynchronize");
      return true;
    });
    if (!unused) {
      ++at;
      continue;
    }
    Check(GetDriver().mem_free(at->memory), "cuMemFree");
    at = retired_.erase(at);
  }
}

}  // namespace dejax::offload
