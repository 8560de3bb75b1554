#include "store.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "../thread_pool.h"
#include "ring.h"

namespace dejax::offload {
namespace {

constexpr uint64_t kSerialBits = 48;
constexpr uint64_t kAnySerial = std::numeric_limits<uint64_t>::max();
constexpr int64_t kCopyGrain = 4 << 20;
// What a run that has fetched some of its entries left over is dropped when so many later runs have begun and nothing
// was heard of it for a while: another thread's step may be slow.
constexpr size_t kLeftoverRuns = 8;
constexpr double kIdleSeconds = 2;

struct Registry {
  std::mutex mutex;
  std::map<int64_t, std::shared_ptr<Store>> open;
  std::vector<int64_t> current;
  int64_t next = 1;
};

Registry& GetRegistry() {
  static Registry* const registry = new Registry;  // never destroyed: handlers may run while the process exits
  return *registry;
}

int64_t RoundUp(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Adds the time that it lives to a counter. The store's mutex is held when it begins and when it ends.
class Stopwatch {
 public:
  explicit Stopwatch(double* total) : total_(total), begin_(Seconds()) {}
  ~Stopwatch() { *total_ += Seconds() - begin_; }

 private:
  double* const total_;
  const double begin_;
};

void Copy(void* to, const void* from, int64_t bytes) {
  ThreadPool::Get().ParallelFor(bytes, kCopyGrain, [&](int64_t begin, int64_t end) {
    std::memcpy(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin, end - begin);
  });
}

std::string Megabytes(int64_t bytes) { return std::to_string(bytes / 1000000) + " MB"; }

}  // namespace

// ---------------------------------------------------------------------------------------------- open, find, close

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
  if (id == 0) {
    if (registry.current.empty()) {
      throw std::runtime_error(
          "offload: no store is current; run the step inside `with ActivationStore(...)`, or give offload a store=");
    }
    id = registry.current.back();
  }
  const auto found = registry.open.find(id);
  if (found == registry.open.end()) {
    throw std::runtime_error("offload: the store was closed before this step ran; keep it open until the last step has "
                             "ended (jax.block_until_ready), and trace again for another store");
  }
  return found->second;
}

void Store::Push(int64_t id) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  registry.current.push_back(id);
}

void Store::PushDefault(int64_t id) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  registry.current.insert(registry.current.begin(), id);
}

void Store::Pop(int64_t id) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  const auto at = std::find(registry.current.rbegin(), registry.current.rend(), id);
  if (at != registry.current.rend()) registry.current.erase(std::next(at).base());
}

Store::Store(const Options& options)
    : id_([] {
        Registry& registry = GetRegistry();
        std::lock_guard<std::mutex> lock(registry.mutex);
        const int64_t id = registry.next++;
        if (registry.next >= 1 << (64 - kSerialBits)) registry.next = 1;
        return id;
      }()),
      options_(options) {
  if (options_.folders.empty()) return;
  disk_ = std::make_unique<Disk>(options_.folders, options_.chunk_bytes, options_.disk_bytes, options_.direct,
                                 options_.external);
  if (options_.external) return;
  for (int i = 0; i < options_.num_threads; ++i) threads_.emplace_back([this] { Work(); });
}

Store::~Store() { Close(); }

void Store::BeginClose() {
  {
    Registry& registry = GetRegistry();
    std::lock_guard<std::mutex> lock(registry.mutex);
    registry.open.erase(id_);
    registry.current.erase(std::remove(registry.current.begin(), registry.current.end(), id_), registry.current.end());
  }
  Lock lock(mutex_);
  closing_ = true;
  reads_.clear();
  writes_.clear();
  changed_.notify_all();
  jobs_ready_.notify_all();
}

void Store::Close() {
  BeginClose();
  Lock lock(mutex_);
  if (closed_) return;
  changed_.wait(lock, [this] { return active_ == 0; });
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
  {
    ContextScope scope(context);
    while (!slots_.empty()) {
      Slot& slot = slots_.front();
      slot.last_read.reset();
      slot.last_write.reset();
      if (slot.pinned) {
        GetCalls().host_free(slot.data);
      } else {
        munmap(slot.data, slot.capacity);
      }
      slots_.pop_front();
    }
  }
  rings_.clear();
  disk_.reset();
}

void Store::RequireOpen() const {
  if (closing_) throw std::runtime_error("offload: the store was closed while a step was using it");
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
  Lock lock(mutex_);
  Stats stats = stats_;
  stats.host_bytes = host_allocated_;
  stats.disk_bytes = disk_ ? disk_->bytes_in_use() : 0;
  for (const auto& [device, ring] : rings_) stats.ring_bytes += ring->capacity();
  return stats;
}

