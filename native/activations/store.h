// The offload service: keeps the tensors that a forward pass stores until the backward pass fetches them, on three tiers.
//
// An entry is one stored tensor. Its handle, a 64-bit number that the program carries as data, names it. On a GPU an
// entry passes through the device's ring (ring.h) into a slot of pinned host memory; on the CPU it is copied to a slot of
// ordinary memory. Where host memory is too small, I/O threads write slots to disk, oldest first, and read them back in
// reverse order of creation, ahead of their use.
//
// The parts: Registry (entries and runs), Prediction (what earlier runs tell), HostSlots (slots, and whose is taken),
// IoQueue (the disk tier), Ring (the GPU side). Store moves entries between them: open and close are in store.cc,
// the ways between the tiers in tiers.cc, the calls of a step in steps.cc.
//
// One mutex guards a store with all its parts. It is not held while a thread copies, waits for the GPU, asks for memory
// or gives it back, reads or writes: `Unlocked` releases it for that. A store submits work to the GPU with the mutex held;
// that waits for nothing. A fetch submits its work without the mutex (ring.h).
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "activations/entries/entry.h"
#include "activations/entries/host_slots.h"
#include "activations/entries/io_queue.h"
#include "activations/entries/prediction.h"
#include "activations/entries/registry.h"
#include "activations/open_stores.h"
#include "blocks/interceptor.h"
#include "blocks/monitor.h"

namespace dejax::offload {

class Ring;

constexpr int kCpu = -1;  // in place of a GPU's number: the CPU, whose devices share their stores' runs

// A call of a step: which run makes it, and where.
struct StoreCall {
  int64_t run = 0;
  int device = kCpu;  // or a GPU's number
  int64_t site = 0;   // which call of its program
  ShardPlace place;
  Stream stream = nullptr;  // of a GPU
};

class Store {
 public:
  static std::shared_ptr<Store> Open(const StoreOptions& options);
  ~Store();
  int64_t id() const { return number_.value(); }
  // Ends waits, jobs and new calls; external engines get no more jobs. Close does this too.
  void BeginClose();
  void Close();

  uint64_t StoreOnCpu(const StoreCall& call, const void* data, int64_t bytes);
  void FetchOnCpu(const StoreCall& call, uint64_t handle, void* data, int64_t bytes);
  void StoreOnCuda(const StoreCall& call, int64_t ring_bytes, DevicePointer data, int64_t bytes, DevicePointer handle);
  void FetchOnCuda(const StoreCall& call, uint64_t handle, DevicePointer data, int64_t bytes);
  // Drops what this device has stored in the run; does nothing where the store closes or does not know the run.
  void GiveUpRun(int64_t run, int device);

  Counters GetStats();
  // Drops every entry that is not fetched yet. Not while a program that uses them runs.
  void Clear();
  // Waits until no I/O is under way.
  void Drain();

  // External engines: see IoQueue.
  ChunkJob NextJob(double seconds, bool* closed) { return io_.Next(seconds, closed); }
  void FinishJob(int64_t id, const std::string& error) { io_.Finish(id, error); }

  void Intercept(std::shared_ptr<Interceptor> interceptor);

 private:
  friend class Ring;
  struct DeviceCall;  // what a store or a fetch on a GPU holds while it runs: steps.cc

  explicit Store(const StoreOptions& options);
  void RequireOpen() const;
  Lock Enter();  // as every call of a step begins
  // Throws in a forked child, where the mutex may be locked for good.
  void RequireProcess() const;
  void Before(Operation operation) const {
    if (interceptor_) interceptor_->Before(operation);
  }
  Ring& RingOf(Lock& lock, int device, Stream compute);

  // Runs and entries.
  RunPtr RunOf(int64_t id, int device);
  void FetchBegins(const RunPtr& run, bool by_itself);
  void Remove(const EntryPtr& entry, const RunPtr& run);
  void Drop(const EntryPtr& entry);
  void DropLive(const RunPtr& run);
  void FailRun(const RunPtr& run, const std::string& why = "");
  bool DropOldest(const Run* current);

  // Between the tiers. Those that get the lock release it for a while.
  Slot* TakeSlot(Lock& lock, const EntryPtr& entry, bool pinned);
  bool IsRoomComing() const;
  bool OthersMayMakeRoom(const RunPtr& run) const;
  std::string HostTierIsFull() const;
  bool ForceWrites();
  bool ShouldWrite(const RunPtr& run, const Entry& entry) const;
  void ReadAhead(const RunPtr& run, Lock& lock);
  void AwaitHost(Lock& lock, const EntryPtr& entry, bool pinned);
  void Prefetch(const RunPtr& run);

  StoreNumber number_;
  const StoreOptions options_;
  const pid_t process_;  // that opened it
  Monitor monitor_;
  Counters stats_;
  Prediction prediction_;
  Registry registry_;
  HostSlots host_;
  IoQueue io_;
  std::map<int, std::unique_ptr<Ring>> rings_;
  std::shared_ptr<Interceptor> interceptor_;
  bool closed_ = false;
};

}  // namespace dejax::offload
