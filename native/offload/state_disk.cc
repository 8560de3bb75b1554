#include "state_disk.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "../thread_name.h"

namespace dejax::offload {
namespace {

int64_t WholePages(int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

struct OpenDisks {
  std::mutex mutex;
  std::map<int64_t, std::weak_ptr<StateDisk>> all;
  int64_t next = 1;
};

OpenDisks& Disks() {
  static auto* const disks = new OpenDisks;  // never destroyed: threads may outlive static objects
  return *disks;
}

int64_t NewNumber() {
  std::lock_guard<std::mutex> lock(Disks().mutex);
  return Disks().next++;
}

[[noreturn]] void Stale(int64_t version, int64_t latest) {
  throw std::runtime_error("offload: `state` must be the newest state on disk, got version " + std::to_string(version) +
                           " of an array whose files hold version " + std::to_string(latest) +
                           "; a step overwrites the state before the last one: go on from the newest state, or read an "
                           "older one (np.asarray) before the next step");
}

}  // namespace

StateBuffers::~StateBuffers() {
  for (const StateBuffer& buffer : free_) Free(buffer);
}

std::shared_ptr<StateBuffer> StateBuffers::Take(int64_t bytes, bool write, int64_t cap, bool pinned) {
  bytes = std::max(kPage, WholePages(bytes));
  const auto fits = [&](const StateBuffer& b) {
    return b.pinned == pinned && b.capacity >= bytes && b.capacity <= bytes + bytes / 2;
  };
  std::list<StateBuffer> dropped;
  StateBuffer found;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (write) {
      returned_.wait(lock, [&] { return writing_ == 0 || writing_ + bytes <= cap; });
      writing_ += bytes;
    }
    const auto at = std::find_if(free_.begin(), free_.end(), fits);
    if (at != free_.end()) {
      found = *at;
      free_.erase(at);
      used_ += found.capacity;
    } else {
      // Free buffers of other sizes stay for later layers: pinned memory takes long to make.
      while (!free_.empty() && held_ + bytes > 2 * std::max(most_used_, used_ + bytes)) {
        held_ -= free_.front().capacity;
        dropped.splice(dropped.end(), free_, free_.begin());
      }
      held_ += bytes;
      used_ += bytes;
      peak_ = std::max(peak_, held_);
    }
    most_used_ = std::max(most_used_, used_);
  }
  for (const StateBuffer& buffer : dropped) Free(buffer);
  if (found.data == nullptr) {
    found.capacity = bytes;
    found.pinned = pinned;
    void* data = nullptr;
    const bool failed = pinned ? GetCalls().host_alloc(&data, static_cast<size_t>(bytes), /*portable | device map*/ 3) != 0
                               : posix_memalign(&data, kPage, static_cast<size_t>(bytes)) != 0;
    if (failed) {
      std::lock_guard<std::mutex> lock(mutex_);
      held_ -= bytes;
      used_ -= bytes;
      if (write) writing_ -= bytes;
      returned_.notify_all();
      throw std::runtime_error("offload: no host memory is left for " + std::to_string(bytes) +
                               " bytes of state on their way to or from the drive; give a smaller `ahead`");
    }
    found.data = static_cast<char*>(data);
  }
  auto self = shared_from_this();
  return std::shared_ptr<StateBuffer>(new StateBuffer(found), [self, written = write ? bytes : 0](StateBuffer* buffer) {
    self->GiveBack(*buffer, written);
    delete buffer;
  });
}

void StateBuffers::GiveBack(const StateBuffer& buffer, int64_t written) {
  std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(buffer);
  used_ -= buffer.capacity;
  writing_ -= written;
  returned_.notify_all();
}

void StateBuffers::Free(const StateBuffer& buffer) {
  if (!buffer.pinned) {
    std::free(buffer.data);
    return;
  }
  if (buffer.busy) GetCalls().event_synchronize(buffer.busy.get());
  GetCalls().host_free(buffer.data);
}

int64_t StateBuffers::peak_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return peak_;
}

std::shared_ptr<StateDisk> StateDisk::Open(const Options& options) {
  auto disk = std::make_shared<StateDisk>(options);
  try {
    for (int i = 0; i < std::max(1, options.num_threads); ++i) {
      disk->threads_.emplace_back([raw = disk.get()] { raw->Work(); });
    }
  } catch (const std::exception& error) {
    disk->Close();
    throw std::runtime_error(std::string("offload: no I/O thread could be made: ") + error.what());
  }
  std::lock_guard<std::mutex> lock(Disks().mutex);
  Disks().all[disk->number_] = disk;
  return disk;
}