void Store::CheckDevices() {
  for (auto& [device, ring] : rings_) {
    const auto [expected, found] = ring->TakeMismatch();
    if (expected == 0) continue;
    ++stats_.mismatches;
    const auto entry = entries_.find(expected & ((1ull << kSerialBits) - 1));
    for (auto& [number, site] : sites_) {  // one that is not known any more: none is trusted
      if (entry == entries_.end() || number == entry->second->site) site.order = Site::Order::kSurprising;
    }
    throw std::runtime_error(
        "offload: an earlier step fetched its tensors in another order than it did before (expected handle " +
        std::to_string(expected) + ", found " + std::to_string(found) +
        "); its results are NaN. Run it again: from now on these handles are read before they are fetched");
  }
}

void Store::RaisePending() {
  Lock lock(mutex_);
  CheckDevices();
}

void Store::Clear() {
  Lock lock(mutex_);
  std::vector<EntryPtr> live;
  for (const auto& [serial, entry] : entries_) {
    if (entry->live) live.push_back(entry);
  }
  for (const EntryPtr& entry : live) Drop(entry);
}

void Store::Drain() {
  Lock lock(mutex_);
  changed_.wait(lock, [this] {
    return closing_ || (running_jobs_ == 0 && reads_.empty() && writes_.empty() && external_jobs_.empty());
  });
}

// ------------------------------------------------------------------------------------------------ entries and runs

RunPtr Store::FindRun(int64_t id, int device, bool create) {
  const double now = Seconds();
  const auto found = runs_.find({id, device});
  if (found != runs_.end()) {
    found->second->last_used = now;
    return found->second;
  }
  if (!create) return nullptr;
  auto run = std::make_shared<Run>();
  run->id = id;
  run->device = device;
  run->number = stats_.runs++;
  run->last_used = now;
  runs_[{id, device}] = run;
  recent_.push_back(run);
  for (size_t i = 0; i + kLeftoverRuns < recent_.size();) {
    const RunPtr old = recent_[i];
    if (now - old->last_used <= kIdleSeconds) break;  // so are all later ones, or nearly
    if (old->fetched) {
      const std::vector<EntryPtr> left = old->stack;
      for (const EntryPtr& entry : left) {
        if (entry->live) Drop(entry);
      }
    }
    if (old->stack.empty()) {
      runs_.erase({old->id, old->device});
      recent_.erase(recent_.begin() + i);
    } else {
      ++i;
    }
  }
  return run;
}

EntryPtr Store::Add(const RunPtr& run, int64_t site, int64_t bytes) {
  auto entry = std::make_shared<Entry>();
  entry->serial = next_serial_++;
  entry->bytes = bytes;
  entry->site = site;
  entry->device = run->device;
  entry->run = run;
  entries_[entry->serial] = entry;
  if (run->stack.empty() && run->peak_bytes == 0) run->first_site = site;
  run->stack.push_back(entry);
  auto& serials = run->by_site[site];
  Site& known = sites_[site];
  if (known.uses == Site::Uses::kUnknown && known.fetched && serials.empty()) known.uses = Site::Uses::kOne;
  serials.push_back(entry->serial);
  run->live_bytes += bytes;
  run->peak_bytes = std::max(run->peak_bytes, run->live_bytes);
  stats_.stored_bytes += bytes;
  ++stats_.stored_count;
  stats_.live_bytes += bytes;
  ++stats_.live_count;
  stats_.peak_live_bytes = std::max(stats_.peak_live_bytes, stats_.live_bytes);
  return entry;
}

EntryPtr Store::Find(uint64_t handle, int64_t site, int64_t bytes, int device) {
  const uint64_t serial = handle & ((1ull << kSerialBits) - 1);
  if (handle >> kSerialBits != static_cast<uint64_t>(id_)) {
    throw std::runtime_error("offload: handle " + std::to_string(handle) + " is not of this store (number " +
                             std::to_string(id_) + "); run backward with the store that forward used");
  }
  const auto found = entries_.find(serial);
  if (found == entries_.end() || !found->second->live) sites_[site].uses = Site::Uses::kMany;
  if (found == entries_.end()) {
    throw std::runtime_error(
        "offload: the tensor of handle " + std::to_string(serial) + (serial < next_serial_
            ? " is gone: it was fetched before and its memory used again (backward ran twice), dropped by clear(), or "
              "given up for newer ones when the store was full. Run forward again: from now on this call's tensors stay "
              "for a second fetch"
            : " was never stored: the handle is damaged"));
  }
  if (found->second->bytes != bytes) {
    throw std::runtime_error("offload: handle " + std::to_string(serial) + " stands for " +
                             std::to_string(found->second->bytes) + " bytes, " + std::to_string(bytes) +
                             " were asked for: the handles were mixed up on their way from forward to backward");
  }
  if (found->second->device != device) {
    throw std::runtime_error("offload: a tensor that was stored on device " + std::to_string(found->second->device) +
                             " was to be fetched on device " + std::to_string(device) +
                             " (-1 is the CPU); run backward where forward ran");
  }
  return found->second;
}

