// The offload service: what a forward pass stores and a backward pass fetches, on three tiers.
//
// An entry is one stored tensor. Its handle, a 64-bit number that the program carries as data, says which. On a GPU an
// entry passes through the device's ring (ring.h) into a slot of pinned host memory; on the CPU it is copied to a slot of
// ordinary memory. Where host memory is too small, I/O threads write slots to disk, oldest first, and read them back in
// reverse order of creation, ahead of their use.
//
// One mutex guards a store. It is not held while a thread copies, waits for the GPU, asks for memory or gives it back,
// reads or writes: `Unlocked` lets go of it for that. Work is submitted to the GPU with it held; that waits for nothing.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "cuda_calls.h"
#include "disk.h"

namespace dejax::offload {

class Ring;

struct Options {
  int64_t device_bytes = -1;  // of each device's ring; -1: what the programs ask for
  int64_t host_bytes = 0;
  int64_t disk_bytes = -1;  // of what the files hold; -1: no cap
  std::vector<std::string> folders;  // none: no disk tier
  int64_t chunk_bytes = 8 << 20;
  int num_threads = 8;
  bool direct = true;
  bool checksum = true;
  bool external = false;
};

// Numbers for people; bytes and counts since the store was opened, unless said otherwise.
struct Stats {
  int64_t stored_bytes = 0, stored_count = 0;
  int64_t fetched_bytes = 0, fetched_count = 0;
  int64_t ring_hit_bytes = 0;    // fetched from the device's ring where they still lay, no transfer back
  int64_t prefetched_bytes = 0;  // fetched from the ring, transferred ahead of the call
  int64_t demand_bytes = 0;      // transferred by the fetch itself
  int64_t copied_out_bytes = 0;  // device to host
  int64_t forwarded_bytes = 0;   // disk tier: fetched while still in host memory
  int64_t written_bytes = 0, read_bytes = 0, cancelled_bytes = 0;  // disk tier
  int64_t dropped_count = 0;     // entries given up unfetched
  int64_t value_reads = 0;       // fetches whose handle the launch thread had to read
  int64_t mismatches = 0;
  double store_stall_seconds = 0, fetch_stall_seconds = 0;  // launch threads waiting for room, for reads
  double launch_seconds = 0;     // launch threads in store and fetch, stalls included
  double device_store_stall_seconds = 0, device_fetch_stall_seconds = 0;  // compute streams waiting for copies
  int64_t live_bytes = 0, live_count = 0, peak_live_bytes = 0;      // now; most
  int64_t host_bytes = 0, peak_host_bytes = 0, disk_bytes = 0, ring_bytes = 0;  // allocated now
  int64_t runs = 0;
};

struct Slot {
  void* data = nullptr;
  int64_t capacity = 0;
  bool pinned = false;
  int pins = 0;         // I/O jobs and CPU copies under way
  bool free = false;    // may be given away once pins == 0
  uint64_t serial = 0;  // whose bytes it holds, also after they were fetched
  Event last_read, last_write;  // work of the GPU that must end before others touch it
};

struct Run;

// What is known of one call site of a program, from its earlier runs.
struct Site {
  enum class Order { kUnknown, kForeseen, kSurprising };
  // How often a handle is fetched: more than once where XLA or JAX took the store out of a loop.
  enum class Uses { kUnknown, kOne, kMany };
  Order order = Order::kUnknown;
  Uses uses = Uses::kUnknown;
  bool fetched = false;
  int fetches = 0;        // of one handle, the most so far
  int known_fetches = 0;  // the most when the last run began
};

struct Entry {
  enum class Disk { kNone, kQueued, kWritten, kFailed };

  uint64_t serial = 0;
  int64_t bytes = 0;
  int64_t site = 0;
  int device = -1;  // -1: the CPU
  std::weak_ptr<Run> run;
  bool live = true;     // stored and neither fetched nor dropped
  int fetches = 0;
  Slot* slot = nullptr;

  // Ring.
  int64_t offset = 0;   // in its run's stack
  int64_t span = 0;     // bytes of the ring, rounded up; 0 where it is larger than the ring
  bool in_ring = false;
  bool prefetched = false;
  Event ready;       // the ring holds its bytes
  Event copied_out;  // the slot holds its bytes; null where it was never copied to the host

