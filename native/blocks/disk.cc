#include "blocks/disk.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <utility>

namespace dejax::offload {
namespace {

// A file reserves more than it needs, so that a full file system shows before data are at risk: it doubles, within these
// bounds.
constexpr int64_t kLeastGrowth = 1 << 20, kMostGrowth = 64 << 20;

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
  uint64_t lane[4] = {1, 2, 3, 4};  // four independent chains hide the latency of the multiplication
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

Disk::Disk(const DiskOptions& options, bool external)
    : folders_(options.folders), capacity_(options.disk_bytes), chunk_bytes_(options.chunk_bytes), external_(external) {
  if (external_) {
    shelves_.resize(folders_.size());
    return;
  }
  files_.resize(folders_.size() * kFilesPerPath);
  for (size_t i = 0; i < files_.size(); ++i) {
    File& file = files_[i];
    file.path = static_cast<int>(i % folders_.size());
    file.number = static_cast<int>(i / folders_.size());
    const std::string name = FileName(file);
    file.descriptor = open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_DIRECT, 0600);
    if (file.descriptor < 0) {  // tmpfs has no O_DIRECT on older kernels
      file.descriptor = open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    }
    if (file.descriptor < 0) {
      const int error = errno;
      for (const File& other : files_) {
        if (other.descriptor >= 0) close(other.descriptor);
      }
      Fail("opening", name, error);
    }
  }
}

Disk::~Disk() {
  for (const File& file : files_) {
    if (file.descriptor >= 0) close(file.descriptor);
  }
}

std::string Disk::FileName(const File& file) const {
  return folders_[file.path] + "/chunks" + std::to_string(file.number);
}

std::string Disk::Name(const Chunk& chunk) const {
  if (!external_) return FileName(files_[chunk.file]);
  // zarr's name of the chunk in row `offset` of an array whose rows have chunk.bytes.
  return folders_[chunk.path] + "/array" + std::to_string(chunk.bytes) + "/" + std::to_string(chunk.offset) + ".0";
}

int64_t Disk::bytes_held() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return held_;
}

void Disk::Full(int64_t bytes) const {
  throw std::runtime_error("offload: the disk tier is full: disk_bytes=" + std::to_string(capacity_) + ", of which " +
                           std::to_string(held_) + " are taken, but " + std::to_string(bytes) +
                           " more are needed; raise disk_bytes, or offload less");
}

std::vector<Chunk> Disk::Allocate(int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Chunk> chunks;
  try {
    for (int64_t left = WholePages(bytes); left > 0; left -= chunks.back().bytes) {
      const int64_t size = std::min(chunk_bytes_, left);
      chunks.push_back(external_ ? AllocateFile(size) : AllocateExtent(size));
    }
  } catch (...) {
    for (const Chunk& chunk : chunks) FreeChunk(chunk);
    throw;
  }
  return chunks;
}

void Disk::Free(std::vector<Chunk>* chunks) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Chunk& chunk : *chunks) FreeChunk(chunk);
  chunks->clear();
}

// The smallest free extent that is large enough.
bool Disk::TakeFree(File* file, int64_t bytes, Chunk* chunk) {
  auto best = file->free.end();
  for (auto at = file->free.begin(); at != file->free.end(); ++at) {
    if (at->second >= bytes && (best == file->free.end() || at->second < best->second)) best = at;
  }
  if (best == file->free.end()) return false;
  const auto [offset, size] = *best;
  file->free.erase(best);
  if (size > bytes) file->free[offset + bytes] = size - bytes;
  chunk->offset = offset;
  return true;
}

// Adds a free extent of at least `bytes` at the file's end. False where the cap does not allow it, or with *error.
bool Disk::Grow(File* file, int64_t bytes, int* error) {
  // A free extent at the end counts.
  const auto last = file->free.empty() ? file->free.end() : std::prev(file->free.end());
  const bool touches = last != file->free.end() && last->first + last->second == file->end;
  const int64_t needed = bytes - (touches ? last->second : 0);
  if (!Fits(needed)) return false;
  int64_t step = std::max(needed, std::clamp(file->end, kLeastGrowth, kMostGrowth));
  if (!Fits(step)) step = needed;
  while (true) {
    *error = posix_fallocate(file->descriptor, file->end, step);
    if (*error == EOPNOTSUPP || *error == EINVAL) *error = 0;  // no reservations here: the file grows as it is written
    if (*error == 0) break;
    if (step == needed) return false;
    step = needed;  // the disk is nearly full
  }
  if (touches) {
    last->second += step;
  } else {
    file->free[file->end] = step;
  }
  file->end += step;
  held_ += step;
  return true;
}