// Made on first use; only a whole one is kept.
Ring& Store::RingOf(int device, Stream compute) {
  const auto found = rings_.find(device);
  if (found != rings_.end()) return *found->second;
  auto made = std::make_unique<Ring>(this, device, compute);
  return *(rings_[device] = std::move(made));
}

void Store::Retire(const EntryPtr& entry) {
  entries_.erase(entry->serial);
  if (entry->slot != nullptr && entry->slot->serial == entry->serial) entry->slot->serial = 0;
  entry->slot = nullptr;
}

// Takes an entry out of its run: it was fetched, or is given up.
void Store::Fetched(const EntryPtr& entry, const RunPtr& run) {
  if (!entry->live) return;
  entry->live = false;
  sites_[entry->site].fetched = true;
  stats_.live_bytes -= entry->bytes;
  --stats_.live_count;
  written_.erase(entry->serial);
  if (entry->disk == Entry::Disk::kQueued && entry->pending > 0) stats_.cancelled_bytes += entry->bytes;
  if (entry->pending == 0 && disk_) {
    for (const Chunk& chunk : entry->chunks) disk_->Free(chunk);
    entry->chunks.clear();
  }
  if (entry->slot != nullptr) {
    ReleaseSlot(entry->slot);
  } else {
    Retire(entry);
  }
  if (run) {
    run->live_bytes -= entry->bytes;
    expected_[run->first_site] = run->peak_bytes;
    auto& serials = run->by_site[entry->site];
    const auto at = std::find(serials.rbegin(), serials.rend(), entry->serial);
    if (at != serials.rend()) serials.erase(std::next(at).base());
    while (!run->stack.empty() && !run->stack.back()->live) run->stack.pop_back();
    run->top = run->stack.empty() ? 0 : run->stack.back()->offset + run->stack.back()->span;
  }
  changed_.notify_all();
}

void Store::Drop(const EntryPtr& entry) {
  const RunPtr run = entry->run.lock();
  for (auto& [device, ring] : rings_) ring->Leave(entry);
  const int64_t peak = run ? run->peak_bytes : 0;
  const auto known = run ? expected_.find(run->first_site) : expected_.end();
  const int64_t before = known != expected_.end() ? known->second : -1;
  Fetched(entry, run);
  if (run && peak > 0) {  // what was dropped says nothing about how much a whole run stores
    if (before < 0) {
      expected_.erase(run->first_site);
    } else {
      expected_[run->first_site] = before;
    }
  }
  ++stats_.dropped_count;
  Retire(entry);
}

void Store::FailRun(const RunPtr& run) {
  if (!run) return;
  const std::vector<EntryPtr> left = run->stack;
  for (const EntryPtr& entry : left) {
    if (entry->live) Drop(entry);
  }
}

// Gives up what the oldest run left that was not heard of for a while.
bool Store::DropOldest(const Run* current) {
  const double now = Seconds();
  for (const RunPtr& old : recent_) {
    const RunPtr run = old;
    if (run.get() == current || run->stack.empty() || now - run->last_used < kIdleSeconds) continue;
    FailRun(run);
    return true;
  }
  return false;
}

// ------------------------------------------------------------------------------------------------ slots

Slot* Store::Allocate(int64_t capacity, bool pinned) {
  void* data = nullptr;
  if (pinned) {
    constexpr unsigned kPortable = 1, kDeviceMap = 2;
    const Result result = GetCalls().host_alloc(&data, static_cast<size_t>(capacity), kPortable | kDeviceMap);
    if (result != 0) return nullptr;
  } else {
    data = mmap(nullptr, capacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) return nullptr;
#ifdef MADV_HUGEPAGE
    if (capacity >= 4 << 20) madvise(data, capacity, MADV_HUGEPAGE);
#endif
  }
  slots_.emplace_back();
  Slot* slot = &slots_.back();
  slot->data = data;
  slot->capacity = capacity;
  slot->pinned = pinned;
  host_allocated_ += capacity;
  stats_.peak_host_bytes = std::max(stats_.peak_host_bytes, host_allocated_);
  return slot;
}