  // Disk.
  Disk disk = Disk::kNone;
  bool reading = false;
  int pending = 0;  // jobs not done
  std::vector<Chunk> chunks;
  std::string error;
};
using EntryPtr = std::shared_ptr<Entry>;

// One execution of a program on one device.
struct Run {
  int64_t id = 0;
  int device = -1;
  int64_t number = 0;
  double last_used = 0;  // seconds of the steady clock
  std::vector<EntryPtr> stack;  // in order of creation; no fetched entries at its end
  std::unordered_map<int64_t, std::vector<uint64_t>> by_site;  // not fetched yet
  std::unordered_map<int64_t, int64_t> stored_by_site;
  // Sites of this program. Programs number their calls alike, so what is known of a call is kept by what else its
  // program has stored before it.
  std::unordered_map<int64_t, int64_t> site_of_call;
  uint64_t program = 0;
  bool loops = false;       // a site stored several
  std::unordered_set<int64_t> surprising;  // sites whose fetches did not come in the order foreseen
  int64_t first_site = 0;
  int64_t top = 0, peak_top = 0;  // of the stack in ring bytes
  int64_t live_bytes = 0, peak_bytes = 0;
  bool fetched = false;     // something was fetched in the run that stored it
  bool reading_back = false;
  std::string failure;      // why a tensor of it could not be stored or fetched
};
using RunPtr = std::shared_ptr<Run>;

// How much earlier runs of a program had stored at a time.
struct Expected {
  int64_t bytes = 0;
  int64_t top = 0;  // in ring bytes
};

struct Job {
  bool write = false;
  EntryPtr entry;
  Slot* slot = nullptr;
  int chunk = 0;
  Context context = nullptr;  // of the events to wait for
  // For external engines.
  int64_t id = 0;
  int path = 0;
  int64_t index = 0;
  void* data = nullptr;
  int64_t bytes = 0;
};

// A store's number, the lowest that no open store has: a process never runs out of them by opening stores one after
// the other.
class StoreNumber {
 public:
  StoreNumber();  // throws std::runtime_error
  ~StoreNumber() { GiveBack(); }
  void GiveBack();
  int64_t value() const { return value_; }

 private:
  const int64_t value_;
  bool taken_ = true;
};

class Store : public std::enable_shared_from_this<Store> {
 public:
  static std::shared_ptr<Store> Open(const Options& options);
  // The open store with this id. Throws std::runtime_error.
  static std::shared_ptr<Store> Find(int64_t id);
  // Likewise, or else any store that is open, or null.
  static std::shared_ptr<Store> FindOr(int64_t id);
  static int64_t IdOfHandle(uint64_t handle);

  ~Store();
  int64_t id() const { return id_; }
  // Ends waits, jobs and new calls; external engines then get no more jobs. Close does this too.
  void BeginClose();
  void Close();

  uint64_t StoreOnCpu(int64_t run, int64_t site, const void* data, int64_t bytes);
  void FetchOnCpu(int64_t run, int64_t site, uint64_t handle, void* data, int64_t bytes);
  void StoreOnCuda(int64_t run, int device, Stream stream, int64_t site, int64_t ring_bytes, DevicePointer data,
                   int64_t bytes, DevicePointer handle);
  // Gives 0, or the handle where it is another store's: then nothing was fetched, and that store is to be asked, with
  // the handle as `known`.
  uint64_t FetchOnCuda(int64_t run, int device, Stream stream, int64_t site, DevicePointer handle, DevicePointer data,
                       int64_t bytes, uint64_t known = 0);
  // Fills `data` with NaN where a fetch of this run was foreseen wrongly: for what else must not look right then.
  void GuardOnCuda(int64_t run, int device, Stream stream, DevicePointer data, int64_t bytes);

  Stats GetStats();
  // Throws what a device found wrong since the last call, if anything.
  void RaisePending();
  // Drops every entry that is not fetched yet. Not while a program that uses them runs.
  void Clear();
  // Waits until no I/O is under way.
  void Drain();

  // External engines: the next job, or id 0 where `seconds` went by or the store closes (then *closed).
  Job NextJob(double seconds, bool* closed);
  void FinishJob(int64_t id, const std::string& error);

  // For tests: the next `count` operations of a kind ("write", "read", "corrupt", "store", "fetch") go wrong; each I/O
  // operation takes `seconds` longer.
  void Inject(const std::string& kind, int count);
  void Slow(double seconds) { slow_seconds_ = seconds; }
  // 0: as learned, 1: always by the handle's value, 2: always as foreseen (for tests).
  void SetPrediction(int mode) { prediction_ = mode; }

 private:
  friend class Ring;
  using Lock = std::unique_lock<std::mutex>;

