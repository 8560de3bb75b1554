// The NVMe tier's files: fixed-size chunks in preallocated files, striped over the files of all paths and used again.
// Each path has several files, for a file system may let only one thread at a time write to a file: on tmpfs one file made
// a step that writes 0.6 GiB 12 % slower, files of their own 1 %. A chunk is read and written as a whole number of pages straight from a slot of host memory (O_DIRECT where the
// file system takes it), by whichever I/O thread has time.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace dejax::offload {

constexpr int64_t kPage = 4096;
constexpr int kFilesPerPath = 16;

struct Chunk {
  int file = 0;
  int64_t index = 0;  // in that file
  uint64_t checksum = 0;
};

// 64-bit hash of memory, about as fast as one core reads it; finds any damage to a file, not an adversary's.
uint64_t Checksum(const void* data, int64_t bytes);

class Disk {
 public:
  // Creates `folder`/chunks* in each folder. Throws std::runtime_error that names the path.
  // external: chunks are numbered here but read and written by someone else (TensorStore); no file is made.
  Disk(std::vector<std::string> folders, int64_t chunk_bytes, int64_t capacity, bool direct, bool external);
  ~Disk();
  Disk(const Disk&) = delete;

  int64_t chunk_bytes() const { return chunk_bytes_; }
  bool direct() const { return direct_; }
  const std::string& folder(const Chunk& chunk) const { return folders_[chunk.file / kFilesPerPath]; }
  std::string Name(int file) const;
  // A chunk's folder, and a number of its own there.
  int path(const Chunk& chunk) const { return chunk.file / kFilesPerPath; }
  int64_t number(const Chunk& chunk) const { return chunk.index * kFilesPerPath + chunk.file % kFilesPerPath; }
  int64_t bytes_in_use() const;

  // A chunk to write to: of the file that has fewest in use. Throws where the cap is reached or a file system is full.
  Chunk Allocate();
  void Free(const Chunk& chunk);

  // `bytes` is a multiple of kPage, at most chunk_bytes, and `data` is aligned to kPage. Throw std::runtime_error that
  // names file and cause.
  void Write(const Chunk& chunk, const void* data, int64_t bytes);
  void Read(const Chunk& chunk, void* data, int64_t bytes);

 private:
  struct File {
    int descriptor = -1;
    int64_t allocated = 0;  // chunks that the file has room for
    int64_t used = 0;       // first chunk never given out
    std::vector<int64_t> free;
    int64_t in_use = 0;
  };
  void Grow(int file);

  const std::vector<std::string> folders_;
  const int64_t chunk_bytes_;
  const int64_t capacity_;  // bytes; 0 is no cap
  bool direct_;
  const bool external_;
  mutable std::mutex mutex_;
  std::vector<File> files_;
};

}  // namespace dejax::offload
