#include "state/state_disk.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <stdexcept>

#include "driver/together.h"

namespace dejax::offload {
namespace {

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
  if (version > latest) {
    throw std::runtime_error("offload: `state` must be of a step that ended, got version " + std::to_string(version) +
                             " of an array whose files hold version " + std::to_string(latest) +
                             ": the step failed on a device; go on from the state before it, or from a checkpoint");
  }
  throw std::runtime_error("offload: `state` must be the newest state on disk, got version " + std::to_string(version) +
                           " of an array whose files hold version " + std::to_string(latest) +
                           "; a step overwrites the state before the last one: go on from the newest state, or read an "
                           "older one (np.asarray) before the next step");
}

// Whether the files hold all of a version: an update writes in the place of the version before the last one.
bool IsWhole(const StateArray& array, int64_t version) {
  return version == array.latest || (version == array.latest - 1 && array.started == array.latest);
}

}  // namespace

std::shared_ptr<StateDisk> StateDisk::Open(const Options& options) {
  auto disk = std::make_shared<StateDisk>(options);
  disk->MakeLane(0);
  std::lock_guard<std::mutex> lock(Disks().mutex);
  Disks().all[disk->number_] = disk;
  return disk;
}

StateDisk::StateDisk(const Options& options)
    : options_(options), number_(NewNumber()),
      disk_(std::make_unique<Disk>(options, /*external=*/false)) {}

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
    const std::lock_guard<std::mutex> making(making_);
    const Lock lock(monitor_.mutex);
    monitor_.closing = true;
    for (const auto& [number, lane] : lanes_) lane->queue.BeginClose();
    monitor_.changed.notify_all();
  }
  for (const auto& [number, lane] : lanes_) lane->queue.Join();  // after all jobs: the GPU may still write to their memory
  const Lock lock(monitor_.mutex);
  arrays_.clear();
  disk_.reset();
}

std::shared_ptr<StateArray> StateDisk::ArrayOf(int64_t array) const {
  if (monitor_.closing) throw std::runtime_error("offload: the StateStore is closed");
  const auto found = arrays_.find(array);
  if (found == arrays_.end()) {
    throw std::runtime_error("offload: `state` must have arrays of its StateStore, got one that was removed");
  }
  return found->second;
}

int64_t StateDisk::Create(int64_t bytes, int64_t unit_bytes, int lane) {
  auto array = std::make_shared<StateArray>();
  array->lane = lane;
  array->bytes = bytes;
  array->unit_bytes = unit_bytes;
  array->units->resize(static_cast<size_t>((bytes + unit_bytes - 1) / unit_bytes));
  MakeLane(lane);
  const Lock lock(monitor_.mutex);
  if (monitor_.closing) throw std::runtime_error("offload: the StateStore is closed");
  try {
    for (size_t i = 0; i < array->units->size(); ++i) {
      const int64_t size = std::min(unit_bytes, bytes - static_cast<int64_t>(i) * unit_bytes);
      for (std::vector<Chunk>& chunks : (*array->units)[i].chunks) chunks = disk_->Allocate(size);
    }
  } catch (...) {
    FreeUnits(array.get());
    throw;
  }
  arrays_[next_] = array;
  return next_++;
}

int64_t StateDisk::Share(int64_t number, int lane) {
  MakeLane(lane);
  const Lock lock(monitor_.mutex);
  const std::shared_ptr<StateArray> original = ArrayOf(number);
  auto array = std::make_shared<StateArray>();
  array->lane = lane;
  array->bytes = original->bytes;
  array->unit_bytes = original->unit_bytes;
  array->units = original->units;
  array->writes = false;
  arrays_[next_] = array;
  return next_++;
}

void StateDisk::Join(const std::vector<int64_t>& arrays) {
  const auto family = std::make_shared<const std::vector<int64_t>>(arrays);
  const Lock lock(monitor_.mutex);
  for (int64_t number : arrays) ArrayOf(number)->family = family;
}

