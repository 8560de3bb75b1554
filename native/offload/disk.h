// The disk tier's room. A tensor is cut into chunks of at most `chunk_bytes`, and each chunk gets an extent: a range of one
// of several files (the direct engine), or a file of its own (an external engine, TensorStore). Extents are used again.
//
// Each path has several files, for a file system may let only one thread at a time write to a file: on tmpfs one file made
// a step that writes 0.6 GiB 12 % slower, files of their own 1 %. A chunk is read and written as a whole number of pages
// straight from a slot of host memory (O_DIRECT where the file system takes it), by whichever I/O thread has time.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace dejax::offload {

constexpr int64_t kPage = 4096;
constexpr int kFilesPerPath = 16;

struct Chunk {
  int path = 0;
  int file = 0;        // of the direct engine
  int64_t offset = 0;  // in that file; of an external engine: the number of the chunk's own file
  int64_t bytes = 0;   // whole pages
  uint64_t checksum = 0;
};

// 64-bit hash of memory, about as fast as one core reads it; finds any damage to a file, not an adversary's.
uint64_t Checksum(const void* data, int64_t bytes);

class Disk {
 public:
  // Creates `folder`/chunks* in each folder. Throws std::runtime_error that names the path.
  // capacity: of what the files hold, used or not; -1 is no cap.
  // external: chunks are numbered here but read and written by someone else, who names the file of one as Name does.
  Disk(std::vector<std::string> folders, int64_t chunk_bytes, int64_t capacity, bool direct, bool external);
  ~Disk();
  Disk(const Disk&) = delete;

  bool direct() const { return direct_; }
  const std::string& folder(const Chunk& chunk) const { return folders_[chunk.path]; }
  std::string Name(const Chunk& chunk) const;
  // What the files hold, whether a tensor uses it or not.
  int64_t bytes_held() const;

  // Room for a chunk of `bytes`, a multiple of kPage, on the path that has least in use. Throws where the cap is reached
  // or a file system is full.
  Chunk Allocate(int64_t bytes);
  void Free(const Chunk& chunk);
  // Gives room that nobody uses back to the file system, as far as it lies at the end of a file.
  void Trim();

  // `data` is aligned to kPage and has chunk.bytes. Throw std::runtime_error that names file and cause.
  void Write(const Chunk& chunk, const void* data);
  void Read(const Chunk& chunk, void* data);

 private:
  // Of the direct engine.
  struct File {
    int path = 0;
    int number = 0;
    int descriptor = -1;
    int64_t end = 0;                   // bytes that it holds
    std::map<int64_t, int64_t> free;   // offset: bytes; no two of them touch
    int64_t in_use = 0;
  };
  // Of an external engine: files of one path by their size.
  struct Shelf {
    std::map<int64_t, std::vector<int64_t>> free;  // bytes: numbers
    int64_t next = 0;
    int64_t in_use = 0;
  };

  std::string FileName(const File& file) const;
  bool TakeFree(File* file, int64_t bytes, Chunk* chunk);
  bool Grow(File* file, int64_t bytes, int* error);
  Chunk AllocateExtent(int64_t bytes);
  Chunk AllocateFile(int64_t bytes);
  bool RemoveFreeFile();
  void TrimFile(File* file);
  bool Fits(int64_t more) const { return capacity_ < 0 || held_ + more <= capacity_; }
  [[noreturn]] void Full(int64_t bytes) const;

  const std::vector<std::string> folders_;
  const int64_t chunk_bytes_;
  const int64_t capacity_;
  bool direct_;
  const bool external_;
  mutable std::mutex mutex_;
  std::vector<File> files_;    // the first of each path, then the second of each: neighbours lie on different drives
  std::vector<Shelf> shelves_;
  int64_t held_ = 0;
};

}  // namespace dejax::offload
