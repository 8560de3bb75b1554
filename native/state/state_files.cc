// Units of StateDisk on their way to files and back. state_disk.cc says which version they are.
#include <algorithm>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <utility>

#include "state/state_disk.h"

namespace dejax::offload {

// Half of the threads are left to reads, which steps wait for.
StateDisk::Lane::Lane(StateDisk* disk)
    : queue(disk->options_, disk->disk_.get(), &disk->monitor_, std::max(1, disk->options_.num_threads / 2)) {}

// A device's lane, with its threads, where it has none. Without the mutex.
void StateDisk::MakeLane(int number) {
  const std::lock_guard<std::mutex> making(making_);
  {
    const Lock lock(monitor_.mutex);
    if (monitor_.closing || lanes_.count(number) != 0) return;
  }
  auto lane = std::make_unique<Lane>(this);
  lane->queue.StartThreads("dejax-state");
  const Lock lock(monitor_.mutex);
  lanes_[number] = std::move(lane);
}

StateBuffers& StateDisk::BuffersOf(const StateIoPtr& io) const {
  const Lock lock(monitor_.mutex);
  return *lanes_.at(io->array->lane)->buffers;
}

bool StateDisk::IsIdle() const {
  return std::all_of(lanes_.begin(), lanes_.end(), [](const auto& lane) { return lane.second->queue.idle(); });
}

void StateDisk::Submit(const StateIoPtr& io) {
  const Lock lock(monitor_.mutex);
  if (monitor_.closing || io->array->removed) {
    io->error = monitor_.closing ? "offload: the StateStore is closed" : "offload: `state` was removed from its StateStore";
    io->done = true;
    monitor_.changed.notify_all();
    throw std::runtime_error(io->error);
  }
  io->data = io->buffer->data;
  lanes_.at(io->array->lane)->queue.Push(io);
}

bool StateDisk::IsDone(const StateIoPtr& io) const {
  const Lock lock(monitor_.mutex);
  return io->done;
}

void StateDisk::WaitFor(const StateIoPtr& io) {
  Lock lock(monitor_.mutex);
  const double begin = Seconds();
  monitor_.changed.wait(lock, [&] { return io->done; });
  stats_.wait_seconds += Seconds() - begin;
  if (!io->error.empty()) throw std::runtime_error(io->error);
}

void StateDisk::Intercept(std::shared_ptr<Interceptor> interceptor) {
  const Lock lock(monitor_.mutex);
  if (disk_) disk_->Intercept(std::move(interceptor));
}

void StateIo::ChunkEnded(size_t, int64_t bytes_done, const std::string& why) {
  (write ? disk->stats_.written_bytes : disk->stats_.read_bytes) += bytes_done;
  if (!why.empty()) error = why;
  if (--left > 0) return;
  done = true;
  if (write) buffer.reset();  // its last owner: back to the lane's buffers
}

}  // namespace dejax::offload
