// Files that hold a training state between steps: optimizer state and parameters that are too large for host memory.
//
// An array lies in units (the rows of a stack of layers, or the pieces of an update), each in extents of its own. Every
// unit has room for two versions. An update reads version v and writes version v + 1 elsewhere, so a step that fails
// leaves v whole, and no read races with a write. I/O threads read and write units to and from host memory; only a few
// units are in host memory at a time.
//
// An array of several devices lies as its shards, each an array of its own, and together they are a family. A version of
// a family is complete when every shard of this process is: the shards of a step that fails on one device stay as they
// were. Shards that hold the same part, as of a replicated array, share their files: the first of them writes, and every
// device reads. Each device has a lane: threads, queues and host memory of its own. So no device waits for memory or threads that
// another one's writes hold: these may wait for a collective operation, and so for the device itself.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "blocks/block_queue.h"
#include "state/state_buffers.h"

namespace dejax::offload {

class StateDisk;
struct StateArray;

// A unit that is read or written.
struct StateIo : BlockIo {
  void ChunkEnded(size_t chunk, int64_t done, const std::string& error) override;

  StateDisk* disk = nullptr;
  std::shared_ptr<StateArray> array;
  size_t unit = 0;
  int half = 0;  // of the unit: its version is even or odd
  std::shared_ptr<StateBuffer> buffer;
  size_t left = 0;  // chunks
  bool done = false;
  std::string error;
};
using StateIoPtr = std::shared_ptr<StateIo>;

struct StateArray {
  struct Unit {
    std::vector<Chunk> chunks[2];
    StateIoPtr writing[2];  // the last write of each version, until somebody has seen that it succeeded
  };
  int64_t bytes = 0, unit_bytes = 0;
  int64_t latest = 0;   // version that is complete
  int64_t started = 0;  // version of which something may be written
  bool removed = false;
  int lane = 0;
  // Of an array that is in a family: its members' numbers, and the last version that was written whole, in which run.
  std::shared_ptr<const std::vector<int64_t>> family;
  int64_t written = 0, written_in = 0;
  bool writes = true;  // false: another array, which has the same units, writes them
  std::shared_ptr<std::vector<Unit>> units = std::make_shared<std::vector<Unit>>();
};

class StateDisk {
 public:
  struct Options : DiskOptions {
    int64_t host_bytes = -1;  // for writes on their way; -1: what the step says
  };
  struct Stats {
    int64_t read_bytes = 0, written_bytes = 0, disk_bytes = 0, peak_host_bytes = 0;
    double wait_seconds = 0;  // that launching threads waited for reads
  };

  static std::shared_ptr<StateDisk> Open(const Options& options);
  explicit StateDisk(const Options& options);
  ~StateDisk() { Close(); }
  // The open one with this number. Throws std::runtime_error where there is none.
  static std::shared_ptr<StateDisk> Find(int64_t number);
  // Ends all calls and I/O.
  void Close();
  int64_t number() const { return number_; }

  // Room for two versions of an array, which is read and written in `lane`. Throws where the file system or disk_bytes
  // does not hold them.
  int64_t Create(int64_t bytes, int64_t unit_bytes, int lane);
  // An array that has the files of another one, reads them in `lane` and never writes them. Both must be in one family.
  int64_t Share(int64_t array, int lane);
  // From now on versions of these arrays are complete together.
  void Join(const std::vector<int64_t>& arrays);
  void Remove(int64_t array);
  // Units of version 0, before the array is used.
  void Put(int64_t array, int64_t offset, const void* data, int64_t bytes);
  void Get(int64_t array, int64_t version, int64_t offset, void* data, int64_t bytes);
  // Waits for all writes. Throws where one failed.
  void Drain();
  Stats GetStats() const;
  void Intercept(std::shared_ptr<Interceptor> interceptor);

  // Throws where a step cannot begin with this version, or, newest: where it is not the newest one. Waits until the other
  // devices of this process have written theirs.
  void Check(int64_t array, int64_t version, int64_t bytes, bool newest = false);
  // Begins to read whole units.
  std::vector<StateIoPtr> Read(int64_t array, int64_t version, int64_t offset, int64_t bytes, Context context);
  // Host memory for whole units, which the caller fills and submits. None where another array writes them.
  std::vector<StateIoPtr> Write(int64_t array, int64_t version, int64_t offset, int64_t bytes, int64_t host_bytes,
                                Context context);
  void Submit(const StateIoPtr& io);
  bool IsDone(const StateIoPtr& io) const;
  // Throws where the read or the write failed.
  void WaitFor(const StateIoPtr& io);
  // All units of a version were submitted. A family's version is complete when one run has committed all its arrays.
  void Commit(int64_t array, int64_t version, int64_t run);

 private:
  friend struct StateIo;
  struct Lane {
    explicit Lane(StateDisk* disk);

    std::shared_ptr<StateBuffers> buffers = std::make_shared<StateBuffers>();
    BlockQueue queue;
  };

  void MakeLane(int number);
  StateBuffers& BuffersOf(const StateIoPtr& io) const;
  void FreeUnits(StateArray* array);
  bool IsIdle() const;
  std::shared_ptr<StateArray> ArrayOf(int64_t array) const;
  std::vector<StateIoPtr> Units(int64_t array, int64_t version, int64_t offset, int64_t bytes, bool write);
  void WaitForWrite(Lock& lock, StateArray* array, size_t unit, int half);

  const Options options_;
  const int64_t number_;
  std::mutex making_;  // a lane; held before the monitor's mutex
  mutable Monitor monitor_;
  std::unique_ptr<Disk> disk_;
  std::map<int64_t, std::shared_ptr<StateArray>> arrays_;
  std::map<int, std::unique_ptr<Lane>> lanes_;
  int64_t next_ = 2;  // jnp.ones_like(ticket) is the ticket of no array
  Stats stats_;
};

}  // namespace dejax::offload