void StateDisk::Remove(int64_t number) {
  Lock lock(monitor_.mutex);
  const std::shared_ptr<StateArray> array = ArrayOf(number);
  arrays_.erase(number);
  array->removed = true;
  monitor_.changed.wait(lock, [&] { return IsIdle(); });
  const bool shared = std::any_of(arrays_.begin(), arrays_.end(),
                                  [&](const auto& other) { return other.second->units == array->units; });
  if (disk_ == nullptr || shared) return;
  FreeUnits(array.get());
  disk_->Trim();
}

void StateDisk::FreeUnits(StateArray* array) {
  for (StateArray::Unit& unit : *array->units) {
    for (std::vector<Chunk>& chunks : unit.chunks) disk_->Free(&chunks);
  }
}

std::vector<StateIoPtr> StateDisk::Units(int64_t number, int64_t version, int64_t offset, int64_t bytes,
                                         bool write) {
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
    io->disk = this;
    io->write = write;
    io->array = array;
    io->unit = static_cast<size_t>(at / array->unit_bytes);
    io->half = static_cast<int>(version % 2);
    io->bytes = std::min(array->unit_bytes, array->bytes - at);
    io->chunks = &(*array->units)[io->unit].chunks[io->half];
    io->left = io->chunks->size();
    found.push_back(io);
  }
  return found;
}

// Waits for the last write of a unit's half. Throws where it failed.
void StateDisk::WaitForWrite(Lock& lock, StateArray* array, size_t unit, int half) {
  StateIoPtr& writing = (*array->units)[unit].writing[half];
  if (writing == nullptr) return;
  const StateIoPtr io = writing;
  monitor_.changed.wait(lock, [&] { return io->done; });
  if (!io->error.empty()) throw std::runtime_error(io->error);
  if (writing == io) writing.reset();
}

void StateDisk::Check(int64_t number, int64_t version, int64_t bytes, bool newest) {
  Lock lock(monitor_.mutex);
  const std::shared_ptr<StateArray> array = ArrayOf(number);
  // The step before may still run on other devices. They end it, or fail.
  const auto begin = std::chrono::steady_clock::now();
  while (array->written == array->latest + 1 && !monitor_.closing && !WasFailedTogether(array->written_in)) {
    if (std::chrono::steady_clock::now() - begin > std::chrono::minutes(5)) {
      throw std::runtime_error("offload: a step must end on all devices before the next one begins, but one of them has "
                               "not written its state for 5 minutes; see what it waits for");
    }
    monitor_.changed.wait_for(lock, std::chrono::milliseconds(10));
  }
  if (monitor_.closing) throw std::runtime_error("offload: the StateStore is closed");
  if (array->bytes != bytes) {
    throw std::runtime_error("offload: `state` must have arrays of the size that they were made with, got one of " +
                             std::to_string(array->bytes) + " bytes in place of " + std::to_string(bytes));
  }
  if (newest ? version != array->latest : !IsWhole(*array, version)) Stale(version, array->latest);
}

std::vector<StateIoPtr> StateDisk::Read(int64_t number, int64_t version, int64_t offset, int64_t bytes,
                                        Context context) {
  std::vector<StateIoPtr> found;
  {
    Lock lock(monitor_.mutex);
    found = Units(number, version, offset, bytes, false);
    StateArray* const array = found.front()->array.get();
    for (const StateIoPtr& io : found) WaitForWrite(lock, array, io->unit, io->half);
    if (!IsWhole(*array, version)) Stale(version, array->latest);
  }
  for (const StateIoPtr& io : found) {
    io->buffer = BuffersOf(io).Take(io->bytes, false, options_.host_bytes, context != nullptr);
    io->context = context;
    io->after[0] = io->buffer->busy;
    Submit(io);
  }
  return found;
}