  struct DeviceCall;  // what a store or a fetch on a GPU holds while it runs: steps.cc
  class Unlocked;     // lets go of the mutex while it lives: store_internal.h

  explicit Store(const Options& options);
  uint64_t Handle(uint64_t serial) const { return static_cast<uint64_t>(id_) << 48 | serial; }
  void RequireOpen() const;
  Lock Enter();  // as every call from a step begins
  // Throws in a forked child, where the mutex may be locked for good.
  void RequireProcess() const;
  bool Injected(const std::string& kind);
  void CheckDevices();

  RunPtr FindRun(int64_t id, int device, bool create);
  EntryPtr Add(const RunPtr& run, int64_t call, int64_t bytes);
  int64_t SiteIn(Run& run, int64_t call);
  int64_t SiteIn(const RunPtr& run, int64_t call) const;
  EntryPtr Find(uint64_t handle, int64_t call, int64_t bytes, int device);
  Ring& RingOf(Lock& lock, int device, Stream compute);
  enum class Reuse { kFree, kLikelyFree, kLikelyShared, kNo };
  Reuse MayReuse(const Slot& slot) const;
  void Fetched(const EntryPtr& entry, const RunPtr& run);
  void Asked(const RunPtr& run, bool by_itself);
  void Drop(const EntryPtr& entry);
  void Retire(EntryPtr entry);
  void FailRun(const RunPtr& run, const std::string& why = "");

  // These let go of the mutex: what was known of entries before is to be looked at again.
  Slot* TakeSlot(Lock& lock, const EntryPtr& entry, bool pinned);
  Slot* TryTakeSlot(Lock& lock, int64_t bytes, bool pinned, uint64_t victims_below, bool last_resort = false);
  Slot* Exchange(Lock& lock, std::list<Slot>* leaving, int64_t capacity, bool pinned);
  static void FreeMemory(std::list<Slot>* slots);
  void ReleaseSlot(Slot* slot);
  bool DropOldest(const Run* current);
  void StartThreads();

  void QueueWrite(const EntryPtr& entry);
  bool ShouldWrite(const RunPtr& run, const Entry& entry) const;
  bool ForceWrites();
  void StartRead(const EntryPtr& entry, Slot* slot);
  void ReadAhead(const RunPtr& run, Lock& lock);  // lets go of the mutex
  void AwaitHost(Lock& lock, const EntryPtr& entry, bool pinned);
  void BeginJob(Job* job);
  void EndJob(const Job& job, const std::string& error);
  void Prefetch(const RunPtr& run);
  void Work();
  bool PopJob(Job* job);

  StoreNumber number_;
  const int64_t id_;
  const Options options_;
  const pid_t process_;  // that it was made in
  std::mutex mutex_;
  std::condition_variable changed_;
  std::condition_variable jobs_ready_;
  bool closing_ = false;
  bool closed_ = false;
  int active_ = 0;   // calls inside the store that let go of the mutex and come back by themselves
  int waiting_ = 0;  // those that wait for others to make room

  // Of all stores of the process: a handle of a store that was closed never names another one's tensor.
  inline static std::atomic<uint64_t> next_serial_{1};
  std::unordered_map<uint64_t, EntryPtr> entries_;
  std::map<uint64_t, EntryPtr> written_;  // on disk and in a slot: the slot can be taken
  std::map<std::pair<int64_t, int>, RunPtr> runs_;
  std::deque<RunPtr> recent_;
  std::unordered_map<int64_t, Expected> expected_;  // by a run's first site
  std::unordered_map<int64_t, Site> sites_;
  std::unordered_map<int64_t, std::unordered_set<int64_t>> sites_of_call_;  // one for each program that has the call
  std::unordered_set<int64_t> forward_only_;  // first sites of runs that were given up with nothing fetched

  std::list<Slot> slots_;
  std::deque<Slot*> free_;  // oldest first
  int64_t host_allocated_ = 0;

  std::unique_ptr<Disk> disk_;
  std::string disk_error_;
  std::deque<Job> writes_, reads_;
  std::unordered_map<int64_t, Job> external_jobs_;
  int64_t next_job_ = 1;
  int running_jobs_ = 0;
  std::vector<std::thread> threads_;

  std::map<int, std::unique_ptr<Ring>> rings_;
  std::map<std::string, int> injected_;
  std::atomic<double> slow_seconds_{0};
  std::atomic<int> prediction_{0};
  Stats stats_;
};

}  // namespace dejax::offload