StateDisk::StateDisk(const Options& options)
    : options_(options), number_(NewNumber()),
      disk_(std::make_unique<Disk>(options.folders, options.chunk_bytes, options.disk_bytes, options.direct,
                                   /*external*/ false)) {}

std::shared_ptr<StateDisk> StateDisk::Find(int64_t number) {
  std::lock_guard<std::mutex> lock(Disks().mutex);
  const auto found = Disks().all.find(number);
  if (found != Disks().all.end()) {
    if (auto disk = found->second.lock()) return disk;
  }
  throw std::runtime_error("offload: `state` must lie in an open StateStore, got a state whose store is closed, or of "
                           "another process; restore it from a checkpoint");
}

void StateDisk::Close() {
  {
    std::lock_guard<std::mutex> lock(Disks().mutex);
    Disks().all.erase(number_);
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
    ready_.notify_all();
    done_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();  // after all jobs: the GPU may still write to their memory
  threads_.clear();
  std::lock_guard<std::mutex> lock(mutex_);
  arrays_.clear();
  disk_.reset();
}

std::shared_ptr<StateArray> StateDisk::ArrayOf(int64_t array) const {
  if (closing_) throw std::runtime_error("offload: the StateStore is closed");
  const auto found = arrays_.find(array);
  if (found == arrays_.end()) {
    throw std::runtime_error("offload: `state` must have arrays of its StateStore, got one that was removed");
  }
  return found->second;
}

int64_t StateDisk::Create(int64_t bytes, int64_t unit_bytes) {
  auto array = std::make_shared<StateArray>();
  array->bytes = bytes;
  array->unit_bytes = unit_bytes;
  array->units.resize(static_cast<size_t>((bytes + unit_bytes - 1) / unit_bytes));
  std::lock_guard<std::mutex> lock(mutex_);
  if (closing_) throw std::runtime_error("offload: the StateStore is closed");
  try {
    for (size_t i = 0; i < array->units.size(); ++i) {
      const int64_t size = std::min(unit_bytes, bytes - static_cast<int64_t>(i) * unit_bytes);
      for (std::vector<Chunk>& chunks : array->units[i].chunks) {
        for (int64_t at = 0; at < WholePages(size); at += options_.chunk_bytes) {
          chunks.push_back(disk_->Allocate(std::min(options_.chunk_bytes, WholePages(size) - at)));
        }
      }
    }
  } catch (...) {
    for (const StateArray::Unit& unit : array->units) {
      for (const std::vector<Chunk>& chunks : unit.chunks) {
        for (const Chunk& chunk : chunks) disk_->Free(chunk);
      }
    }
    throw;
  }
  arrays_[next_] = array;
  return next_++;
}

void StateDisk::Remove(int64_t number) {
  std::unique_lock<std::mutex> lock(mutex_);
  const std::shared_ptr<StateArray> array = ArrayOf(number);
  arrays_.erase(number);
  array->removed = true;
  done_.wait(lock, [&] { return reads_.empty() && writes_.empty() && running_ == 0; });
  if (disk_ == nullptr) return;
  for (const StateArray::Unit& unit : array->units) {
    for (const std::vector<Chunk>& chunks : unit.chunks) {
      for (const Chunk& chunk : chunks) disk_->Free(chunk);
    }
  }
  disk_->Trim();
}

std::vector<StateIoPtr> StateDisk::Units(int64_t number, int64_t version, int64_t offset, int64_t bytes,
                                         bool write) const {
  const std::shared_ptr<StateArray> array = ArrayOf(number);
  if (offset < 0 || bytes <= 0 || offset + bytes > array->bytes || offset % array->unit_bytes != 0 ||
      ((offset + bytes) % array->unit_bytes != 0 && offset + bytes != array->bytes)) {
    throw std::runtime_error("offload: `state` must be cut as its files are, got bytes " + std::to_string(offset) +
                             " to " + std::to_string(offset + bytes) + " of an array in units of " +
                             std::to_string(array->unit_bytes) + "; make the state with this optimizer's init");
  }
  std::vector<StateIoPtr> found;
  for (int64_t at = offset; at < offset + bytes; at += array->unit_bytes) {
    auto io = std::make_shared<StateIo>();
    io->write = write;
    io->array = array;
    io->unit = static_cast<size_t>(at / array->unit_bytes);
    io->slot = static_cast<int>(version % 2);
    io->bytes = std::min(array->unit_bytes, array->bytes - at);
    io->left = array->units[io->unit].chunks[io->slot].size();
    found.push_back(io);
  }
  return found;
}

// Waits for the last write of a unit's slot. Throws where it failed.
void StateDisk::WaitForWrite(std::unique_lock<std::mutex>& lock, StateArray* array, size_t unit, int slot) {
  StateIoPtr& writing = array->units[unit].writing[slot];
  if (writing == nullptr) return;
  const StateIoPtr io = writing;
  done_.wait(lock, [&] { return io->done; });
  if (!io->error.empty()) throw std::runtime_error(io->error);
  if (writing == io) writing.reset();
}

void StateDisk::Check(int64_t number, int64_t version, int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  const std::shared_ptr<StateArray> array = ArrayOf(number);
  if (array->bytes != bytes) {
    throw std::runtime_error("offload: `state` must have arrays of the size that they were made with, got one of " +
                             std::to_string(array->bytes) + " bytes in place of " + std::to_string(bytes));
  }
  const bool whole = version == array->latest || (version == array->latest - 1 && array->started == array->latest);
  if (!whole) Stale(version, array->latest);
}

std::vector<StateIoPtr> StateDisk::Read(int64_t number, int64_t version, int64_t offset, int64_t bytes,
                                        Context context) {
  std::vector<StateIoPtr> found;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    found = Units(number, version, offset, bytes, false);
    StateArray* const array = found.front()->array.get();
    for (const StateIoPtr& io : found) WaitForWrite(lock, array, io->unit, io->slot);
    const bool whole = version == array->latest || (version == array->latest - 1 && array->started == array->latest);
    if (!whole) Stale(version, array->latest);
  }
  for (const StateIoPtr& io : found) {
    io->buffer = buffers_->Take(io->bytes, false, options_.host_bytes, context != nullptr);
    io->context = context;
    io->after = io->buffer->busy;
    Submit(io);
  }
  return found;
}

