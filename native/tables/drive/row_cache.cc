#include "tables/drive/row_cache.h"

#include <algorithm>
#include <limits>
#include <new>
#include <utility>

namespace dejax {

RowCache::RowCache(int64_t rows, int64_t slots, std::vector<uint64_t> wanted)
    : rows_(rows), wanted_(std::move(wanted)),
      places_(static_cast<int32_t*>(std::calloc(static_cast<size_t>(std::max<int64_t>(rows, 1)), sizeof(int32_t)))),
      slots_(static_cast<size_t>(slots)), small_target_(std::max<int64_t>(1, slots / 10)),
      remembered_(slots - small_target_) {
  if (!places_) throw std::bad_alloc();
  for (int64_t slot = slots; slot-- > 0;) free_.push_back(static_cast<int32_t>(slot));
}

bool RowCache::WasEvicted(int64_t row) const {
  const int32_t place = places_.get()[row];
  return place < 0 && evicted_ + static_cast<int64_t>(place) < remembered_;
}

void RowCache::NoteEvicted(int64_t row) {
  if (evicted_ == std::numeric_limits<int32_t>::max()) {  // after 2^31 evictions all are forgotten
    std::for_each(places_.get(), places_.get() + rows_, [](int32_t& place) { place = std::max(place, 0); });
    evicted_ = 0;
  }
  places_.get()[row] = -++evicted_;
}

int64_t RowCache::Insert(int64_t row) {
  int64_t slot = -1;
  if (!free_.empty()) {
    slot = free_.back();
    free_.pop_back();
  } else {
    slot = Evict();
    if (slot < 0) return -1;
  }
  const bool in_main = IsWanted(row) || WasEvicted(row);
  (in_main ? main_ : small_).push_back(static_cast<int32_t>(slot));
  slots_[slot] = {row, 1, 0, in_main, false};
  ++pinned_[in_main];
  places_.get()[row] = static_cast<int32_t>(slot) + 1;
  return slot;
}

void RowCache::Unpin(int64_t slot) {
  Slot& unpinned = slots_[slot];
  if (--unpinned.pins == 0) --pinned_[unpinned.in_main];
}

void RowCache::Forget(int64_t slot) {
  Slot& forgotten = slots_[slot];
  if (forgotten.row >= 0) places_.get()[forgotten.row] = 0;
  forgotten.row = -1;  // the queue's next round takes the slot
  forgotten.uses = 0;
}

// The slot of the row that goes, without a row and in no queue; -1 where all slots are pinned.
int64_t RowCache::Evict() {
  while (true) {
    const int64_t of_small = FreeToGo(false), of_main = FreeToGo(true);
    if (of_small == 0 && of_main == 0) return -1;
    const bool from_main = of_main > 0 && (of_small == 0 || static_cast<int64_t>(small_.size()) < small_target_);
    const int64_t slot = from_main ? EvictFromMain() : EvictFromSmall();
    if (slot >= 0) return slot;
  }
}

// Goes once around the queue.
int64_t RowCache::EvictFromSmall() {
  for (size_t left = small_.size(); left > 0; --left) {
    const int32_t slot = small_.front();
    small_.pop_front();
    Slot& found = slots_[slot];
    if (found.pins > 0) {
      small_.push_back(slot);
    } else if (found.uses > 1) {
      found.uses = 0;
      found.in_main = true;
      main_.push_back(slot);
    } else {
      if (found.row >= 0) NoteEvicted(found.row);
      return slot;
    }
  }
  return -1;
}

int64_t RowCache::EvictFromMain() {
  for (size_t left = main_.size(); left > 0; --left) {
    const int32_t slot = main_.front();
    main_.pop_front();
    Slot& found = slots_[slot];
    if (found.pins > 0) {
      main_.push_back(slot);
    } else if (found.uses > 0) {
      --found.uses;
      main_.push_back(slot);
    } else {
      if (found.row >= 0) places_.get()[found.row] = 0;
      return slot;
    }
  }
  return -1;
}

}  // namespace dejax
