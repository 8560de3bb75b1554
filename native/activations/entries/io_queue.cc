#include "activations/entries/io_queue.h"

#include <stdexcept>

namespace dejax::offload {

struct IoQueue::EntryIo : BlockIo {
  bool IsWanted() const override { return entry->live; }
  void ChunkEnded(size_t, int64_t done, const std::string& error) override { queue->End(entry, slot, write, done, error); }

  IoQueue* queue = nullptr;
  EntryPtr entry;
  Slot* slot = nullptr;
};

IoQueue::IoQueue(const StoreOptions& options, Monitor* monitor, HostSlots* memory, Counters* stats,
                 std::function<void(const RunPtr&)> on_read)
    : options_(options), memory_(memory), stats_(stats), on_read_(std::move(on_read)),
      disk_(options.folders.empty() ? nullptr : std::make_unique<Disk>(options, options.external)),
      queue_(options, disk_.get(), monitor, /*most_writes=*/options.num_threads) {}

void IoQueue::StartThreads() {
  if (disk_ && !options_.external) queue_.StartThreads("dejax-offload");
}

void IoQueue::QueueWrite(const EntryPtr& entry) {
  try {
    entry->chunks = disk_->Allocate(entry->bytes);
  } catch (const std::runtime_error& error) {
    // The tensor is safe in host memory. Whoever needs its slot tries again, or reports this error.
    last_error_ = error.what();
    return;
  }
  entry->disk = Entry::Disk::kQueued;
  Queue(entry, entry->slot, /*write=*/true);
}

void IoQueue::QueueRead(const EntryPtr& entry, Slot* slot) {
  entry->slot = slot;
  slot->serial = entry->serial;
  entry->reading = true;
  Queue(entry, slot, /*write=*/false);
}

void IoQueue::Queue(const EntryPtr& entry, Slot* slot, bool write) {
  auto io = std::make_shared<EntryIo>();
  io->queue = this;
  io->entry = entry;
  io->slot = slot;
  io->write = write;
  io->chunks = &entry->chunks;
  io->data = static_cast<char*>(slot->data);
  io->bytes = entry->bytes;
  io->after[0] = write ? entry->copied_out : slot->last_read;
  io->after[1] = write ? nullptr : slot->last_write;
  io->context = context_;
  entry->pending += static_cast<int>(entry->chunks.size());
  slot->pins += static_cast<int>(entry->chunks.size());
  queue_.Push(io);
}

void IoQueue::Discard(Entry* entry) {
  if (entry->disk == Entry::Disk::kQueued && entry->pending > 0) stats_->cancelled_bytes += entry->bytes;
  if (entry->pending == 0 && disk_) disk_->Free(&entry->chunks);
}

void IoQueue::BeginClose() {
  queue_.Clear();
  queue_.BeginClose();
}

// A chunk has ended.
void IoQueue::End(const EntryPtr& pointer, Slot* slot, bool write, int64_t done, const std::string& error) {
  Entry& entry = *pointer;
  --slot->pins;
  --entry.pending;
  if (error.empty()) {
    (write ? stats_->written_bytes : stats_->read_bytes) += done;
  } else if (write) {
    entry.disk = Entry::Disk::kFailed;
    last_error_ = error;
  } else {
    entry.error = error;
  }
  if (entry.pending > 0) return;
  if (!entry.live || entry.disk == Entry::Disk::kFailed) {
    disk_->Free(&entry.chunks);
  } else {
    entry.disk = Entry::Disk::kWritten;
    if (entry.slot != nullptr && entry.error.empty()) memory_->AddVictim(pointer);
  }
  entry.reading = false;
  if (!entry.error.empty() && entry.slot != nullptr && entry.live) {
    memory_->Release(entry.slot);
    entry.slot->serial = 0;
    entry.slot = nullptr;
  }
  if (!write && entry.error.empty()) on_read_(entry.run.lock());
}

}  // namespace dejax::offload
