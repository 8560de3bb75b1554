// Reads of files in flight at once, by io_uring. Its system calls are made here, so that neither a library nor the kernel's
// headers are needed. Many containers forbid them: then there is no ring, and threads read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace dejax::offload {

// One thread uses it.
class ReadRing {
 public:
  // depth: the most reads in flight. Null, with a reason, where the kernel has or allows no io_uring.
  static std::unique_ptr<ReadRing> Make(unsigned depth, std::string* why);
  ~ReadRing();
  ReadRing(const ReadRing&) = delete;

  unsigned depth() const { return depth_; }
  // At most `depth` reads may be in flight.
  void Prepare(int file, void* data, unsigned bytes, int64_t offset, uint64_t user);
  // Hands what was prepared to the kernel, and returns when `wait` reads have ended. False: the kernel takes nothing now.
  bool Submit(unsigned wait);
  // A read that has ended; false where there is none. result: its bytes, or below 0 an error.
  bool Take(uint64_t* user, int* result);

 private:
  ReadRing() = default;
  uint32_t* At(uint32_t offset) const { return reinterpret_cast<uint32_t*>(rings_ + offset); }

  unsigned depth_ = 0;
  int ring_ = -1;
  char* rings_ = nullptr;
  size_t rings_bytes_ = 0;
  char* entries_ = nullptr;
  size_t entries_bytes_ = 0;
  uint32_t *sent_ = nullptr, *added_ = nullptr, *order_ = nullptr;  // head, tail and array of the submission queue
  uint32_t *taken_ = nullptr, *ended_ = nullptr;                    // head and tail of the completion queue
  uint32_t sending_mask_ = 0, ended_mask_ = 0, results_ = 0;
};

}  // namespace dejax::offload