std::vector<StateIoPtr> StateDisk::Write(int64_t number, int64_t version, int64_t offset, int64_t bytes,
                                         int64_t host_bytes, Context context) {
  std::vector<StateIoPtr> found;
  {
    Lock lock(monitor_.mutex);
    found = Units(number, version, offset, bytes, true);
    StateArray* const array = found.front()->array.get();
    if (version != array->latest + 1) Stale(version - 1, array->latest);
    array->started = version;
    if (!array->writes) return {};
    for (const StateIoPtr& io : found) {
      StateIoPtr& writing = (*array->units)[io->unit].writing[io->half];
      const StateIoPtr before = writing;  // of a step that failed, or of the version before the last one
      if (before != nullptr) monitor_.changed.wait(lock, [&] { return before->done; });
      writing = io;
    }
  }
  const int64_t cap = options_.host_bytes >= 0 ? options_.host_bytes : host_bytes;
  for (const StateIoPtr& io : found) {
    try {
      io->buffer = BuffersOf(io).Take(io->bytes, true, cap, context != nullptr);
    } catch (const std::exception& error) {
      const Lock lock(monitor_.mutex);
      for (const StateIoPtr& other : found) {  // nobody waits for what will never be written
        other->error = error.what();
        other->done = true;
      }
      monitor_.changed.notify_all();
      throw;
    }
    io->context = context;
  }
  return found;
}

void StateDisk::Commit(int64_t number, int64_t version, int64_t run) {
  const Lock lock(monitor_.mutex);
  const std::shared_ptr<StateArray> array = ArrayOf(number);
  if (version != array->latest + 1) Stale(version - 1, array->latest);
  if (array->family == nullptr) {
    array->latest = version;
    return;
  }
  array->written = version;
  array->written_in = run;
  std::vector<StateArray*> members;
  for (int64_t other : *array->family) {
    const auto member = arrays_.find(other);
    if (member == arrays_.end()) continue;  // removed
    if (member->second->written != version || member->second->written_in != run) return;
    members.push_back(member->second.get());
  }
  for (StateArray* member : members) member->latest = version;
  monitor_.changed.notify_all();
}

void StateDisk::Put(int64_t number, int64_t offset, const void* data, int64_t bytes) {
  std::vector<StateIoPtr> found;
  {
    const Lock lock(monitor_.mutex);
    found = Units(number, 0, offset, bytes, true);
  }
  const auto* from = static_cast<const char*>(data);
  for (const StateIoPtr& io : found) {
    io->buffer = BuffersOf(io).Take(io->bytes, true, 4 * options_.chunk_bytes, false);
    std::memcpy(io->buffer->data, from, static_cast<size_t>(io->bytes));
    from += io->bytes;
    Submit(io);
  }
  for (const StateIoPtr& io : found) WaitFor(io);
}

void StateDisk::Get(int64_t number, int64_t version, int64_t offset, void* data, int64_t bytes) {
  std::shared_ptr<StateArray> array;
  {
    const Lock lock(monitor_.mutex);
    array = ArrayOf(number);
  }
  auto* to = static_cast<char*>(data);
  std::deque<StateIoPtr> ahead;
  for (int64_t at = offset; at < offset + bytes || !ahead.empty();) {
    if (at < offset + bytes && ahead.size() < 4) {
      const int64_t size = std::min(array->unit_bytes, offset + bytes - at);
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
  const Lock lock(monitor_.mutex);
  if (!IsWhole(*array, version)) Stale(version, array->latest);  // a later step wrote in its place meanwhile
}

void StateDisk::Drain() {
  Lock lock(monitor_.mutex);
  monitor_.changed.wait(lock, [&] { return IsIdle(); });
  for (const auto& [number, array] : arrays_) {
    for (size_t i = 0; i < array->units->size(); ++i) {
      WaitForWrite(lock, array.get(), i, static_cast<int>(array->latest % 2));
    }
  }
}

StateDisk::Stats StateDisk::GetStats() const {
  const Lock lock(monitor_.mutex);
  Stats stats = stats_;
  stats.disk_bytes = disk_ ? disk_->bytes_held() : 0;
  for (const auto& [number, lane] : lanes_) stats.peak_host_bytes += lane->buffers->peak_bytes();
  return stats;
}

}  // namespace dejax::offload