void Store::FreeMemory(Slot* slot) {
  for (Event* event : {&slot->last_read, &slot->last_write}) {
    if (*event) Check(GetCalls().event_synchronize(event->get()), "cuEventSynchronize");
    event->reset();
  }
  host_allocated_ -= slot->capacity;
  if (slot->pinned) {
    GetCalls().host_free(slot->data);
  } else {
    munmap(slot->data, slot->capacity);
  }
  slots_.remove_if([&](const Slot& other) { return &other == slot; });
}

void Store::ReleaseSlot(Slot* slot) {
  slot->free = true;
  free_.push_back(slot);
}

// Whether a free slot's former bytes may be fetched once more.
Store::Reuse Store::MayReuse(const Slot& slot) const {
  const auto entry = slot.serial == 0 ? entries_.end() : entries_.find(slot.serial);
  if (entry == entries_.end()) return Reuse::kFree;
  const RunPtr run = entry->second->run.lock();
  if (!run || (stats_.runs - run->number > 4 && Seconds() - run->last_used > kIdleSeconds)) return Reuse::kFree;
  const auto site = sites_.find(entry->second->site);
  if (site == sites_.end()) return Reuse::kFree;
  switch (site->second.uses) {
    case Site::Uses::kOne: return Reuse::kFree;
    case Site::Uses::kMany: return Reuse::kNo;
    default: return Reuse::kFetchedOnce;
  }
}

Slot* Store::TryTakeSlot(int64_t bytes, bool pinned, uint64_t victims_below) {
  const int64_t capacity = RoundUp(bytes, kPage);
  const auto fits = [&](const Slot& slot) {
    return slot.pinned == pinned && slot.capacity >= capacity && slot.capacity <= capacity + capacity / 4 + (64 << 10);
  };
  const auto take = [&](Slot* slot) {
    if (slot->serial != 0) {
      const auto former = entries_.find(slot->serial);
      if (former != entries_.end()) Retire(former->second);
    }
    slot->free = false;
    slot->serial = 0;
    return slot;
  };
  const auto find_free = [&](bool fetched_once) -> Slot* {
    for (auto at = free_.begin(); at != free_.end(); ++at) {
      Slot* slot = *at;
      if (slot->pins > 0 || !fits(*slot)) continue;
      const Reuse reuse = MayReuse(*slot);
      if (reuse == Reuse::kNo || (reuse == Reuse::kFetchedOnce && !fetched_once)) continue;
      free_.erase(at);
      return take(slot);
    }
    return nullptr;
  };
  if (Slot* slot = find_free(/*fetched_once=*/false)) return slot;
  if (host_allocated_ + capacity <= options_.host_bytes) {
    if (Slot* slot = Allocate(capacity, pinned)) return slot;
  }
  if (Slot* slot = find_free(/*fetched_once=*/true)) return slot;
  // Memory of other sizes that nobody needs.
  for (auto at = free_.begin(); at != free_.end() && host_allocated_ + capacity > options_.host_bytes;) {
    Slot* slot = *at;
    if (slot->pins > 0 || MayReuse(*slot) == Reuse::kNo) {
      ++at;
      continue;
    }
    at = free_.erase(at);
    FreeMemory(take(slot));
  }
  // Memory whose bytes are on disk too: the oldest, which is fetched last.
  for (auto at = written_.begin(); at != written_.end() && at->first < victims_below;) {
    const EntryPtr entry = at->second;
    Slot* slot = entry->slot;
    if (slot == nullptr || slot->pins > 0 || host_allocated_ + capacity <= options_.host_bytes) {
      if (host_allocated_ + capacity <= options_.host_bytes) break;
      ++at;
      continue;
    }
    at = written_.erase(at);
    entry->slot = nullptr;
    slot->serial = 0;
    if (fits(*slot)) return slot;
    FreeMemory(slot);
  }
  if (host_allocated_ + capacity <= options_.host_bytes) return Allocate(capacity, pinned);
  return nullptr;
}

