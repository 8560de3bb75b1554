// What a BlockQueue reads from and writes to: chunks of files.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

namespace dejax::offload {

constexpr int64_t kPage = 4096;

constexpr int64_t WholePages(int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

struct Chunk {
  int path = 0;
  int file = 0;        // direct engine only
  int64_t offset = 0;  // in that file; external engine: the number of the chunk's own file
  int64_t bytes = 0;   // whole pages
  uint64_t checksum = 0;
};

// 64-bit hash of memory, about as fast as one core reads it. It finds damage, not an adversary's changes. Of tables on a
// drive, dejax/_drive_layout.py computes the same.
uint64_t Checksum(const void* data, int64_t bytes);

class Interceptor;

class BlockSource {
 public:
  virtual ~BlockSource() = default;
  virtual std::string Name(const Chunk& chunk) const = 0;
  // `data` is aligned to kPage and has chunk.bytes. Throw std::runtime_error with the file and the cause.
  virtual void Write(const Chunk& chunk, const void* data) = 0;
  virtual void Read(const Chunk& chunk, void* data) = 0;
  // The open file of a chunk, for a ReadRing; below 0: `Read` alone can read it.
  virtual int Descriptor(const Chunk&) const { return -1; }

  void Intercept(std::shared_ptr<Interceptor> interceptor) {
    std::lock_guard<std::mutex> lock(intercepting_);
    interceptor_ = std::move(interceptor);
  }
  std::shared_ptr<Interceptor> interceptor() const {
    std::lock_guard<std::mutex> lock(intercepting_);
    return interceptor_;
  }

 private:
  mutable std::mutex intercepting_;
  std::shared_ptr<Interceptor> interceptor_;
};

}  // namespace dejax::offload
