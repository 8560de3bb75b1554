// Blocks of host memory on their way to a drive and back: queues, threads, checksums. What a block is, and who waits for
// it, is its owner's affair: tensors of activations, units of training state, rows of tables.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "blocks/block_source.h"
#include "blocks/disk.h"
#include "blocks/interceptor.h"
#include "blocks/monitor.h"
#include "blocks/read_ring.h"
#include "driver/cuda_calls.h"

namespace dejax::offload {

// A block that is written or read, chunk by chunk. Its owner hears of the end of each chunk, with the mutex held.
struct BlockIo {
  virtual ~BlockIo() = default;
  // With the mutex. Where nobody needs the block any more, its chunks end before they begin.
  virtual bool IsWanted() const { return true; }
  // Where a chunk of at most `most` bytes lies in memory; null: in memory of the thread that reads it.
  virtual char* MemoryOf(size_t chunk, int64_t most) {
    return data == nullptr ? nullptr : data + static_cast<int64_t>(chunk) * most;
  }
  // Without the mutex: a chunk was read into `data`. May throw std::runtime_error: then the read has failed.
  virtual void Arrived(size_t, const char*) {}
  // done: bytes that were written or read; 0 where the chunk was not wanted. error: why it failed; empty where it did not.
  virtual void ChunkEnded(size_t chunk, int64_t done, const std::string& error) = 0;

  bool write = false;
  std::vector<Chunk>* chunks = nullptr;
  char* data = nullptr;       // memory of whole pages for all chunks, one after the other; null: each has its own
  int64_t bytes = 0;          // the block's own; a write fills the last page with zeros
  Event after[2];             // the GPU's work that must end first; null: none
  Context context = nullptr;  // of these events
};
using BlockIoPtr = std::shared_ptr<BlockIo>;

// A chunk that a thread of the queue, or an engine outside of it, writes or reads.
struct ChunkJob {
  BlockIoPtr io;
  size_t chunk = 0;
  std::shared_ptr<Interceptor> interceptor;
  int64_t id = 0;  // not 0 where there is a job
  bool write = false;
  int path = 0;
  int64_t index = 0;
  char* data = nullptr;
  int64_t bytes = 0;
};

// Reads go first: a step may be waiting for them. All calls hold the monitor's mutex, but for those of threads and engines.
class BlockQueue {
 public:
  // most_writes: threads that may write at a time. Writes may wait for the GPU, and the other threads are left to reads.
  BlockQueue(const DiskOptions& options, BlockSource* source, Monitor* monitor, int most_writes)
      : options_(options), source_(source), monitor_(monitor), most_writes_(most_writes) {}

  // Without the mutex. Throws std::runtime_error, after it ended the threads that it had started.
  void StartThreads(const char* name);
  // The same for a queue without writes. A thread for each ring keeps as many reads in flight as the ring can hold. One
  // thread reads, and the others begin while those that read are slower than the drive: several on a slow one contend.
  void StartRings(const char* name, std::vector<std::unique_ptr<ReadRing>> rings);
  void Push(const BlockIoPtr& io);
  bool idle() const { return running_ == 0 && writes_.empty() && reads_.empty(); }
  // Drops what has not begun.
  void Clear();
  // Threads end once the queue is empty; engines get no more jobs.
  void BeginClose();
  // Without the mutex, after BeginClose.
  void Join();

  // Engines outside, without the mutex: the next job, or id 0 where `seconds` went by or the queue closes (then *closed).
  ChunkJob Next(double seconds, bool* closed);
  void Finish(int64_t id, const std::string& error);

 private:
  struct QueuedBlock {
    BlockIoPtr io;
    size_t next;  // the first chunk that nobody has taken
  };

  struct Flight;

  void StartThread(const char* name, int wanted, std::function<void()> work);
  void Work();
  void WorkRing(size_t number);
  void BalanceRings(size_t number, Flight* flight);
  void BeginFlights(ReadRing* ring, Flight* flight);
  void LandFlights(ReadRing* ring, Flight* flight);
  bool Pop(ChunkJob* job);
  void Begin(const ChunkJob& job);
  std::string Do(const ChunkJob& job);
  std::string Land(const ChunkJob& job, int64_t result);
  void RequireSame(const ChunkJob& job) const;
  void End(const ChunkJob& job, const std::string& error);

  const DiskOptions options_;
  BlockSource* const source_;
  Monitor* const monitor_;
  const int most_writes_;
  bool closing_ = false;
  std::condition_variable ready_;
  std::deque<QueuedBlock> writes_, reads_;
  std::unordered_map<int64_t, ChunkJob> external_;  // that engines outside have
  int64_t next_id_ = 1;
  int running_ = 0, writing_ = 0;
  std::vector<std::unique_ptr<ReadRing>> rings_;
  size_t rings_open_ = 1;  // the first ones take reads
  std::vector<std::thread> threads_;
};

}  // namespace dejax::offload