// Writes that nobody foresaw: the oldest entries that are nowhere but in host memory.
bool Store::ForceWrites() {
  if (!disk_) return false;
  std::vector<EntryPtr> candidates;
  for (const auto& [serial, entry] : entries_) {
    if (entry->live && entry->disk == Entry::Disk::kNone && entry->slot != nullptr && entry->slot->pins == 0 &&
        (!entry->slot->pinned || entry->copied_out)) {
      candidates.push_back(entry);
    }
  }
  std::sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) { return a->serial < b->serial; });
  if (candidates.size() > 4) candidates.resize(4);
  bool any = false;
  for (const EntryPtr& entry : candidates) {
    QueueWrite(entry);
    any |= entry->disk == Entry::Disk::kQueued;
  }
  return any;
}

Slot* Store::TakeSlot(Lock& lock, const EntryPtr& entry, bool pinned, bool may_wait, uint64_t victims_below) {
  const int64_t bytes = entry->bytes;
  const int64_t capacity = RoundUp(bytes, kPage);
  if (capacity > options_.host_bytes) {
    throw std::runtime_error("offload: a tensor of " + Megabytes(bytes) + " is larger than host_bytes=" +
                             std::to_string(options_.host_bytes) + "; raise host_bytes");
  }
  const RunPtr run = entry->run.lock();
  Slot* slot = TryTakeSlot(bytes, pinned, victims_below);
  if (slot != nullptr || !may_wait) return slot;
  const Stopwatch stopwatch(&stats_.store_stall_seconds);
  const double begin = Seconds();
  while (true) {
    RequireOpen();
    if (Slot* found = TryTakeSlot(bytes, pinned, victims_below)) return found;
    const bool underway = running_jobs_ > 0 || !writes_.empty() || !reads_.empty() || !external_jobs_.empty() ||
                          std::any_of(free_.begin(), free_.end(), [](const Slot* free) { return free->pins > 0; }) ||
                          active_ > 0;
    if (!underway && !ForceWrites()) {
      if (DropOldest(run.get())) continue;
      // Younger runs may go on in other threads: what they fetch makes room too.
      if (Seconds() - begin < kIdleSeconds + 0.1) {
        changed_.wait_for(lock, std::chrono::milliseconds(20));
        continue;
      }
      std::string why = "offload: the host tier is full: host_bytes=" + std::to_string(options_.host_bytes) + ", " +
                        std::to_string(stats_.live_count) + " tensors of " + Megabytes(stats_.live_bytes) +
                        " are stored";
      why += disk_ ? (disk_error_.empty() ? "" : "; the disk tier failed: " + disk_error_)
                   : "; raise host_bytes, or give the store a path for a disk tier";
      throw std::runtime_error(why);
    }
    ++active_;
    changed_.wait_for(lock, std::chrono::milliseconds(200));
    --active_;
    changed_.notify_all();
  }
}

// ------------------------------------------------------------------------------------------------ disk

bool Store::ShouldWrite(const RunPtr& run, const Entry& entry) const {
  if (!disk_ || entry.slot == nullptr || entry.disk != Entry::Disk::kNone) return false;
  const auto site = sites_.find(entry.site);
  if (site != sites_.end() && site->second.uses == Site::Uses::kMany) return false;
  const auto expected = expected_.find(run->first_site);
  if (expected == expected_.end()) return true;  // the first run: what stays in memory is not known yet
  // The top of the stack that fits into memory is not written: it is fetched first.
  return expected->second - run->live_bytes + entry.bytes > options_.host_bytes - options_.host_bytes / 8;
}

void Store::QueueWrite(const EntryPtr& entry) {
  const int64_t bytes = RoundUp(entry->bytes, kPage);
  const int64_t count = (bytes + options_.chunk_bytes - 1) / options_.chunk_bytes;
  try {
    for (int64_t i = 0; i < count; ++i) entry->chunks.push_back(disk_->Allocate());
  } catch (const std::runtime_error& error) {
    // The tensor stays in host memory, where it is safe. Who needs its room later gets this error.
    for (const Chunk& chunk : entry->chunks) disk_->Free(chunk);
    entry->chunks.clear();
    entry->disk = Entry::Disk::kFailed;
    disk_error_ = error.what();
    return;
  }
  entry->disk = Entry::Disk::kQueued;
  for (int64_t i = 0; i < count; ++i) {
    Job job;
    job.write = true;
    job.entry = entry;
    job.slot = entry->slot;
    job.chunk = static_cast<int>(i);
    ++entry->pending;
    ++entry->slot->pins;
    writes_.push_back(std::move(job));
  }
  jobs_ready_.notify_all();
}

void Store::StartRead(const EntryPtr& entry, Slot* slot) {
  entry->slot = slot;
  slot->serial = entry->serial;
  entry->reading = true;
  for (size_t i = 0; i < entry->chunks.size(); ++i) {
    Job job;
    job.entry = entry;
    job.slot = slot;
    job.chunk = static_cast<int>(i);
    ++entry->pending;
    ++slot->pins;
    reads_.push_back(std::move(job));
  }
  jobs_ready_.notify_all();
}

