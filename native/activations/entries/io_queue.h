// The disk tier: entries that go to files and come back, and where that leaves them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "activations/entries/entry.h"
#include "activations/entries/host_slots.h"
#include "blocks/block_queue.h"

namespace dejax::offload {

// All calls hold the store's mutex, but for those of engines and threads.
class IoQueue {
 public:
  // on_read: called after an entry was read whole, with the mutex held.
  IoQueue(const StoreOptions& options, Monitor* monitor, HostSlots* memory, Counters* stats,
          std::function<void(const RunPtr&)> on_read);

  // Without the mutex. Throws std::runtime_error, after it ended the threads that it had started.
  void StartThreads();
  bool has_disk() const { return disk_ != nullptr; }
  bool idle() const { return queue_.idle(); }
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
  void Intercept(std::shared_ptr<Interceptor> interceptor) {
    if (disk_) disk_->Intercept(std::move(interceptor));
  }

  // Without the mutex: gives room at the end of files back to the file system.
  void Trim() { disk_->Trim(); }
  void BeginClose();
  // Without the mutex, after BeginClose.
  void Join() { queue_.Join(); }
  std::unique_ptr<Disk> TakeDisk() { return std::move(disk_); }

  // External engines, without the mutex: see BlockQueue.
  ChunkJob Next(double seconds, bool* closed) { return queue_.Next(seconds, closed); }
  void Finish(int64_t id, const std::string& error) { queue_.Finish(id, error); }

 private:
  struct EntryIo;

  void Queue(const EntryPtr& entry, Slot* slot, bool write);
  void End(const EntryPtr& entry, Slot* slot, bool write, int64_t done, const std::string& error);

  const StoreOptions options_;
  HostSlots* const memory_;
  Counters* const stats_;
  const std::function<void(const RunPtr&)> on_read_;
  std::unique_ptr<Disk> disk_;
  BlockQueue queue_;
  std::string last_error_;
  Context context_ = nullptr;
};

}  // namespace dejax::offload
