#include "activations/entries/io_queue.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <system_error>

#include "driver/thread_name.h"

namespace dejax::offload {
namespace {

constexpr Result kNotReady = 600;  // CUDA_ERROR_NOT_READY
constexpr auto kPoll = std::chrono::microseconds(100);

std::string Damaged(const std::string& file) {
  return "offload: what was read from " + file +
         " is not what was written there (its checksum differs): the file or the drive is damaged";
}

// cuEventSynchronize alone would keep a core busy for each waiting thread, and cores are needed to read and write.
// (Events made for a blocking wait cost the launch thread a millisecond a call.)
void Await(const Event& event) {
  while (GetCalls().event_query(event.get()) == kNotReady) std::this_thread::sleep_for(kPoll);
  Check(GetCalls().event_synchronize(event.get()), "cuEventSynchronize");
}

}  // namespace

IoQueue::IoQueue(const Options& options, Monitor* monitor, HostMemory* memory, Stats* stats,
                 std::function<void(const RunPtr&)> on_read)
    : options_(options), monitor_(monitor), memory_(memory), stats_(stats), on_read_(std::move(on_read)) {
  if (options_.folders.empty()) return;
  disk_ = std::make_unique<Disk>(options_.folders, options_.disk_bytes, options_.external);
}

void IoQueue::StartThreads() {
  if (!disk_ || options_.external) return;
  try {
    for (int i = 0; i < options_.num_threads; ++i) {
      threads_.emplace_back([this] {
        NameThisThread("dejax-offload");
        Work();
      });
    }
  } catch (const std::system_error& error) {
    {
      const Lock lock(monitor_->mutex);
      monitor_->closing = true;
      ready_.notify_all();
    }
    Join();
    throw std::runtime_error("offload: I/O thread " + std::to_string(threads_.size() + 1) + " of " +
                             std::to_string(options_.num_threads) + " cannot be started (" + error.what() +
                             "); give a smaller io_threads, or raise the limits of the process");
  }
}

void IoQueue::QueueWrite(const EntryPtr& entry) {
  const int64_t bytes = RoundUp(entry->bytes, kPage);
  const int64_t count = (bytes + options_.chunk_bytes - 1) / options_.chunk_bytes;
  try {
    for (int64_t i = 0; i < count; ++i) {
      entry->chunks.push_back(disk_->Allocate(std::min(options_.chunk_bytes, bytes - i * options_.chunk_bytes)));
    }
  } catch (const std::runtime_error& error) {
    // The tensor is safe in host memory. Whoever needs its slot tries again, or reports this error.
    FreeChunks(entry.get());
    last_error_ = error.what();
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
  ready_.notify_all();
}

void IoQueue::QueueRead(const EntryPtr& entry, Slot* slot) {
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
  ready_.notify_all();
}

void IoQueue::Discard(Entry* entry) {
  if (entry->disk == Entry::Disk::kQueued && entry->pending > 0) stats_->cancelled_bytes += entry->bytes;
  if (entry->pending == 0 && disk_) FreeChunks(entry);
}

void IoQueue::FreeChunks(Entry* entry) {
  for (const Chunk& chunk : entry->chunks) disk_->Free(chunk);
  entry->chunks.clear();
}

void IoQueue::BeginClose() {
  reads_.clear();
  writes_.clear();
  ready_.notify_all();
}

void IoQueue::Join() {
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

std::unique_ptr<Disk> IoQueue::TakeDisk() {
  external_.clear();
  return std::move(disk_);
}

// Reads first: a fetch may be waiting.
bool IoQueue::Pop(Job* job) {
  while (!reads_.empty() || !writes_.empty()) {
    auto& queue = reads_.empty() ? writes_ : reads_;
    *job = std::move(queue.front());
    queue.pop_front();
    job->id = next_id_++;
    job->context = context_;
    job->interceptor = interceptor_;
    ++running_;
    if (job->entry->live) {
      const Chunk& chunk = job->entry->chunks[job->chunk];
      job->path = chunk.path;
      job->index = chunk.offset;
      job->data = static_cast<char*>(job->slot->data) + job->chunk * options_.chunk_bytes;
      job->bytes = chunk.bytes;
      return true;
    }
    End(*job, "");  // fetched or dropped before its turn: the write is cancelled
  }
  return false;
}

// What precedes the input or output itself, without the mutex.
void IoQueue::Begin(Job* job) {
  const Event events[] = {job->write ? job->entry->copied_out : job->slot->last_read,
                          job->write ? nullptr : job->slot->last_write};
  for (const Event& event : events) {
    if (!event) continue;
    const ContextScope scope(job->context);
    Await(event);
  }
  if (job->write && options_.checksum) {
    job->entry->chunks[job->chunk].checksum = Checksum(job->data, job->bytes);
  }
  if (job->interceptor) job->interceptor->Before(job->write ? Operation::kWrite : Operation::kRead);
}

void IoQueue::End(const Job& job, const std::string& error) {
  Entry& entry = *job.entry;
  --running_;
  --job.slot->pins;
  --entry.pending;
  if (!error.empty()) {
    if (job.write) {
      entry.disk = Entry::Disk::kFailed;
      last_error_ = error;
    } else {
      entry.error = error;
    }
  } else if (job.bytes > 0) {
    (job.write ? stats_->written_bytes : stats_->read_bytes) += job.bytes;
  }
  if (entry.pending == 0) {
    if (!entry.live || entry.disk == Entry::Disk::kFailed) {
      FreeChunks(&entry);
    } else {
      entry.disk = Entry::Disk::kWritten;
      if (entry.slot != nullptr && entry.error.empty()) memory_->AddVictim(job.entry);
    }
    entry.reading = false;
    if (!entry.error.empty() && entry.slot != nullptr && entry.live) {
      memory_->Release(entry.slot);
      entry.slot->serial = 0;
      entry.slot = nullptr;
    }
    if (!job.write && entry.error.empty()) on_read_(entry.run.lock());
  }
  monitor_->changed.notify_all();
}

// Without the mutex. Returns what went wrong.
std::string IoQueue::Do(Job* job) {
  try {
    Begin(job);
    Chunk& chunk = job->entry->chunks[job->chunk];
    if (job->write) {
      disk_->Write(chunk, job->data);
      if (job->interceptor) job->interceptor->Written(&chunk);
    } else {
      disk_->Read(chunk, job->data);
      if (options_.checksum && Checksum(job->data, job->bytes) != chunk.checksum) return Damaged(disk_->Name(chunk));
    }
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

void IoQueue::Work() {
  Lock lock(monitor_->mutex);
  while (true) {
    Job job;
    if (Pop(&job)) {
      lock.unlock();
      const std::string error = Do(&job);
      lock.lock();
      End(job, error);
      continue;
    }
    if (monitor_->closing) return;
    ready_.wait(lock);
  }
}

Job IoQueue::Next(double seconds, bool* closed) {
  Lock lock(monitor_->mutex);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  Job job;
  while (!Pop(&job)) {
    *closed = monitor_->closing;
    if (*closed || ready_.wait_until(lock, deadline) == std::cv_status::timeout) return Job();
  }
  external_[job.id] = job;
  std::string error;
  {
    const Unlocked unlocked(monitor_, lock);
    try {
      Begin(&job);
    } catch (const std::exception& caught) {
      error = caught.what();
    }
  }
  if (error.empty()) return job;
  lock.unlock();
  Finish(job.id, error);
  return Job();
}

void IoQueue::Finish(int64_t id, const std::string& error) {
  Lock lock(monitor_->mutex);
  const auto found = external_.find(id);
  if (found == external_.end()) return;
  const Job job = found->second;
  external_.erase(found);
  std::string why = error;
  Chunk& chunk = job.entry->chunks[job.chunk];
  if (why.empty() && job.write && job.interceptor) job.interceptor->Written(&chunk);
  if (why.empty() && !job.write && options_.checksum) {
    const Unlocked unlocked(monitor_, lock);
    if (Checksum(job.data, job.bytes) != chunk.checksum) why = Damaged(disk_->Name(chunk));
  }
  End(job, why);
}

}  // namespace dejax::offload