// Reads what a run will fetch next, in reverse order of creation, as far as there is memory for it.
void Store::ReadAhead(const RunPtr& run, Lock& lock) {
  (void)lock;
  if (!disk_ || !run) return;
  for (auto at = run->stack.rbegin(); at != run->stack.rend(); ++at) {
    const EntryPtr& entry = *at;
    if (!entry->live || entry->slot != nullptr || entry->in_ring || entry->disk != Entry::Disk::kWritten ||
        !entry->error.empty()) {
      continue;
    }
    Slot* slot = TryTakeSlot(entry->bytes, run->device >= 0, entry->serial);
    if (slot == nullptr) return;
    StartRead(entry, slot);
  }
}

// Returns when the entry's slot holds its bytes, or work that brings them there has been submitted.
void Store::AwaitHost(Lock& lock, const EntryPtr& entry, bool pinned) {
  const auto there = [&] { return entry->slot != nullptr && !entry->reading; };
  if (there()) {
    if (disk_ && entry->live && entry->disk != Entry::Disk::kWritten) stats_.forwarded_bytes += entry->bytes;
    return;
  }
  const Stopwatch stopwatch(&stats_.fetch_stall_seconds);
  while (!there()) {
    RequireOpen();
    if (!entry->error.empty()) throw std::runtime_error(entry->error);
    if (entry->slot == nullptr) {
      if (!entry->live || entry->disk != Entry::Disk::kWritten) {
        throw std::runtime_error("offload: the tensor of handle " + std::to_string(entry->serial) +
                                 " was given up before it was fetched; run forward again");
      }
      Slot* slot = TakeSlot(lock, entry, pinned, /*may_wait=*/true, kAnySerial);
      if (entry->slot != nullptr || !entry->live) {  // someone else was quicker while this waited
        ReleaseSlot(slot);
        continue;
      }
      StartRead(entry, slot);
    }
    ++active_;
    changed_.wait_for(lock, std::chrono::milliseconds(200));
    --active_;
    changed_.notify_all();
  }
  if (!entry->error.empty()) throw std::runtime_error(entry->error);
}

bool Store::PopJob(Job* job) {
  while (!reads_.empty() || !writes_.empty()) {
    auto& queue = reads_.empty() ? writes_ : reads_;
    *job = std::move(queue.front());
    queue.pop_front();
    job->id = next_job_++;
    job->context = rings_.empty() ? nullptr : rings_.begin()->second->context();
    ++running_jobs_;
    if (job->entry->live) {
      const Chunk& chunk = job->entry->chunks[job->chunk];
      const int64_t offset = job->chunk * options_.chunk_bytes;
      job->path = disk_->path(chunk);
      job->index = disk_->number(chunk);
      job->data = static_cast<char*>(job->slot->data) + offset;
      job->bytes = std::min(options_.chunk_bytes, RoundUp(job->entry->bytes, kPage) - offset);
      return true;
    }
    EndJob(*job, "");  // fetched or dropped before its turn: the write is cancelled
  }
  return false;
}

