#include "disk.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace dejax::offload {
namespace {

// The file system is asked for room this far ahead, so that a full disk shows before there is data to lose.
constexpr int64_t kGrowBytes = 64 << 20;

[[noreturn]] void Fail(const std::string& what, const std::string& file, int error) {
  throw std::runtime_error("offload: " + what + " " + file + " failed: " + std::strerror(error));
}

uint64_t Mix(uint64_t state, uint64_t word) {
  state = (state ^ word) * 0x9E3779B97F4A7C15ull;
  return state ^ (state >> 29);
}

}  // namespace

uint64_t Checksum(const void* data, int64_t bytes) {
  const auto* at = static_cast<const uint8_t*>(data);
  uint64_t lane[4] = {1, 2, 3, 4};  // four chains, for a multiplication takes three cycles
  int64_t left = bytes;
  for (; left >= 32; left -= 32, at += 32) {
    uint64_t words[4];
    std::memcpy(words, at, 32);
    for (int i = 0; i < 4; ++i) lane[i] = Mix(lane[i], words[i]);
  }
  uint64_t sum = static_cast<uint64_t>(bytes);
  for (; left > 0; --left, ++at) sum = Mix(sum, *at);
  for (uint64_t value : lane) sum = Mix(sum, value);
  return sum;
}

Disk::Disk(std::vector<std::string> folders, int64_t chunk_bytes, int64_t capacity, bool direct, bool external)
    : folders_(std::move(folders)), chunk_bytes_(chunk_bytes), capacity_(capacity), direct_(direct),
      external_(external), files_(folders_.size() * kFilesPerPath) {
  if (external_) return;
  for (size_t file = 0; file < files_.size(); ++file) {
    const std::string name = Name(static_cast<int>(file));
    int& descriptor = files_[file].descriptor;
    if (direct_) descriptor = open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_DIRECT, 0600);
    if (descriptor < 0) {
      direct_ = false;  // tmpfs, for one, has no O_DIRECT on older kernels
      descriptor = open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    }
    if (descriptor < 0) {
      const int error = errno;
      for (File& other : files_) {
        if (other.descriptor >= 0) close(other.descriptor);
      }
      Fail("opening", name, error);
    }
  }
}

Disk::~Disk() {
  for (File& file : files_) {
    if (file.descriptor >= 0) close(file.descriptor);
  }
}

int64_t Disk::bytes_in_use() const {
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t chunks = 0;
  for (const File& file : files_) chunks += file.in_use;
  return chunks * chunk_bytes_;
}

std::string Disk::Name(int file) const {
  return folders_[file / kFilesPerPath] + "/chunks" + std::to_string(file % kFilesPerPath);
}

void Disk::Grow(int number) {
  File& file = files_[number];
  int64_t step = std::max<int64_t>(1, kGrowBytes / chunk_bytes_);
  while (!external_) {
    const int error =
        posix_fallocate(file.descriptor, file.allocated * chunk_bytes_, step * chunk_bytes_);
    if (error == 0 || error == EOPNOTSUPP || error == EINVAL) break;
    if (step == 1) Fail("reserving room in", Name(number), error);
    step = 1;  // the last bit of a nearly full disk
  }
  file.allocated += step;
}

Chunk Disk::Allocate() {
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t total = 0;
  int best = 0;
  // File 0 of each path, then file 1 of each: neighbours in this order lie on different drives.
  const size_t paths = folders_.size();
  for (size_t i = 0; i < files_.size(); ++i) {
    const size_t at = i % paths * kFilesPerPath + i / paths;
    total += files_[at].in_use;
    if (files_[at].in_use < files_[best].in_use) best = static_cast<int>(at);
  }
  if (capacity_ > 0 && (total + 1) * chunk_bytes_ > capacity_) {
    throw std::runtime_error("offload: the disk tier is full: disk_bytes=" + std::to_string(capacity_) +
                             " are in use; raise disk_bytes, or offload less");
  }
  File& file = files_[best];
  Chunk chunk;
  chunk.file = best;
  if (!file.free.empty()) {
    chunk.index = file.free.back();
    file.free.pop_back();
  } else {
    if (file.used == file.allocated) Grow(best);
    chunk.index = file.used++;
  }
  ++file.in_use;
  return chunk;
}

void Disk::Free(const Chunk& chunk) {
  std::lock_guard<std::mutex> lock(mutex_);
  files_[chunk.file].free.push_back(chunk.index);
  --files_[chunk.file].in_use;
}

void Disk::Write(const Chunk& chunk, const void* data, int64_t bytes) {
  const auto* at = static_cast<const char*>(data);
  int64_t offset = chunk.index * chunk_bytes_;
  while (bytes > 0) {
    const ssize_t written = pwrite(files_[chunk.file].descriptor, at, static_cast<size_t>(bytes), offset);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) Fail("writing to", Name(chunk.file), written < 0 ? errno : ENOSPC);
    at += written;
    offset += written;
    bytes -= written;
  }
}

void Disk::Read(const Chunk& chunk, void* data, int64_t bytes) {
  auto* at = static_cast<char*>(data);
  int64_t offset = chunk.index * chunk_bytes_;
  while (bytes > 0) {
    const ssize_t got = pread(files_[chunk.file].descriptor, at, static_cast<size_t>(bytes), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) Fail("reading from", Name(chunk.file), errno);
    if (got == 0) {
      throw std::runtime_error("offload: " + Name(chunk.file) +
                               " is shorter than what was written to it: something truncated it");
    }
    at += got;
    offset += got;
    bytes -= got;
  }
}

}  // namespace dejax::offload
