// The disk tier's space. A tensor is cut into chunks of at most `chunk_bytes`, and each chunk gets an extent: a range of
// one of several files (the direct engine), or its own file (an external engine, TensorStore). Freed extents are used again.
//
// Each path has several files, because a file system may let only one thread at a time write to a file. I/O threads read
// and write a chunk as a whole number of pages, to and from a slot of host memory (O_DIRECT where the file system has it).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "blocks/block_source.h"

namespace dejax::offload {

constexpr int kFilesPerPath = 16;

// What every store with files is told.
struct DiskOptions {
  std::vector<std::string> folders;  // empty: no files
  int64_t disk_bytes = -1;           // cap of the files' size, used or not; -1: no cap
  int64_t chunk_bytes = 8 << 20;
  int num_threads = 8;
  bool checksum = true;
};

class Disk : public BlockSource {
 public:
  // Creates `folder`/chunks* in each folder. Throws std::runtime_error that names the path.
  // external: chunks only get numbers here; an engine outside reads and writes them in files with the names of Name.
  Disk(const DiskOptions& options, bool external);
  ~Disk() override;
  Disk(const Disk&) = delete;

  std::string Name(const Chunk& chunk) const override;
  // The files' size, used or not.
  int64_t bytes_held() const;

  // Space for a block of `bytes`, each chunk on the path that has least in use. Throws where the cap is reached or a file
  // system is full; nothing is taken then.
  std::vector<Chunk> Allocate(int64_t bytes);
  void Free(std::vector<Chunk>* chunks);
  // Gives free space at the end of files back to the file system.
  void Trim();

  void Write(const Chunk& chunk, const void* data) override;
  void Read(const Chunk& chunk, void* data) override;

 private:
  // Direct engine.
  struct File {
    int path = 0;
    int number = 0;
    int descriptor = -1;
    int64_t end = 0;                  // its size in bytes
    std::map<int64_t, int64_t> free;  // offset: bytes; no two are adjacent
    int64_t in_use = 0;
  };
  // External engine: the files of one path, by their size.
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
  void FreeChunk(const Chunk& chunk);
  bool RemoveFreeFile();
  void TrimFile(File* file);
  bool Fits(int64_t more) const { return capacity_ < 0 || held_ + more <= capacity_; }
  [[noreturn]] void Full(int64_t bytes) const;

  const std::vector<std::string> folders_;
  const int64_t capacity_, chunk_bytes_;
  const bool external_;
  mutable std::mutex mutex_;
  std::vector<File> files_;  // the first of each path, then the second of each, ...: neighbours lie on different drives
  std::vector<Shelf> shelves_;
  int64_t held_ = 0;
};

}  // namespace dejax::offload