// What precedes the input or output itself, without the mutex.
void Store::BeginJob(Job* job) {
  const Event events[] = {job->write ? job->entry->copied_out : job->slot->last_read,
                          job->write ? nullptr : job->slot->last_write};
  for (const Event& event : events) {
    if (!event) continue;
    ContextScope scope(job->context);
    Check(GetCalls().event_synchronize(event.get()), "cuEventSynchronize");
  }
  if (job->write && options_.checksum) {
    job->entry->chunks[job->chunk].checksum = Checksum(job->data, job->bytes);
  }
  const double seconds = slow_seconds_;
  if (seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

void Store::EndJob(const Job& job, const std::string& error) {
  Entry& entry = *job.entry;
  --running_jobs_;
  --job.slot->pins;
  --entry.pending;
  if (!error.empty()) {
    if (job.write) {
      entry.disk = Entry::Disk::kFailed;
      disk_error_ = error;
    } else {
      entry.error = error;
    }
  } else if (job.bytes > 0) {
    (job.write ? stats_.written_bytes : stats_.read_bytes) += job.bytes;
  }
  if (entry.pending == 0) {
    if (!entry.live || entry.disk == Entry::Disk::kFailed) {
      for (const Chunk& chunk : entry.chunks) disk_->Free(chunk);
      entry.chunks.clear();
    } else {
      entry.disk = Entry::Disk::kWritten;
      if (entry.slot != nullptr && entry.error.empty()) written_[entry.serial] = job.entry;
    }
    entry.reading = false;
    if (!entry.error.empty() && entry.slot != nullptr && entry.live) {
      ReleaseSlot(entry.slot);
      entry.slot->serial = 0;
      entry.slot = nullptr;
    }
  }
  changed_.notify_all();
}

void Store::Work() {
  Lock lock(mutex_);
  while (true) {
    Job job;
    if (PopJob(&job)) {
      const bool broken_write = job.write && Injected("write");
      const bool broken_read = !job.write && Injected("read");
      const bool corrupt = job.write && Injected("corrupt");
      lock.unlock();
      std::string error;
      try {
        BeginJob(&job);
        if (broken_write) throw std::runtime_error("offload: writing failed: injected fault");
        if (broken_read) throw std::runtime_error("offload: reading failed: injected fault");
        Chunk& chunk = job.entry->chunks[job.chunk];
        if (job.write) {
          disk_->Write(chunk, job.data, job.bytes);
          if (corrupt) chunk.checksum ^= 1;
        } else {
          disk_->Read(chunk, job.data, job.bytes);
          if (options_.checksum && Checksum(job.data, job.bytes) != chunk.checksum) {
            throw std::runtime_error("offload: what was read from " + disk_->Name(chunk.file) +
                                     " is not what was written there (its checksum differs): the file or the drive is "
                                     "damaged");
          }
        }
      } catch (const std::exception& caught) {
        error = caught.what();
      }
      lock.lock();
      EndJob(job, error);
      continue;
    }
    if (closing_) return;
    jobs_ready_.wait(lock);
  }
}

Job Store::NextJob(double seconds, bool* closed) {
  Lock lock(mutex_);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  Job job;
  while (!PopJob(&job)) {
    *closed = closing_;
    if (closing_ || jobs_ready_.wait_until(lock, deadline) == std::cv_status::timeout) return Job();
  }
  external_jobs_[job.id] = job;
  lock.unlock();
  try {
    BeginJob(&job);
  } catch (const std::exception& error) {
    FinishJob(job.id, error.what());
    return Job();
  }
  return job;
}

void Store::FinishJob(int64_t id, const std::string& error) {
  Lock lock(mutex_);
  const auto found = external_jobs_.find(id);
  if (found == external_jobs_.end()) return;
  const Job job = found->second;
  external_jobs_.erase(found);
  std::string why = error;
  if (why.empty() && job.write && Injected("corrupt")) job.entry->chunks[job.chunk].checksum ^= 1;
  if (why.empty() && !job.write && options_.checksum) {
    lock.unlock();
    if (Checksum(job.data, job.bytes) != job.entry->chunks[job.chunk].checksum) {
      why = "offload: what was read from " + disk_->folder(job.entry->chunks[job.chunk]) + " is not what was written there (its checksum "
            "differs): the file or the drive is damaged";
    }
    lock.lock();
  }
  EndJob(job, why);
}

// ------------------------------------------------------------------------------------------------ calls of a step

uint64_t Store::StoreOnCpu(int64_t run_id, int64_t site, const void* data, int64_t bytes) {
  Lock lock(mutex_);
  RequireOpen();
  const Stopwatch stopwatch(&stats_.launch_seconds);
  const RunPtr run = FindRun(run_id, -1, /*create=*/true);
  const EntryPtr entry = Add(run, site, bytes);
  try {
    if (Injected("store")) throw std::runtime_error("offload: storing failed: injected fault");
    Slot* slot = TakeSlot(lock, entry, /*pinned=*/false, /*may_wait=*/true, kAnySerial);
    if (!entry->live) {
      ReleaseSlot(slot);
      throw std::runtime_error("offload: another tensor of this step could not be stored");
    }
    entry->slot = slot;
    slot->serial = entry->serial;
    ++slot->pins;
    ++active_;
    lock.unlock();
    Copy(slot->data, data, bytes);
    if (const int64_t rest = RoundUp(bytes, kPage) - bytes) {
      std::memset(static_cast<char*>(slot->data) + bytes, 0, rest);  // checksums cover whole pages
    }
    lock.lock();
    --active_;
    --slot->pins;
    changed_.notify_all();
    if (!entry->live) throw std::runtime_error("offload: another tensor of this step could not be stored");
    if (ShouldWrite(run, *entry)) QueueWrite(entry);
  } catch (...) {
    FailRun(run);
    throw;
  }
  return Handle(entry->serial);
}

void Store::FetchOnCpu(int64_t run_id, int64_t site, uint64_t handle, void* data, int64_t bytes) {
  Lock lock(mutex_);
  RequireOpen();
  const Stopwatch stopwatch(&stats_.launch_seconds);
  const EntryPtr entry = Find(handle, site, bytes, /*device=*/-1);
  const RunPtr run = entry->run.lock();
  try {
    if (Injected("fetch")) throw std::runtime_error("offload: fetching failed: injected fault");
    if (run) {
      run->last_used = Seconds();
      run->fetched |= run->id == run_id;
      run->reading_back = true;
    }
    ReadAhead(run, lock);
    AwaitHost(lock, entry, /*pinned=*/false);
    Slot* slot = entry->slot;
    ++slot->pins;
    ++active_;
    lock.unlock();
    Copy(data, slot->data, bytes);
    lock.lock();
    --active_;
    --slot->pins;
    stats_.demand_bytes += bytes;
    stats_.fetched_bytes += bytes;
    ++stats_.fetched_count;
    Fetched(entry, run);
    ReadAhead(run, lock);
  } catch (...) {
    FailRun(run);
    throw;
  }
}

void Store::StoreOnCuda(int64_t run_id, int device, Stream stream, int64_t site, int64_t ring_bytes,
                        DevicePointer data, int64_t bytes, DevicePointer handle) {
  Lock lock(mutex_);
  RequireOpen();
  const Stopwatch stopwatch(&stats_.launch_seconds);
  CheckDevices();
  Ring* const ring = &RingOf(device, stream);
  const ContextScope scope(ring->context());
  const RunPtr run = FindRun(run_id, device, /*create=*/true);
  const EntryPtr entry = Add(run, site, bytes);
  try {
    if (Injected("store")) throw std::runtime_error("offload: storing failed: injected fault");
    ring->Reserve(options_.device_bytes >= 0 ? options_.device_bytes : ring_bytes, stream);
    ring->Push(lock, run, entry, data, stream);
    if (!entry->live) throw std::runtime_error("offload: another tensor of this step could not be stored");
    ring->SetHandle(handle, Handle(entry->serial), stream);
    if (ShouldWrite(run, *entry)) QueueWrite(entry);
  } catch (...) {
    FailRun(run);
    throw;
  }
}

void Store::FetchOnCuda(int64_t run_id, int device, Stream stream, int64_t site, DevicePointer handle,
                        DevicePointer data, int64_t bytes) {
  Lock lock(mutex_);
  RequireOpen();
  const Stopwatch stopwatch(&stats_.launch_seconds);
  CheckDevices();
  Ring* const ring = &RingOf(device, stream);
  const ContextScope scope(ring->context());
  const RunPtr own = FindRun(run_id, device, /*create=*/false);
  RunPtr run = own;
  try {
    if (Injected("fetch")) throw std::runtime_error("offload: fetching failed: injected fault");
    uint64_t foreseen = 0;
    if (own) {
      const std::vector<uint64_t>& stored = own->by_site[site];
      if (!stored.empty()) foreseen = Handle(stored.back());
    }
    const int mode = prediction_;
    const bool predict = foreseen != 0 && (mode == 2 || (mode == 0 && sites_[site].order == Site::Order::kForeseen));
    uint64_t value = foreseen;
    if (!predict) {
      ++stats_.value_reads;
      value = ring->ReadHandle(lock, handle, stream);
      if (own && value != foreseen) {
        own->surprising.insert(site);
        sites_[site].order = Site::Order::kSurprising;
      }
    }
    const EntryPtr entry = Find(value, site, bytes, device);
    run = entry->run.lock();
    if (run) {
      run->last_used = Seconds();
      run->fetched |= run == own;
      run->reading_back = true;
    }
    ReadAhead(run, lock);
    ring->Pop(lock, run, entry, data, stream);
    ring->Leave(entry);
    stats_.fetched_bytes += bytes;
    ++stats_.fetched_count;
    Fetched(entry, run);
    ReadAhead(run, lock);
    ring->Prefetch(run);
    if (predict) {
      ring->CheckHandle(handle, value, data, bytes, stream);
    } else if (own && own->by_site[site].empty() && own->surprising.count(site) == 0 &&
               sites_[site].order == Site::Order::kUnknown) {
      sites_[site].order = Site::Order::kForeseen;  // a whole run came so: from now on nobody waits for handles
    }
  } catch (...) {
    FailRun(run);
    throw;
  }
}

}  // namespace dejax::offload
