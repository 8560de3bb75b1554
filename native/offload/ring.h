// Device memory between XLA's buffers and the host: a window over the top of a run's stack of entries.
//
// Forward pushes entries at the top: a copy into the ring on the compute stream, after which XLA may use its buffer
// again, and a copy to the host on a side stream. Entries at the bottom of the window make room. Backward pops at the top,
// and what lies below the window is brought back to its bottom on another side stream. So the last entries of a forward
// pass never leave, and the place of an entry follows from its place in the stack: offset modulo capacity.
//
// Streams wait only for events that were recorded before: nothing here depends on work that is submitted later.
#pragma once

#include <deque>
#include <initializer_list>
#include <memory>

#include "store.h"

namespace dejax::offload {

struct Mismatch {
  uint64_t expected = 0;  // a handle; 0: there was none
  uint64_t found = 0;
  int64_t run = 0;
};

class Ring {
 public:
  Ring(Store* store, int device, Stream compute);
  ~Ring();

  // Called with the store's mutex held. Those that are given the lock let go of it.
  void Reserve(Store::Lock& lock, int64_t bytes, Stream compute);  // lets go of the mutex
  void Push(Store::Lock& lock, const RunPtr& run, const EntryPtr& entry, DevicePointer data, Stream compute);
  // Copies the entry's bytes to `data`. The caller then calls Leave and Prefetch.
  void Pop(Store::Lock& lock, const RunPtr& run, const EntryPtr& entry, DevicePointer data, Stream compute);
  void Leave(const EntryPtr& entry);
  void Prefetch(const RunPtr& run);
  void SetHandle(DevicePointer handle, uint64_t value, Stream compute);
  // A kernel that compares and, where they differ, fills `data` with ones (NaN) and raises the flag. From then on every
  // tensor that this run still fetches is filled too.
  void CheckHandle(int64_t run, DevicePointer handle, uint64_t expected, DevicePointer data, int64_t bytes,
                   Stream compute);
  // Fills `data` with ones where the run has failed.
  void Guard(int64_t run, DevicePointer data, int64_t bytes, Stream compute);
  // What the kernel found, and forgets it.
  Mismatch TakeMismatch();
  // The handle's value, by waiting for the compute stream. Lets go of the mutex meanwhile.
  uint64_t ReadHandle(Store::Lock& lock, DevicePointer handle, Stream compute);
  void Synchronize();
  // Adds to the store's counters the waits of the compute stream that have ended.
  void CountStalls();

  int64_t capacity() const { return capacity_; }
  Context context() const { return context_; }

 private:
  void Own(Store::Lock& lock, const RunPtr& run, Stream compute);
  void CopyOut(Store::Lock& lock, const EntryPtr& entry);
  void Load(const EntryPtr& entry);
  void WaitCounted(Stream compute, std::initializer_list<const Event*> events, double* total);
  template <typename Copy>
  void Pieces(int64_t offset, int64_t bytes, Copy copy);

  Store* const store_;
  const Calls& calls_;
  Context context_ = nullptr;
  Stream out_ = nullptr, in_ = nullptr;
  struct Stall {
    Event begin, end;
    double* total = nullptr;
  };
  std::shared_ptr<EventPool> events_;
  std::shared_ptr<EventPool> timers_;
  std::deque<Stall> stalls_;
  DevicePointer memory_ = 0;
  int64_t capacity_ = 0;
  int64_t refused_ = 0;   // a size that could not be allocated
  bool resizing_ = false;  // another thread makes the ring's memory: without the mutex, and there is none until then
  std::weak_ptr<Run> owner_;
  std::deque<EntryPtr> window_;  // bottom first
  Event consumed_;     // last copy from the ring on the compute stream
  Event consumed_seen_by_in_;
  Event out_fence_;    // copies out of entries that have left the window already
  Event last_in_;      // null where the compute stream has waited for it
  Event last_out_;
  CUmod_st* module_ = nullptr;
  CUfunc_st* check_ = nullptr;
  // Pinned, written by the kernel: the foreseen handle, the one found, the run. One thread of one kernel has the right to
  // write them until the host has read them (a cell on the device says who); the first word is written last.
  uint64_t* mismatch_ = nullptr;
  DevicePointer cells_on_device_ = 0;  // [0]: the run that failed last, [1]: 0, [2]: 1 while the words are taken
  std::vector<uint64_t*> cells_;           // pinned; free ones
};

}  // namespace dejax::offload