std::vector<StateIoPtr> StateDisk::Write(int64_t number, int64_t version, int64_t offset, int64_t bytes,
                                         int64_t host_bytes, Context context) {
  std::vector<StateIoPtr> found;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    found = Units(number, version, offset, bytes, true);
    StateArray* const array = found.front()->array.get();
    if (version != array->latest + 1) Stale(version - 1, array->latest);
    array->started = version;
    for (const StateIoPtr& io : found) {
      StateIoPtr& writing = array->units[io->unit].writing[io->slot];
      const StateIoPtr before = writing;  // of a step that failed, or of the version before the last one
      if (before != nullptr) done_.wait(lock, [&] { return before->done; });
      writing = io;
    }
  }
  const int64_t cap = options_.host_bytes >= 0 ? options_.host_bytes : host_bytes;
  for (const StateIoPtr& io : found) {
    try {
      io->buffer = buffers_->Take(io->bytes, true, cap, context != nullptr);
    } catch (const std::exception& error) {
      std::lock_guard<std::mutex> lock(mutex_);
      for (const StateIoPtr& other : found) {  // nobody waits for what will never be written
        other->error = error.what();
        other->done = true;
      }
      done_.notify_all();
      throw;
    }
    io->context = context;
  }
  return found;
}

void StateDisk::Submit(const StateIoPtr& io) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (closing_ || io->array->removed) {
    io->error = closing_ ? "offload: the StateStore is closed" : "offload: `state` was removed from its StateStore";
    io->done = true;
    done_.notify_all();
    throw std::runtime_error(io->error);
  }
  for (size_t i = 0; i < io->left; ++i) (io->write ? writes_ : reads_).push_back({io, i});
  ready_.notify_all();
}

bool StateDisk::IsDone(const StateIoPtr& io) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return io->done;
}

void StateDisk::WaitFor(const StateIoPtr& io) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto begin = std::chrono::steady_clock::now();
  done_.wait(lock, [&] { return io->done; });
  stats_.wait_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (!io->error.empty()) throw std::runtime_error(io->error);
}

void StateDisk::Commit(int64_t number, int64_t version) {
  std::lock_guard<std::mutex> lock(mutex_);
  const std::shared_ptr<StateArray> array = ArrayOf(number);
  if (version != array->latest + 1) Stale(version - 1, array->latest);
  array->latest = version;
}

void StateDisk::Put(int64_t number, int64_t offset, const void* data, int64_t bytes) {
  std::vector<StateIoPtr> found;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    found = Units(number, 0, offset, bytes, true);
  }
  const auto* from = static_cast<const char*>(data);
  for (const StateIoPtr& io : found) {
    io->buffer = buffers_->Take(io->bytes, true, 4 * options_.chunk_bytes, false);
    std::memcpy(io->buffer->data, from, static_cast<size_t>(io->bytes));
    from += io->bytes;
    Submit(io);
  }
  for (const StateIoPtr& io : found) WaitFor(io);
}