Chunk Disk::AllocateExtent(int64_t bytes) {
  std::vector<File*> order;
  for (File& file : files_) order.push_back(&file);
  std::stable_sort(order.begin(), order.end(), [](const File* a, const File* b) { return a->in_use < b->in_use; });
  Chunk chunk;
  chunk.bytes = bytes;
  int error = 0;
  const auto take = [&](File* file) {
    if (!TakeFree(file, bytes, &chunk)) return false;
    chunk.path = file->path;
    chunk.file = static_cast<int>(file - files_.data());
    file->in_use += bytes;
    return true;
  };
  for (const bool trimmed : {false, true}) {
    if (trimmed) {  // free space at the end of other files, none of it large enough, becomes room under the cap
      for (File& file : files_) TrimFile(&file);
    }
    for (File* file : order) {
      if (take(file)) return chunk;
      if (Grow(file, bytes, &error) && take(file)) return chunk;
    }
  }
  if (error != 0) Fail("reserving space in", FileName(*order.front()), error);
  Full(bytes);
}

Chunk Disk::AllocateFile(int64_t bytes) {
  std::vector<Shelf*> order;
  for (Shelf& shelf : shelves_) order.push_back(&shelf);
  std::stable_sort(order.begin(), order.end(), [](const Shelf* a, const Shelf* b) { return a->in_use < b->in_use; });
  Chunk chunk;
  chunk.bytes = bytes;
  const auto given = [&](Shelf* shelf, int64_t number) {
    chunk.path = static_cast<int>(shelf - shelves_.data());
    chunk.offset = number;
    shelf->in_use += bytes;
    return chunk;
  };
  do {
    for (Shelf* shelf : order) {
      const auto found = shelf->free.find(bytes);
      if (found != shelf->free.end()) {
        const int64_t number = found->second.back();
        found->second.pop_back();
        if (found->second.empty()) shelf->free.erase(found);
        return given(shelf, number);
      }
      if (Fits(bytes)) {
        held_ += bytes;
        return given(shelf, shelf->next++);
      }
    }
  } while (RemoveFreeFile());
  Full(bytes);
}

// External engine: removes a file that no tensor uses. False where there is none.
bool Disk::RemoveFreeFile() {
  for (Shelf& shelf : shelves_) {
    if (shelf.free.empty()) continue;
    auto& [bytes, numbers] = *shelf.free.begin();
    Chunk chunk;
    chunk.path = static_cast<int>(&shelf - shelves_.data());
    chunk.offset = numbers.back();
    chunk.bytes = bytes;
    unlink(Name(chunk).c_str());  // it may never have been written
    held_ -= bytes;
    numbers.pop_back();
    if (numbers.empty()) shelf.free.erase(shelf.free.begin());
    return true;
  }
  return false;
}

void Disk::FreeChunk(const Chunk& chunk) {
  if (external_) {
    Shelf& shelf = shelves_[chunk.path];
    shelf.in_use -= chunk.bytes;
    shelf.free[chunk.bytes].push_back(chunk.offset);
    return;
  }
  File& file = files_[chunk.file];
  file.in_use -= chunk.bytes;
  auto at = file.free.emplace(chunk.offset, chunk.bytes).first;
  const auto next = std::next(at);
  if (next != file.free.end() && at->first + at->second == next->first) {
    at->second += next->second;
    file.free.erase(next);
  }
  if (at != file.free.begin()) {
    const auto before = std::prev(at);
    if (before->first + before->second == at->first) {
      before->second += at->second;
      file.free.erase(at);
    }
  }
}

void Disk::TrimFile(File* file) {
  if (file->free.empty()) return;
  const auto last = std::prev(file->free.end());
  if (last->first + last->second != file->end || ftruncate(file->descriptor, last->first) != 0) return;
  held_ -= last->second;
  file->end = last->first;
  file->free.erase(last);
}

void Disk::Trim() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (File& file : files_) TrimFile(&file);
  while (RemoveFreeFile()) {
  }
}

void Disk::Write(const Chunk& chunk, const void* data) {
  const auto* at = static_cast<const char*>(data);
  int64_t offset = chunk.offset, bytes = chunk.bytes;
  while (bytes > 0) {
    const ssize_t written = pwrite(files_[chunk.file].descriptor, at, static_cast<size_t>(bytes), offset);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) Fail("writing to", Name(chunk), written < 0 ? errno : ENOSPC);
    at += written;
    offset += written;
    bytes -= written;
  }
}

void Disk::Read(const Chunk& chunk, void* data) {
  auto* at = static_cast<char*>(data);
  int64_t offset = chunk.offset, bytes = chunk.bytes;
  while (bytes > 0) {
    const ssize_t got = pread(files_[chunk.file].descriptor, at, static_cast<size_t>(bytes), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) Fail("reading from", Name(chunk), errno);
    if (got == 0) {
      throw std::runtime_error("offload: " + Name(chunk) +
                               " is shorter than what was written to it: something truncated it");
    }
    at += got;
    offset += got;
    bytes -= got;
  }
}

}  // namespace dejax::offload
