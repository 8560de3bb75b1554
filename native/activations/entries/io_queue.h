// The disk tier's jobs: chunks to write and to read, and the threads that do it. With an external engine other threads
// ask for jobs and report their end.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "activations/entries/entry.h"
#include "activations/entries/host_memory.h"
#include "activations/entries/monitor.h"
#include "blocks/disk.h"
#include "blocks/interceptor.h"

namespace dejax::offload {

// One chunk of an entry.
struct Job {
  bool write = false;
  EntryPtr entry;
  Slot* slot = nullptr;
  int chunk = 0;
  Context context = nullptr;  // of the events to wait for
  std::shared_ptr<Interceptor> interceptor;
  // For external engines.
  int64_t id = 0;
  int path = 0;
  int64_t index = 0;
  void* data = nullptr;
  int64_t bytes = 0;
};

// All calls hold the store's mutex, but for those of engines and threads.
class IoQueue {
 public:
  // on_read: called after an entry was read whole, with the mutex held.
  IoQueue(const Options& options, Monitor* monitor, HostMemory* memory, Stats* stats,
          std::function<void(const RunPtr&)> on_read);

  // Without the mutex. Throws std::runtime_error, after it ended the threads that it had started.
  void StartThreads();
  bool has_disk() const { return disk_ != nullptr; }
  bool idle() const {
    return running_ == 0 && writes_.empty() && reads_.empty() && external_.empty();
  }
  const std::string& last_error() const { return last_error_; }
  int64_t bytes_held() const { return disk_ ? disk_->bytes_held() : 0; }

  // Without room on disk the entry stays where it is, and last_error says why.
  void QueueWrite(const EntryPtr& entry);
  // Reads an entry that is on disk into a slot.
  void QueueRead(const EntryPtr& entry, Slot* slot);
  // The entry was fetched or dropped: frees its room on disk, once no job uses that.
  void Discard(Entry* entry);

  // The events of slots and entries belong to this context.
  void UseContext(Context context) { context_ = context; }
  void Intercept(std::shared_ptr<Interceptor> interceptor) { interceptor_ = std::move(interceptor); }

  // Without the mutex: gives room at the end of files back to the file system.
  void Trim() { disk_->Trim(); }
  void BeginClose();
  // Without the mutex, after BeginClose.
  void Join();
  std::unique_ptr<Disk> TakeDisk();

  // External engines, without the mutex: the next job, or id 0 where `seconds` went by or the store closes (then *closed).
  Job Next(double seconds, bool* closed);
  void Finish(int64_t id, const std::string& error);

 private:
  void Work();
  std::string Do(Job* job);
  bool Pop(Job* job);
  void Begin(Job* job);
  void End(const Job& job, const std::string& error);
  void FreeChunks(Entry* entry);

  const Options options_;
  Monitor* const monitor_;
  HostMemory* const memory_;
  Stats* const stats_;
  const std::function<void(const RunPtr&)> on_read_;
  std::unique_ptr<Disk> disk_;
  std::string last_error_;
  std::condition_variable ready_;
  std::deque<Job> writes_, reads_;
  std::unordered_map<int64_t, Job> external_;
  int64_t next_id_ = 1;
  int running_ = 0;
  Context context_ = nullptr;
  std::shared_ptr<Interceptor> interceptor_;
  std::vector<std::thread> threads_;
};

}  // namespace dejax::offload
