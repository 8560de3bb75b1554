// Device memory between XLA's buffers and the host: a window over the top of a run's stack of entries.
//
// Forward pushes entries at the top. The compute stream copies each into the ring, after which XLA may reuse its buffer;
// a side stream copies it to the host. Entries at the bottom of the window leave to make room. Backward pops entries at
// the top; another side stream brings entries below the window back to its bottom. So the last entries of a forward pass
// never leave the device. An entry's place in the ring is its offset in the stack modulo the capacity.
//
// Streams wait only for events that were recorded before: nothing here depends on work that is submitted later.
#pragma once

#include <deque>
#include <initializer_list>
#include <memory>

#include "activations/store.h"

namespace dejax::offload {

class Ring {
 public:
  Ring(Store* store, Stream compute);
  ~Ring();

  // Called with the store's mutex held. Those that get the lock release it for a while: a fetch also to submit its work,
  // because the GPU has nothing else to do then, and the threads of other GPUs, which collectives keep in step, fetch at
  // the same time.
  // Makes the ring's memory this large, unless it is larger.
  void Reserve(Lock& lock, int64_t bytes, Stream compute);
  void Push(Lock& lock, const RunPtr& run, const EntryPtr& entry, DevicePointer data, Stream compute);
  // Copies the entry's bytes to `data`. The caller then calls Leave and Prefetch.
  void Pop(Lock& lock, const RunPtr& run, const EntryPtr& entry, DevicePointer data, Stream compute);
  void Leave(const EntryPtr& entry);
  // Brings entries below the window back into it, as far as there is room. Does nothing while a fetch submits work: that
  // fetch comes here afterwards. Without `lock` the mutex stays locked.
  void Prefetch(const RunPtr& run, Lock* lock = nullptr);
  void SetHandle(DevicePointer handle, uint64_t value, Stream compute);
  void Synchronize();
  // Adds the ended waits of the compute stream to the store's counters.
  void CountStalls();

  int64_t capacity() const { return capacity_; }
  Context context() const { return context_; }

 private:
  void Empty();
  void Own(Lock& lock, const RunPtr& run, Stream compute);
  bool GiveSlot(Lock& lock, const EntryPtr& entry);
  void CopyOut(Lock& lock, const EntryPtr& entry);
  void PushToHost(Lock& lock, const EntryPtr& entry, DevicePointer data, Stream compute);
  bool Stays(const Run& run, const Entry& entry, int64_t span) const;
  void MakeRoom(Lock& lock, const RunPtr& run, int64_t offset, int64_t span, Stream compute);
  void Load(Lock* lock, const EntryPtr& entry);
  template <typename Submit>
  void SubmitWithout(Lock* lock, const Submit& submit);
  void AwaitSubmissions(Lock& lock);
  void WaitCounted(Stream compute, std::initializer_list<const Event*> events, double* total);
  template <typename Copy>
  void Pieces(int64_t offset, int64_t bytes, Copy copy);

  Store* const store_;
  const Driver& driver_;
  Context context_ = nullptr;
  Stream out_ = nullptr, in_ = nullptr;
  struct Stall {
    Event begin, end;
    double* total = nullptr;
  };
  Stall WaitTimed(Stream compute, std::initializer_list<const Event*> events, double* total, bool timed);
  std::shared_ptr<EventPool> events_;
  std::shared_ptr<EventPool> timers_;
  std::deque<Stall> stalls_;
  DevicePointer memory_ = 0;
  int64_t capacity_ = 0;
  int64_t refused_ = 0;    // a size that could not be allocated
  bool submitting_ = false;  // a fetch submits work without the mutex; what other calls on this device submit waits
  bool resizing_ = false;  // a thread allocates memory without the mutex; until it ends there is none
  std::weak_ptr<Run> owner_;
  std::deque<EntryPtr> window_;  // bottom first
  Event consumed_;     // last copy from the ring on the compute stream
  Event consumed_seen_by_in_;
  Event out_fence_;    // copies to the host of entries that have left the window
  Event last_in_;      // null where the compute stream has waited for it
  Event last_out_;
};

}  // namespace dejax::offload
