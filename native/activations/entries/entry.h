// What the parts of a store share: options, counters, stored tensors (entries), slots of host memory, and runs.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "blocks/disk.h"
#include "driver/cuda_calls.h"

namespace dejax::offload {

struct StoreOptions : DiskOptions {
  int64_t device_bytes = -1;  // size of each device's ring; -1: what the programs ask for
  int64_t host_bytes = 0;
  bool external = false;  // an engine outside of the store reads and writes the chunks
};

// Bytes, counts and seconds since the store was opened, or now. `StoreStats` in dejax/offload/activations/stats.py says what
// each is.
#define DEJAX_COUNTERS(X)                                                                            \
  X(int64_t, stored_bytes) X(int64_t, stored_count) X(int64_t, fetched_bytes) X(int64_t, fetched_count) \
  X(int64_t, ring_hit_bytes) X(int64_t, prefetched_bytes) X(int64_t, demand_bytes)                   \
  X(int64_t, copied_out_bytes) X(int64_t, forwarded_bytes) X(int64_t, written_bytes)                 \
  X(int64_t, read_bytes) X(int64_t, cancelled_bytes) X(int64_t, dropped_count)                       \
  X(double, store_stall_seconds) X(double, fetch_stall_seconds) X(double, launch_seconds)            \
  X(double, device_store_stall_seconds) X(double, device_fetch_stall_seconds) X(int64_t, live_bytes) \
  X(int64_t, live_count) X(int64_t, peak_live_bytes) X(int64_t, host_bytes) X(int64_t, peak_host_bytes) \
  X(int64_t, disk_bytes) X(int64_t, ring_bytes) X(int64_t, runs)
struct Counters {
#define DEJAX_MEMBER(type, name) type name = 0;
  DEJAX_COUNTERS(DEJAX_MEMBER)
#undef DEJAX_MEMBER
};

// A piece of host memory that holds one tensor.
struct Slot {
  void* data = nullptr;
  int64_t capacity = 0;
  bool pinned = false;
  int pins = 0;                 // I/O jobs and CPU copies under way
  bool free = false;            // may be given to another tensor once pins == 0
  uint64_t serial = 0;          // the entry whose bytes it holds, also after that was fetched
  Event last_read, last_write;  // the GPU's last use: others wait for it
};

struct Run;

// Where a tensor, or a shard of one, belongs: only the same place may fetch it.
struct ShardPlace {
  int64_t layout = 0;  // hash of which device holds which part of the tensor; 0: it is not divided
  int device = -1;
};

// One stored tensor. Its handle is the store's number and the serial.
struct Entry {
  enum class Disk { kNone, kQueued, kWritten, kFailed };

  uint64_t serial = 0;
  int64_t bytes = 0;
  int64_t site = 0;
  int device = -1;  // -1: the CPU
  ShardPlace place;
  std::weak_ptr<Run> run;
  bool live = true;  // neither fetched nor dropped
  int fetches = 0;
  Slot* slot = nullptr;

  // Ring.
  int64_t offset = 0;  // in its run's stack
  int64_t span = 0;    // bytes of the ring, rounded up; 0: larger than the ring
  bool in_ring = false;
  bool prefetched = false;
  Event ready;       // after it the ring holds the bytes
  Event copied_out;  // after it the slot holds the bytes; null: never copied to the host

  // Disk.
  Disk disk = Disk::kNone;
  bool reading = false;
  int pending = 0;  // jobs that have not ended
  std::vector<Chunk> chunks;
  std::string error;
};
using EntryPtr = std::shared_ptr<Entry>;

// One execution of a program on one device.
struct Run {
  int64_t id = 0;
  int device = -1;
  int64_t number = 0;
  double last_used = 0;         // seconds of the steady clock
  std::vector<EntryPtr> stack;  // in the order of creation; the last one is live
  std::unordered_map<int64_t, std::vector<uint64_t>> unfetched;  // serials by site
  std::unordered_map<int64_t, int64_t> stored_by_site;
  std::unordered_map<int64_t, int64_t> site_of_call;  // see Prediction::SiteOf
  uint64_t program = 0;                               // hash of the calls so far
  bool loops = false;                                 // a site stored several tensors
  int64_t first_site = 0;
  int64_t top = 0, peak_top = 0;  // of the stack in ring bytes
  int64_t live_bytes = 0, peak_bytes = 0;
  bool fetched = false;       // the run has fetched a tensor that it stored
  bool reading_back = false;  // some run has fetched a tensor of this one
  std::string failure;        // why a tensor could not be stored or fetched
};
using RunPtr = std::shared_ptr<Run>;

inline int64_t RoundUp(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace dejax::offload
