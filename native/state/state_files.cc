// The I/O threads of StateDisk: units go from host memory to files and back. state_disk.cc says which version they are.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "driver/thread_name.h"
#include "state/state_disk.h"

namespace dejax::offload {

// A device's lane, with its threads. The caller holds the mutex.
StateDisk::Lane& StateDisk::MakeLane(int number) {
  std::unique_ptr<Lane>& lane = lanes_[number];
  if (lane != nullptr) return *lane;
  lane = std::make_unique<Lane>();
  try {
    for (int i = 0; i < std::max(1, options_.num_threads); ++i) {
      lane->threads.emplace_back([this, raw = lane.get()] { Work(raw); });
    }
  } catch (const std::exception& error) {
    if (!lane->threads.empty()) return *lane;  // fewer do
    lanes_.erase(number);
    throw std::runtime_error(std::string("offload: no I/O thread could be made: ") + error.what());
  }
  return *lane;
}

StateBuffers& StateDisk::BuffersOf(const StateIoPtr& io) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return *lanes_.at(io->array->lane)->buffers;
}

bool StateDisk::IsIdle() const {
  return running_ == 0 && std::all_of(lanes_.begin(), lanes_.end(), [](const auto& lane) {
           return lane.second->reads.empty() && lane.second->writes.empty();
         });
}

void StateDisk::Submit(const StateIoPtr& io) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (closing_ || io->array->removed) {
    io->error = closing_ ? "offload: the StateStore is closed" : "offload: `state` was removed from its StateStore";
    io->done = true;
    done_.notify_all();
    throw std::runtime_error(io->error);
  }
  Lane& lane = *lanes_.at(io->array->lane);
  for (size_t i = 0; i < io->left; ++i) (io->write ? lane.writes : lane.reads).push_back({io, i});
  lane.ready.notify_all();
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

void StateDisk::Intercept(std::shared_ptr<Interceptor> interceptor) {
  std::lock_guard<std::mutex> lock(mutex_);
  interceptor_ = std::move(interceptor);
}

void StateDisk::Work(Lane* lane) {
  NameThisThread("dejax-state");
  std::unique_lock<std::mutex> lock(mutex_);
  // Writes may wait for the GPU. Half of the threads are left to reads, which steps wait for.
  const int most_writes = std::max(1, options_.num_threads / 2);
  while (true) {
    lane->ready.wait(lock, [&] {
      return !lane->reads.empty() || (!lane->writes.empty() && lane->writing < most_writes) ||
             (closing_ && lane->writes.empty());
    });
    if (lane->reads.empty() && lane->writes.empty()) return;
    std::deque<Job>& queue = lane->reads.empty() ? lane->writes : lane->reads;
    Job job = queue.front();
    queue.pop_front();
    ++running_;
    lane->writing += job.io->write;
    lock.unlock();
    const std::string error = Do(job);
    std::shared_ptr<StateBuffer> finished;
    lock.lock();
    --running_;
    lane->writing -= job.io->write;
    if (job.io->write) lane->ready.notify_all();
    (job.io->write ? stats_.written_bytes : stats_.read_bytes) +=
        (*job.io->array->units)[job.io->unit].chunks[job.io->slot][job.chunk].bytes;
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
    Chunk& chunk = (*io.array->units)[io.unit].chunks[io.slot][job.chunk];
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
