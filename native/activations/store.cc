// A store is opened and closed, and answers questions about itself.
#include "activations/store.h"

#include <unistd.h>

#include <list>
#include <stdexcept>

#include "activations/ring.h"

namespace dejax::offload {

std::shared_ptr<Store> Store::Open(const StoreOptions& options) {
  std::shared_ptr<Store> store(new Store(options));
  store->io_.StartThreads();
  AddOpenStore(store);
  return store;
}

Store::Store(const StoreOptions& options)
    : options_(options), process_(getpid()), registry_(number_.value(), &prediction_, &stats_),
      host_(options.host_bytes, &monitor_, &registry_, &prediction_, &stats_),
      io_(options, &monitor_, &host_, &stats_, [this](const RunPtr& run) { Prefetch(run); }) {}

Store::~Store() { Close(); }

void Store::BeginClose() {
  if (getpid() != process_) return;  // a forked child: the store, its threads and its files are its parent's
  RemoveOpenStore(*this);
  const Lock lock(monitor_.mutex);
  monitor_.closing = true;
  io_.BeginClose();
  monitor_.changed.notify_all();
}

void Store::Close() {
  if (getpid() != process_) return;
  BeginClose();
  Lock lock(monitor_.mutex);
  if (closed_) return;
  monitor_.changed.wait(lock, [this] { return monitor_.active == 0 && monitor_.waiting == 0; });
  closed_ = true;
  lock.unlock();
  io_.Join();
  // What the GPU still does with the ring and the slots ends first.
  for (auto& [device, ring] : rings_) ring->Synchronize();
  lock.lock();
  const Context context = rings_.empty() ? nullptr : rings_.begin()->second->context();
  std::list<Slot> slots = host_.TakeAll();
  registry_.Clear();
  std::map<int, std::unique_ptr<Ring>> rings;
  rings.swap(rings_);
  const std::unique_ptr<Disk> disk = io_.TakeDisk();
  lock.unlock();
  {
    const ContextScope scope(context);
    HostSlots::Free(&slots);
  }
  number_.GiveBack();
}

void Store::RequireOpen() const {
  if (monitor_.closing) throw std::runtime_error("offload: the store was closed while a step was using it");
}

Lock Store::Enter() {
  RequireProcess();
  Lock lock(monitor_.mutex);
  RequireOpen();
  return lock;
}

void Store::RequireProcess() const {
  if (getpid() == process_) return;
  throw std::runtime_error("offload: the store was made by process " + std::to_string(process_) +
                           ", of which this one is a fork; make another store here");
}

void Store::Intercept(std::shared_ptr<Interceptor> interceptor) {
  const Lock lock(monitor_.mutex);
  io_.Intercept(interceptor);
  interceptor_ = std::move(interceptor);
}

Counters Store::GetStats() {
  RequireProcess();
  const Lock lock(monitor_.mutex);
  for (const auto& [device, ring] : rings_) {
    const ContextScope scope(ring->context());
    ring->CountStalls();
  }
  Counters stats = stats_;
  stats.host_bytes = host_.allocated();
  stats.disk_bytes = io_.bytes_held();
  for (const auto& [device, ring] : rings_) stats.ring_bytes += ring->capacity();
  return stats;
}

void Store::Clear() {
  RequireProcess();
  const Lock lock(monitor_.mutex);
  for (const EntryPtr& entry : registry_.Live()) Drop(entry);
}

void Store::Drain() {
  RequireProcess();
  Lock lock(monitor_.mutex);
  monitor_.changed.wait(lock, [this] { return monitor_.closing || io_.idle(); });
  if (monitor_.closing || !io_.has_disk()) return;
  const Unlocked unlocked(&monitor_, lock);
  io_.Trim();
}

// A ring is made on first use, and kept only whole.
Ring& Store::RingOf(Lock& lock, int device, Stream compute) {
  const auto found = rings_.find(device);
  if (found != rings_.end()) return *found->second;
  std::unique_ptr<Ring> made;
  {
    const Unlocked unlocked(&monitor_, lock);
    made = std::make_unique<Ring>(this, compute);
  }
  std::unique_ptr<Ring>& ring = rings_[device];
  if (!ring) ring.swap(made);
  if (made) {  // another thread was quicker
    const Unlocked unlocked(&monitor_, lock);
    made.reset();
  }
  io_.UseContext(rings_.begin()->second->context());
  return *rings_[device];
}

}  // namespace dejax::offload
