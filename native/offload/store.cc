// A store is opened, found by the calls of a step, and closed.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <set>
#include <system_error>

#include "current.h"
#include "ring.h"
#include "store.h"
#include "store_internal.h"

namespace dejax::offload {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<int64_t, std::shared_ptr<Store>> open;
  std::set<int64_t> taken;
};

Registry& GetRegistry() {
  static Registry* const registry = new Registry;  // never destroyed: handlers may run while the process exits
  return *registry;
}

}  // namespace

std::shared_ptr<Store> Store::Open(const Options& options) {
  std::shared_ptr<Store> store(new Store(options));
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  registry.open[store->id_] = store;
  return store;
}

std::shared_ptr<Store> Store::Find(int64_t id) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  const auto found = registry.open.find(id);
  if (found == registry.open.end()) {
    throw std::runtime_error("offload: the store was closed before this step ran; keep it open until the last step has "
                             "ended (jax.block_until_ready)");
  }
  return found->second;
}

std::shared_ptr<Store> Store::FindOr(int64_t id) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  const auto found = registry.open.find(id);
  if (found != registry.open.end()) return found->second;
  return registry.open.empty() ? nullptr : registry.open.begin()->second;
}

int64_t Store::IdOfHandle(uint64_t handle) { return static_cast<int64_t>(handle >> kSerialBits); }

StoreNumber::StoreNumber()
    : value_([] {
        Registry& registry = GetRegistry();
        std::lock_guard<std::mutex> lock(registry.mutex);
        int64_t number = 1;
        for (const int64_t taken : registry.taken) {
          if (taken != number) break;
          ++number;
        }
        if (number >= int64_t{1} << (64 - kSerialBits)) {
          throw std::runtime_error("offload: 65,535 stores are open; close those that are not needed");
        }
        registry.taken.insert(number);
        return number;
      }()) {}

void StoreNumber::GiveBack() {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  if (taken_) registry.taken.erase(value_);
  taken_ = false;
}

Store::Store(const Options& options) : id_(number_.value()), options_(options), process_(getpid()) {
  if (options_.folders.empty()) return;
  disk_ = std::make_unique<Disk>(options_.folders, options_.chunk_bytes, options_.disk_bytes, options_.direct,
                                 options_.external);
  if (!options_.external) StartThreads();
}

void Store::StartThreads() {
  try {
    for (int i = 0; i < options_.num_threads; ++i) threads_.emplace_back([this] { Work(); });
  } catch (const std::system_error& error) {
    {
      Lock lock(mutex_);
      closing_ = true;
      jobs_ready_.notify_all();
    }
    for (std::thread& thread : threads_) thread.join();
    throw std::runtime_error("offload: I/O thread " + std::to_string(threads_.size() + 1) + " of " +
                             std::to_string(options_.num_threads) + " cannot be started (" + error.what() +
                             "); give a smaller io_threads, or raise the limits of the process");
  }
}

Store::~Store() { Close(); }

void Store::BeginClose() {
  if (getpid() != process_) return;  // a forked child: the store is its parent's, and so are the threads and files
  {
    Registry& registry = GetRegistry();
    std::lock_guard<std::mutex> lock(registry.mutex);
    const auto found = registry.open.find(id_);
    if (found != registry.open.end() && found->second.get() == this) {  // another may have its number by now
      UnbindStore(id_);
      registry.open.erase(found);
    }
  }
  Lock lock(mutex_);
  closing_ = true;
  reads_.clear();
  writes_.clear();
  changed_.notify_all();
  jobs_ready_.notify_all();
}

void Store::Close() {
  if (getpid() != process_) return;
  BeginClose();
  Lock lock(mutex_);
  if (closed_) return;
  changed_.wait(lock, [this] { return active_ == 0 && waiting_ == 0; });
  closed_ = true;
  lock.unlock();
  for (std::thread& thread : threads_) thread.join();
  // What the GPU still does with the ring and the slots ends first.
  for (auto& [device, ring] : rings_) ring->Synchronize();
  lock.lock();
  written_.clear();
  entries_.clear();
  runs_.clear();
  recent_.clear();
  external_jobs_.clear();
  Context context = rings_.empty() ? nullptr : rings_.begin()->second->context();
  free_.clear();
  std::list<Slot> slots;
  slots.swap(slots_);
  std::map<int, std::unique_ptr<Ring>> rings;
  rings.swap(rings_);
  const std::unique_ptr<Disk> disk = std::move(disk_);
  host_allocated_ = 0;
  lock.unlock();
  {
    const ContextScope scope(context);
    FreeMemory(&slots);
  }
  number_.GiveBack();
}

void Store::RequireOpen() const {
  if (closing_) throw std::runtime_error("offload: the store was closed while a step was using it");
}

Store::Lock Store::Enter() {
  RequireProcess();
  Lock lock(mutex_);
  RequireOpen();
  return lock;
}

void Store::RequireProcess() const {
  if (getpid() == process_) return;
  throw std::runtime_error("offload: the store was made by process " + std::to_string(process_) +
                           ", of which this one is a fork; make another store here");
}

bool Store::Injected(const std::string& kind) {
  const auto found = injected_.find(kind);
  if (found == injected_.end() || found->second <= 0) return false;
  --found->second;
  return true;
}

void Store::Inject(const std::string& kind, int count) {
  Lock lock(mutex_);
  injected_[kind] = count;
}

Stats Store::GetStats() {
  RequireProcess();
  Lock lock(mutex_);
  for (const auto& [device, ring] : rings_) {
    const ContextScope scope(ring->context());
    ring->CountStalls();
  }
  Stats stats = stats_;
  stats.host_bytes = host_allocated_;
  stats.disk_bytes = disk_ ? disk_->bytes_held() : 0;
  for (const auto& [device, ring] : rings_) stats.ring_bytes += ring->capacity();
  return stats;
}

void Store::CheckDevices() {
  for (auto& [device, ring] : rings_) {
    const ContextScope scope(ring->context());
    ring->CountStalls();
    const auto [expected, found, run_id] = ring->TakeMismatch();
    if (expected == 0) continue;
    ++stats_.mismatches;
    const auto entry = entries_.find(expected & ((1ull << kSerialBits) - 1));
    for (auto& [number, site] : sites_) {  // one that is not known any more: none is trusted
      if (entry == entries_.end() || number == entry->second->site) site.order = Site::Order::kSurprising;
    }
    const auto run = runs_.find({run_id, device});
    if (run != runs_.end()) FailRun(RunPtr(run->second));  // nobody needs what it left
    throw std::runtime_error(
        "offload: an earlier step fetched its tensors in another order than it did before (expected handle " +
        std::to_string(expected) + ", found " + std::to_string(found) +
        "); its results are NaN. Run it again: from now on these handles are read before they are fetched");
  }
}

void Store::RaisePending() {
  RequireProcess();
  Lock lock(mutex_);
  CheckDevices();
}

void Store::Clear() {
  RequireProcess();
  Lock lock(mutex_);
  std::vector<EntryPtr> live;
  for (const auto& [serial, entry] : entries_) {
    if (entry->live) live.push_back(entry);
  }
  for (const EntryPtr& entry : live) Drop(entry);
}

void Store::Drain() {
  RequireProcess();
  Lock lock(mutex_);
  changed_.wait(lock, [this] {
    return closing_ || (running_jobs_ == 0 && reads_.empty() && writes_.empty() && external_jobs_.empty());
  });
  if (closing_ || !disk_) return;
  const Unlocked unlocked(this, lock);
  disk_->Trim();
}

}  // namespace dejax::offload
