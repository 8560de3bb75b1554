// The calls of a step: store and fetch, on the CPU and on a GPU.
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "activations/ring.h"
#include "activations/store.h"
#include "driver/thread_pool.h"

namespace dejax::offload {
namespace {

constexpr int64_t kCopyGrain = 4 << 20;

void Copy(void* to, const void* from, int64_t bytes) {
  ThreadPool::Get().ParallelFor(bytes, kCopyGrain, [&](int64_t begin, int64_t end) {
    std::memcpy(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin, end - begin);
  });
}

std::runtime_error AnotherFailed(const Run& run) {
  if (!run.failure.empty()) return std::runtime_error(run.failure);
  return std::runtime_error("offload: a tensor was given up while it was stored: the store was cleared or was full");
}

}  // namespace

struct Store::DeviceCall {
  DeviceCall(Store* store, const StoreCall& call)
      : lock(store->Enter()), stopwatch(&store->stats_.launch_seconds), ring(Begin(store, lock, call)),
        scope(ring.context()) {
    ring.CountStalls();
  }

  Lock lock;
  const Stopwatch stopwatch;
  Ring& ring;
  const ContextScope scope;

 private:
  static Ring& Begin(Store* store, Lock& lock, const StoreCall& call) {
    Ring& ring = store->RingOf(lock, call.device, call.stream);
    store->RequireOpen();
    return ring;
  }
};

uint64_t Store::StoreOnCpu(const StoreCall& call, const void* data, int64_t bytes) {
  Lock lock = Enter();
  const Stopwatch stopwatch(&stats_.launch_seconds);
  const RunPtr run = RunOf(call.run, kCpu);
  // XLA may make further calls of a step that has failed: nobody would ever fetch what they stored.
  if (!run->failure.empty()) throw AnotherFailed(*run);
  const EntryPtr entry = registry_.Add(run, call.site, bytes, call.place);
  try {
    Before(Operation::kStore);
    Slot* slot = TakeSlot(lock, entry, /*pinned=*/false);
    if (!entry->live) {
      host_.Release(slot);
      throw AnotherFailed(*run);
    }
    entry->slot = slot;
    slot->serial = entry->serial;
    ++slot->pins;
    {
      const Unlocked unlocked(&monitor_, lock);
      Copy(slot->data, data, bytes);
      if (const int64_t rest = RoundUp(bytes, kPage) - bytes) {
        std::memset(static_cast<char*>(slot->data) + bytes, 0, rest);  // checksums cover whole pages
      }
    }
    --slot->pins;
    monitor_.changed.notify_all();
    if (!entry->live) throw AnotherFailed(*run);
    if (ShouldWrite(run, *entry)) io_.QueueWrite(entry);
  } catch (const std::exception& error) {
    FailRun(run, error.what());
    throw;
  }
  return registry_.HandleOf(entry->serial);
}

void Store::FetchOnCpu(const StoreCall& call, uint64_t handle, void* data, int64_t bytes) {
  Lock lock = Enter();
  const Stopwatch stopwatch(&stats_.launch_seconds);
  const EntryPtr entry = registry_.Find(handle, call.site, bytes, kCpu, call.place);
  const RunPtr run = entry->run.lock();
  try {
    Before(Operation::kFetch);
    if (run) FetchBegins(run, run->id == call.run);
    ReadAhead(run, lock);
    AwaitHost(lock, entry, /*pinned=*/false);
    Slot* slot = entry->slot;
    ++slot->pins;
    {
      const Unlocked unlocked(&monitor_, lock);
      Copy(data, slot->data, bytes);
    }
    --slot->pins;
    stats_.demand_bytes += bytes;
    stats_.fetched_bytes += bytes;
    ++stats_.fetched_count;
    Remove(entry, run);
    ReadAhead(run, lock);
  } catch (const std::exception& error) {
    FailRun(run, error.what());
    throw;
  }
}

void Store::StoreOnCuda(const StoreCall& call, int64_t ring_bytes, DevicePointer data, int64_t bytes,
                        DevicePointer handle) {
  DeviceCall held(this, call);
  const RunPtr run = RunOf(call.run, call.device);
  if (!run->failure.empty()) throw AnotherFailed(*run);
  const EntryPtr entry = registry_.Add(run, call.site, bytes, call.place);
  try {
    Before(Operation::kStore);
    held.ring.Reserve(held.lock, options_.device_bytes >= 0 ? options_.device_bytes : ring_bytes, call.stream);
    RequireOpen();
    held.ring.Push(held.lock, run, entry, data, call.stream);
    if (!entry->live) throw AnotherFailed(*run);
    held.ring.SetHandle(handle, registry_.HandleOf(entry->serial), call.stream);
    if (ShouldWrite(run, *entry)) io_.QueueWrite(entry);
  } catch (const std::exception& error) {
    FailRun(run, error.what());
    throw;
  }
}

void Store::FetchOnCuda(const StoreCall& call, uint64_t handle, DevicePointer data, int64_t bytes) {
  DeviceCall held(this, call);
  RunPtr run = registry_.FindRun(call.run, call.device);
  try {
    Before(Operation::kFetch);
    const EntryPtr entry = registry_.Find(handle, call.site, bytes, call.device, call.place);
    const RunPtr own = run;
    run = entry->run.lock();
    if (run) FetchBegins(run, run == own);
    ReadAhead(run, held.lock);
    held.ring.Pop(held.lock, run, entry, data, call.stream);
    held.ring.Leave(entry);
    stats_.fetched_bytes += bytes;
    ++stats_.fetched_count;
    Remove(entry, run);
    ReadAhead(run, held.lock);
    held.ring.Prefetch(run, &held.lock);
  } catch (const std::exception& error) {
    FailRun(run, error.what());
    throw;
  }
}

}  // namespace dejax::offload
