#include "blocks/read_ring.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace dejax::offload {
namespace {

// The kernel's interface, which never changes: the numbers of its calls are those of all architectures, and its
// structures those of linux/io_uring.h.
constexpr long kSetup = 425, kEnter = 426, kRegister = 427;
constexpr uint32_t kSingleMap = 1, kGetEvents = 1, kProbe = 8, kSupported = 1;
constexpr uint8_t kRead = 22;
constexpr int64_t kRingsAt = 0, kEntriesAt = 0x10000000;

struct SubmissionOffsets {
  uint32_t head, tail, mask, entries, flags, dropped, array, reserved;
  uint64_t address;
};
struct CompletionOffsets {
  uint32_t head, tail, mask, entries, overflow, results, flags, reserved;
  uint64_t address;
};
struct Parameters {
  uint32_t submissions, completions, flags, cpu, idle, features, queue, reserved[3];
  SubmissionOffsets submission;
  CompletionOffsets completion;
};
static_assert(sizeof(Parameters) == 120);

struct Entry {
  uint8_t operation, flags;
  uint16_t priority;
  int32_t file;
  uint64_t offset, address;
  uint32_t bytes, read_flags;
  uint64_t user, rest[3];
};
static_assert(sizeof(Entry) == 64);

struct Ended {
  uint64_t user;
  int32_t result;
  uint32_t flags;
};
static_assert(sizeof(Ended) == 16);

struct Operation {
  uint8_t number, reserved;
  uint16_t flags;
  uint32_t more;
};
struct Probe {
  uint8_t last, count;
  uint16_t reserved;
  uint32_t more[3];
  Operation operations[64];
};

bool CanRead(int ring) {
  Probe probe = {};
  if (syscall(kRegister, ring, kProbe, &probe, 64) != 0) return false;
  return probe.last >= kRead && (probe.operations[kRead].flags & kSupported) != 0;
}

char* Map(int ring, size_t bytes, int64_t at) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, at);
  return data == MAP_FAILED ? nullptr : static_cast<char*>(data);
}

}  // namespace

std::unique_ptr<ReadRing> ReadRing::Make(unsigned depth, std::string* why) {
  Parameters parameters = {};
  std::unique_ptr<ReadRing> made(new ReadRing);
  made->ring_ = static_cast<int>(syscall(kSetup, depth, &parameters));
  if (made->ring_ < 0) {
    *why = std::string("io_uring_setup: ") + std::strerror(errno);
    return nullptr;
  }
  if ((parameters.features & kSingleMap) == 0 || !CanRead(made->ring_)) {
    *why = "this kernel's io_uring is too old";
    return nullptr;
  }
  const SubmissionOffsets& to = parameters.submission;
  const CompletionOffsets& from = parameters.completion;
  made->rings_bytes_ = std::max<size_t>(to.array + parameters.submissions * sizeof(uint32_t),
                                        from.results + parameters.completions * sizeof(Ended));
  made->entries_bytes_ = parameters.submissions * sizeof(Entry);
  made->rings_ = Map(made->ring_, made->rings_bytes_, kRingsAt);
  made->entries_ = Map(made->ring_, made->entries_bytes_, kEntriesAt);
  if (made->rings_ == nullptr || made->entries_ == nullptr) {
    *why = std::string("io_uring, mmap: ") + std::strerror(errno);
    return nullptr;
  }
  made->depth_ = depth;
  made->sent_ = made->At(to.head);
  made->added_ = made->At(to.tail);
  made->order_ = made->At(to.array);
  made->sending_mask_ = *made->At(to.mask);
  made->taken_ = made->At(from.head);
  made->ended_ = made->At(from.tail);
  made->ended_mask_ = *made->At(from.mask);
  made->results_ = from.results;
  return made;
}

ReadRing::~ReadRing() {
  if (rings_ != nullptr) munmap(rings_, rings_bytes_);
  if (entries_ != nullptr) munmap(entries_, entries_bytes_);
  if (ring_ >= 0) close(ring_);
}

void ReadRing::Prepare(int file, void* data, unsigned bytes, int64_t offset, uint64_t user) {
  const uint32_t at = *added_, place = at & sending_mask_;
  Entry entry = {};
  entry.operation = kRead;
  entry.file = file;
  entry.offset = static_cast<uint64_t>(offset);
  entry.address = reinterpret_cast<uint64_t>(data);
  entry.bytes = bytes;
  entry.user = user;
  std::memcpy(entries_ + place * sizeof(Entry), &entry, sizeof(Entry));
  order_[place] = place;
  __atomic_store_n(added_, at + 1, __ATOMIC_RELEASE);
}

bool ReadRing::Submit(unsigned wait) {
  while (true) {
    const uint32_t waiting = *added_ - __atomic_load_n(sent_, __ATOMIC_ACQUIRE);
    if (waiting == 0 && wait == 0) return true;
    if (syscall(kEnter, ring_, waiting, wait, wait > 0 ? kGetEvents : 0, nullptr, 0) >= 0) {
      if (*added_ == __atomic_load_n(sent_, __ATOMIC_ACQUIRE)) return true;
    } else if (errno != EINTR) {
      return false;
    }
    if (*taken_ != __atomic_load_n(ended_, __ATOMIC_ACQUIRE)) wait = 0;
  }
}

bool ReadRing::Take(uint64_t* user, int* result) {
  const uint32_t at = *taken_;
  if (at == __atomic_load_n(ended_, __ATOMIC_ACQUIRE)) return false;
  Ended ended;
  std::memcpy(&ended, rings_ + results_ + (at & ended_mask_) * sizeof(Ended), sizeof(Ended));
  *user = ended.user;
  *result = ended.result;
  __atomic_store_n(taken_, at + 1, __ATOMIC_RELEASE);
  return true;
}

}  // namespace dejax::offload
