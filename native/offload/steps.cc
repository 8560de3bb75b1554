// What the FFI handlers call: store and fetch, on the CPU and on a GPU.
#include <cstring>

#include "../thread_pool.h"
#include "ring.h"
#include "store.h"
#include "store_internal.h"

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
  DeviceCall(Store* store, int device, Stream stream)
      : lock(store->Enter()), stopwatch(&store->stats_.launch_seconds), ring(Begin(store, lock, device, stream)),
        scope(ring.context()) {}

  Lock lock;
  const Stopwatch stopwatch;
  Ring& ring;
  const ContextScope scope;

 private:
  static Ring& Begin(Store* store, Lock& lock, int device, Stream stream) {
    store->CheckDevices();
    Ring& ring = store->RingOf(lock, device, stream);
    store->RequireOpen();
    return ring;
  }
};

uint64_t Store::StoreOnCpu(int64_t run_id, int64_t site, const void* data, int64_t bytes) {
  Lock lock = Enter();
  const Stopwatch stopwatch(&stats_.launch_seconds);
  const RunPtr run = FindRun(run_id, -1, /*create=*/true);
  // XLA may make other calls of a step that has failed: what they stored would stay, for nobody.
  if (!run->failure.empty()) throw AnotherFailed(*run);
  const EntryPtr entry = Add(run, site, bytes);
  try {
    if (Injected("store")) throw std::runtime_error("offload: storing failed: injected fault");
    Slot* slot = TakeSlot(lock, entry, /*pinned=*/false);
    if (!entry->live) {
      ReleaseSlot(slot);
      throw AnotherFailed(*run);
    }
    entry->slot = slot;
    slot->serial = entry->serial;
    ++slot->pins;
    {
      const Unlocked unlocked(this, lock);
      Copy(slot->data, data, bytes);
      if (const int64_t rest = RoundUp(bytes, kPage) - bytes) {
        std::memset(static_cast<char*>(slot->data) + bytes, 0, rest);  // checksums cover whole pages
      }
    }
    --slot->pins;
    changed_.notify_all();
    if (!entry->live) throw AnotherFailed(*run);
    if (ShouldWrite(run, *entry)) QueueWrite(entry);
  } catch (const std::exception& error) {
    FailRun(run, error.what());
    throw;
  }
  return Handle(entry->serial);
}

void Store::FetchOnCpu(int64_t run_id, int64_t site, uint64_t handle, void* data, int64_t bytes) {
  Lock lock = Enter();
  const Stopwatch stopwatch(&stats_.launch_seconds);
  const EntryPtr entry = Find(handle, site, bytes, /*device=*/-1);
  const RunPtr run = entry->run.lock();
  try {
    if (Injected("fetch")) throw std::runtime_error("offload: fetching failed: injected fault");
    if (run) Asked(run, run->id == run_id);
    ReadAhead(run, lock);
    AwaitHost(lock, entry, /*pinned=*/false);
    Slot* slot = entry->slot;
    ++slot->pins;
    {
      const Unlocked unlocked(this, lock);
      Copy(data, slot->data, bytes);
    }
    --slot->pins;
    stats_.demand_bytes += bytes;
    stats_.fetched_bytes += bytes;
    ++stats_.fetched_count;
    Fetched(entry, run);
    ReadAhead(run, lock);
  } catch (const std::exception& error) {
    FailRun(run, error.what());
    throw;
  }
}

void Store::StoreOnCuda(int64_t run_id, int device, Stream stream, int64_t site, int64_t ring_bytes,
                        DevicePointer data, int64_t bytes, DevicePointer handle) {
  DeviceCall call(this, device, stream);
  const RunPtr run = FindRun(run_id, device, /*create=*/true);
  if (!run->failure.empty()) throw AnotherFailed(*run);
  const EntryPtr entry = Add(run, site, bytes);
  try {
    if (Injected("store")) throw std::runtime_error("offload: storing failed: injected fault");
    call.ring.Reserve(call.lock, options_.device_bytes >= 0 ? options_.device_bytes : ring_bytes, stream);
    RequireOpen();
    call.ring.Push(call.lock, run, entry, data, stream);
    if (!entry->live) throw AnotherFailed(*run);
    call.ring.SetHandle(handle, Handle(entry->serial), stream);
    if (ShouldWrite(run, *entry)) QueueWrite(entry);
  } catch (const std::exception& error) {
    FailRun(run, error.what());
    throw;
  }
}

uint64_t Store::FetchOnCuda(int64_t run_id, int device, Stream stream, int64_t call_number, DevicePointer handle,
                            DevicePointer data, int64_t bytes, uint64_t known) {
  DeviceCall call(this, device, stream);
  const RunPtr own = FindRun(run_id, device, /*create=*/false);
  const int64_t site = SiteIn(own, call_number);
  RunPtr run = own;
  try {
    if (Injected("fetch")) throw std::runtime_error("offload: fetching failed: injected fault");
    uint64_t foreseen = 0;
    if (own) {
      const std::vector<uint64_t>& stored = own->by_site[site];
      if (!stored.empty()) foreseen = Handle(stored.back());
    }
    const int mode = prediction_;
    const bool predict =
        known == 0 && foreseen != 0 && (mode == 2 || (mode == 0 && sites_[site].order == Site::Order::kForeseen));
    uint64_t value = foreseen;
    if (!predict) {
      value = known;
      if (value == 0) {
        ++stats_.value_reads;
        value = call.ring.ReadHandle(call.lock, handle, stream);
        RequireOpen();  // the mutex was let go of
        if (IdOfHandle(value) != id_) return value;
      }
      if (own && value != foreseen) {
        own->surprising.insert(site);
        sites_[site].order = Site::Order::kSurprising;
      }
    }
    const EntryPtr entry = Find(value, call_number, bytes, device);
    run = entry->run.lock();
    if (run) Asked(run, run == own);
    ReadAhead(run, call.lock);
    call.ring.Pop(call.lock, run, entry, data, stream);
    call.ring.Leave(entry);
    stats_.fetched_bytes += bytes;
    ++stats_.fetched_count;
    Fetched(entry, run);
    ReadAhead(run, call.lock);
    call.ring.Prefetch(run);
    if (predict) {
      call.ring.CheckHandle(run_id, handle, value, data, bytes, stream);
      return 0;
    }
    call.ring.Guard(run_id, data, bytes, stream);
    if (own && own->by_site[site].empty() && own->surprising.count(site) == 0 &&
               sites_[site].order == Site::Order::kUnknown) {
      sites_[site].order = Site::Order::kForeseen;  // a whole run came so: from now on nobody waits for handles
    }
  } catch (const std::exception& error) {
    FailRun(run, error.what());
    throw;
  }
  return 0;
}

void Store::GuardOnCuda(int64_t run_id, int device, Stream stream, DevicePointer data, int64_t bytes) {
  Lock lock = Enter();
  Ring* const ring = &RingOf(lock, device, stream);
  RequireOpen();
  const ContextScope scope(ring->context());
  ring->Guard(run_id, data, bytes, stream);
}

}  // namespace dejax::offload
