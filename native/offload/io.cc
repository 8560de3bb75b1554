// The disk tier's jobs: what is written and read when, and the threads that do it.
#include <algorithm>
#include <chrono>

#include "ring.h"
#include "store.h"
#include "store_internal.h"

namespace dejax::offload {
namespace {

constexpr Result kNotReady = 600;  // CUDA_ERROR_NOT_READY
constexpr auto kPoll = std::chrono::microseconds(100);

std::string Damaged(const std::string& file) {
  return "offload: what was read from " + file +
         " is not what was written there (its checksum differs): the file or the drive is damaged";
}

}  // namespace

bool Store::ShouldWrite(const RunPtr& run, const Entry& entry) const {
  if (!disk_ || entry.bytes == 0 || entry.slot == nullptr || entry.disk != Entry::Disk::kNone) return false;
  const auto site = sites_.find(entry.site);
  if (site != sites_.end() && site->second.uses == Site::Uses::kMany) return false;
  const auto expected = expected_.find(run->first_site);
  if (expected == expected_.end()) return true;  // the first run: what stays in memory is not known yet
  // The top of the stack that fits into memory is not written: it is fetched first. The very top stays in the ring.
  int64_t on_device = 0;
  const auto ring = rings_.find(run->device);
  if (ring != rings_.end() && entry.span > 0 && site != sites_.end() && site->second.uses == Site::Uses::kOne) {
    on_device = ring->second->capacity() / entry.span * entry.bytes;
  }
  return expected->second.bytes - run->live_bytes + entry.bytes - on_device >
         options_.host_bytes - options_.host_bytes / 8;
}

void Store::QueueWrite(const EntryPtr& entry) {
  const int64_t bytes = RoundUp(entry->bytes, kPage);
  const int64_t count = (bytes + options_.chunk_bytes - 1) / options_.chunk_bytes;
  try {
    for (int64_t i = 0; i < count; ++i) {
      entry->chunks.push_back(disk_->Allocate(std::min(options_.chunk_bytes, bytes - i * options_.chunk_bytes)));
    }
  } catch (const std::runtime_error& error) {
    // The tensor stays in host memory, where it is safe. Who needs its room later tries again, or gets this error.
    for (const Chunk& chunk : entry->chunks) disk_->Free(chunk);
    entry->chunks.clear();
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
  if (!disk_ || !run) return;
  const auto only_on_disk = [](const EntryPtr& entry) {
    return entry->live && entry->slot == nullptr && !entry->in_ring && entry->disk == Entry::Disk::kWritten &&
           entry->error.empty();
  };
  while (!closing_) {
    const auto next = std::find_if(run->stack.rbegin(), run->stack.rend(), only_on_disk);
    if (next == run->stack.rend()) return;
    const EntryPtr entry = *next;
    Slot* slot = TryTakeSlot(lock, entry->bytes, run->device >= 0, entry->serial);
    if (slot == nullptr) return;
    if (closing_ || !only_on_disk(entry)) {  // while the mutex was free
      ReleaseSlot(slot);
      continue;
    }
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
      Slot* slot = TakeSlot(lock, entry, pinned);
      if (entry->slot != nullptr || !entry->live) {  // someone else was quicker while this waited
        ReleaseSlot(slot);
        continue;
      }
      StartRead(entry, slot);
    }
    ++waiting_;  // not active: two that wait for room must not take each other for work under way
    changed_.wait_for(lock, std::chrono::milliseconds(200));
    --waiting_;
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
      job->path = chunk.path;
      job->index = chunk.offset;
      job->data = static_cast<char*>(job->slot->data) + offset;
      job->bytes = chunk.bytes;
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
    // Not cuEventSynchronize, which takes a core for each thread that waits: reading and writing need them. (Events that
    // make it sleep cost the launch thread a millisecond a call.)
    while (GetCalls().event_query(event.get()) == kNotReady) std::this_thread::sleep_for(kPoll);
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
    if (!job.write && entry.error.empty()) Prefetch(entry.run.lock());
  }
  changed_.notify_all();
}

// What was read goes on to the device's ring now, as far as there is room: the launch thread may be far ahead, and not
// come by before the GPU needs it.
void Store::Prefetch(const RunPtr& run) {
  const auto ring = run && !closing_ ? rings_.find(run->device) : rings_.end();
  if (ring == rings_.end()) return;
  try {
    const ContextScope scope(ring->second->context());
    ring->second->Prefetch(run);
  } catch (const std::runtime_error&) {
    // The fetch will meet the same error, and can say so.
  }
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
          disk_->Write(chunk, job.data);
          if (corrupt) chunk.checksum ^= 1;
        } else {
          disk_->Read(chunk, job.data);
          if (options_.checksum && Checksum(job.data, job.bytes) != chunk.checksum) {
            throw std::runtime_error(Damaged(disk_->Name(chunk)));
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
  std::string error;
  {
    const Unlocked unlocked(this, lock);
    try {
      BeginJob(&job);
    } catch (const std::exception& caught) {
      error = caught.what();
    }
  }
  if (error.empty()) return job;
  lock.unlock();
  FinishJob(job.id, error);
  return Job();
}

void Store::FinishJob(int64_t id, const std::string& error) {
  Lock lock(mutex_);
  const auto found = external_jobs_.find(id);
  if (found == external_jobs_.end()) return;
  const Job job = found->second;
  external_jobs_.erase(found);
  std::string why = error;
  const std::string kind = job.write ? "write" : "read";
  if (why.empty() && Injected(kind)) why = "offload: a " + kind + " failed: injected fault";
  if (why.empty() && job.write && Injected("corrupt")) job.entry->chunks[job.chunk].checksum ^= 1;
  if (why.empty() && !job.write && options_.checksum) {
    const Chunk& chunk = job.entry->chunks[job.chunk];
    const Unlocked unlocked(this, lock);
    if (Checksum(job.data, job.bytes) != chunk.checksum) why = Damaged(disk_->Name(chunk));
  }
  EndJob(job, why);
}

}  // namespace dejax::offload
