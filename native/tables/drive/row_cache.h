// Which rows of a table on a drive lie in host memory. Eviction is S3-FIFO (Yang, Zhang, Qiu, Yue, Vigfusson: "FIFO queues
// are all you need for cache eviction", SOSP 2023): a row that is read once, as by a scan, passes through a small queue and
// leaves; one that is asked for again goes to the main queue; one that comes back soon after it left goes there at once.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <deque>
#include <memory>
#include <vector>

namespace dejax {

// Slots of host memory, and the row that each holds. A slot with pins keeps its row. Callers hold a mutex.
class RowCache {
 public:
  // wanted: a bit for each row, of rows that are expected to be asked for often: they begin in the main queue. Or empty.
  RowCache(int64_t rows, int64_t slots, std::vector<uint64_t> wanted);

  // The slot of a row; -1 for none.
  int64_t Find(int64_t row) const {
    const int32_t place = places_.get()[row];
    return place > 0 ? place - 1 : -1;
  }
  // A slot for a row that has none, pinned once; -1 where all slots are pinned.
  int64_t Insert(int64_t row);
  // A row was asked for. False: for the first time after it was read ahead.
  bool Touch(int64_t slot) {
    Slot& found = slots_[slot];
    if (found.ahead) return found.ahead = false;
    if (found.uses < kMostUses) ++found.uses;
    return true;
  }
  // The row is read before it is asked for.
  void MarkAhead(int64_t slot) { slots_[slot].ahead = true; }
  void Pin(int64_t slot) {
    Slot& pinned = slots_[slot];
    if (pinned.pins++ == 0) ++pinned_[pinned.in_main];
  }
  void Unpin(int64_t slot);
  // The row's bytes did not come: nobody finds it any more.
  void Forget(int64_t slot);

  int64_t slots() const { return static_cast<int64_t>(slots_.size()); }
  int64_t held() const { return static_cast<int64_t>(small_.size() + main_.size()); }

 private:
  static constexpr uint8_t kMostUses = 3;

  struct Slot {
    int64_t row = -1;  // -1: none
    int32_t pins = 0;
    uint8_t uses = 0;
    bool in_main = false;
    bool ahead = false;
  };

  bool IsWanted(int64_t row) const { return !wanted_.empty() && (wanted_[row / 64] >> (row % 64) & 1) != 0; }
  bool WasEvicted(int64_t row) const;
  void NoteEvicted(int64_t row);
  // Slots of a queue without pins.
  int64_t FreeToGo(bool in_main) const {
    return static_cast<int64_t>((in_main ? main_ : small_).size()) - pinned_[in_main];
  }
  int64_t Evict();
  int64_t EvictFromSmall();
  int64_t EvictFromMain();

  struct Free {
    void operator()(int32_t* data) const { std::free(data); }
  };

  const int64_t rows_;
  const std::vector<uint64_t> wanted_;
  // For each row: its slot + 1; 0 for none; -t where it was the t-th row that was evicted from the small queue. Pages of
  // rows that nobody asks for are never touched.
  std::unique_ptr<int32_t, Free> places_;
  std::vector<Slot> slots_;
  std::vector<int32_t> free_;
  std::deque<int32_t> small_, main_;
  int64_t small_target_, remembered_;
  int32_t evicted_ = 0;
  int64_t pinned_[2] = {};  // slots with pins, of the small queue and of the main one
};

}  // namespace dejax