void StateDisk::Get(int64_t number, int64_t version, int64_t offset, void* data, int64_t bytes) {
  int64_t unit_bytes;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    unit_bytes = ArrayOf(number)->unit_bytes;
  }
  auto* to = static_cast<char*>(data);
  std::deque<StateIoPtr> ahead;
  for (int64_t at = offset; at < offset + bytes || !ahead.empty();) {
    if (at < offset + bytes && ahead.size() < 4) {
      const int64_t size = std::min(unit_bytes, offset + bytes - at);
      ahead.push_back(Read(number, version, at, size, nullptr).front());
      at += size;
      continue;
    }
    const StateIoPtr io = ahead.front();
    ahead.pop_front();
    WaitFor(io);
    std::memcpy(to, io->buffer->data, static_cast<size_t>(io->bytes));
    to += io->bytes;
  }
}

void StateDisk::Drain() {
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [&] { return reads_.empty() && writes_.empty() && running_ == 0; });
  for (const auto& [number, array] : arrays_) {
    for (size_t i = 0; i < array->units.size(); ++i) {
      WaitForWrite(lock, array.get(), i, static_cast<int>(array->latest % 2));
    }
  }
}

StateDisk::Stats StateDisk::GetStats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  Stats stats = stats_;
  stats.disk_bytes = disk_ ? disk_->bytes_held() : 0;
  stats.peak_host_bytes = buffers_->peak_bytes();
  return stats;
}

void StateDisk::Intercept(std::shared_ptr<Interceptor> interceptor) {
  std::lock_guard<std::mutex> lock(mutex_);
  interceptor_ = std::move(interceptor);
}

void StateDisk::Work() {
  NameThisThread("dejax-state");
  std::unique_lock<std::mutex> lock(mutex_);
  // Writes may wait for the GPU. Half of the threads are left to reads, which steps wait for.
  const int most_writes = std::max(1, options_.num_threads / 2);
  while (true) {
    ready_.wait(lock, [&] {
      return !reads_.empty() || (!writes_.empty() && writing_ < most_writes) || (closing_ && writes_.empty());
    });
    if (reads_.empty() && writes_.empty()) return;
    std::deque<Job>& queue = reads_.empty() ? writes_ : reads_;
    Job job = queue.front();
    queue.pop_front();
    ++running_;
    writing_ += job.io->write;
    lock.unlock();
    const std::string error = Do(job);
    std::shared_ptr<StateBuffer> finished;
    lock.lock();
    --running_;
    writing_ -= job.io->write;
    if (job.io->write) ready_.notify_all();
    (job.io->write ? stats_.written_bytes : stats_.read_bytes) +=
        job.io->array->units[job.io->unit].chunks[job.io->slot][job.chunk].bytes;
    if (!error.empty()) job.io->error = error;
    if (--job.io->left == 0) {
      job.io->done = true;
      if (job.io->write) finished = std::move(job.io->buffer);
    }
    done_.notify_all();
    lock.unlock();
    finished.reset();
    job.io.reset();
    lock.lock();
  }
}

std::string StateDisk::Do(const Job& job) {
  try {
    StateIo& io = *job.io;
    if (io.after) {
      const ContextScope scope(io.context);
      dejax::offload::Check(GetCalls().event_synchronize(io.after.get()), "cuEventSynchronize");
    }
    std::shared_ptr<Interceptor> interceptor;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      interceptor = interceptor_;
    }
    if (interceptor) interceptor->Before(io.write ? Operation::kWrite : Operation::kRead);
    Chunk& chunk = io.array->units[io.unit].chunks[io.slot][job.chunk];
    char* const data = io.buffer->data + static_cast<int64_t>(job.chunk) * options_.chunk_bytes;
    if (!io.write) {
      disk_->Read(chunk, data);
      if (options_.checksum && Checksum(data, chunk.bytes) != chunk.checksum) {
        throw std::runtime_error("offload: " + disk_->Name(chunk) +
                                 " is damaged: it does not hold what was written to it; restore from a checkpoint");
      }
      return "";
    }
    const int64_t begin = static_cast<int64_t>(job.chunk) * options_.chunk_bytes;
    if (begin + chunk.bytes > io.bytes) std::memset(data + (io.bytes - begin), 0, begin + chunk.bytes - io.bytes);
    if (options_.checksum) chunk.checksum = Checksum(data, chunk.bytes);
    disk_->Write(chunk, data);
    if (interceptor) interceptor->Written(&chunk);
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace dejax::offload
