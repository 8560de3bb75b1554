#include "activations/ring.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

namespace dejax::offload {
namespace {

constexpr int64_t kAlign = 512;
constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING
constexpr size_t kMostStalls = 4096;     // waits whose duration is not known yet
constexpr float kLeastStall = 0.01f;     // ms: two events with no wait between them are some 5 us apart

}  // namespace

Ring::Ring(Store* store, Stream compute)
    : store_(store), driver_(GetDriver()), events_(std::make_shared<EventPool>()),
      timers_(std::make_shared<EventPool>(/*timed=*/true)) {
  Check(driver_.stream_get_ctx(compute, &context_), "cuStreamGetCtx");
  const ContextScope scope(context_);
  Check(driver_.stream_create(&out_, kNonBlocking), "cuStreamCreate");
  Check(driver_.stream_create(&in_, kNonBlocking), "cuStreamCreate");
}

Ring::~Ring() {
  const ContextScope scope(context_);
  for (Event* event : {&consumed_, &consumed_seen_by_in_, &out_fence_, &last_in_, &last_out_}) event->reset();
  window_.clear();
  stalls_.clear();
  if (memory_ != 0) driver_.mem_free(memory_);
  driver_.stream_destroy(out_);
  driver_.stream_destroy(in_);
}

void Ring::Synchronize() {
  const ContextScope scope(context_);
  driver_.stream_synchronize(out_);
  driver_.stream_synchronize(in_);
  if (consumed_) driver_.event_synchronize(consumed_.get());
}

// Nothing may change in the ring meanwhile, but for entries that are dropped. Without a lock the mutex stays locked.
template <typename Submit>
void Ring::SubmitWithout(Lock* lock, const Submit& submit) {
  if (lock == nullptr) return submit();
  struct Flag {
    explicit Flag(bool* value) : value(value) { *value = true; }
    ~Flag() { *value = false; }
    bool* const value;
  };
  const Flag flag(&submitting_);
  const Unlocked unlocked(&store_->monitor_, *lock);
  submit();
}

void Ring::AwaitSubmissions(Lock& lock) {
  while (submitting_) {
    store_->monitor_.WaitForOthers(lock, std::chrono::milliseconds(200));
    store_->RequireOpen();
  }
}

// While its memory is exchanged the ring has none, and steps of other threads run as without a ring.
void Ring::Reserve(Lock& lock, int64_t bytes, Stream compute) {
  bytes = bytes / kAlign * kAlign;
  if (bytes <= capacity_) return;
  AwaitSubmissions(lock);
  if (bytes <= capacity_ || bytes == refused_ || resizing_) return;
  for (const EntryPtr& entry : window_) {
    if (!entry->copied_out) return;  // it is only here; a later call may resize
  }
  Empty();
  owner_.reset();
  const Event last_use = consumed_;
  const int64_t before = capacity_;
  DevicePointer memory = memory_;
  int64_t capacity = 0;
  memory_ = 0;
  capacity_ = 0;
  resizing_ = true;
  {
    const Unlocked unlocked(&store_->monitor_, lock);
    driver_.stream_synchronize(compute);  // a new size is rare: everything in flight may end first
    driver_.stream_synchronize(out_);
    driver_.stream_synchronize(in_);
    if (last_use) driver_.event_synchronize(last_use.get());
    if (memory != 0) driver_.mem_free(memory);
    memory = 0;
    for (int64_t size : {bytes, before}) {
      if (size > 0 && driver_.mem_alloc(&memory, static_cast<size_t>(size)) == 0) {
        capacity = size;
        break;
      }
    }
  }
  resizing_ = false;
  memory_ = memory;
  capacity_ = capacity;
  if (capacity != bytes) refused_ = bytes;
}

template <typename Copy>
void Ring::Pieces(int64_t offset, int64_t bytes, Copy copy) {
  const int64_t begin = offset % capacity_;
  const int64_t first = std::min(bytes, capacity_ - begin);
  copy(memory_ + begin, int64_t{0}, first);
  if (first < bytes) copy(memory_, first, bytes - first);
}

void Ring::Empty() {
  for (const EntryPtr& entry : window_) entry->in_ring = false;
  window_.clear();
}

// Makes the window this run's. Entries of the former run go to the host first.
void Ring::Own(Lock& lock, const RunPtr& run, Stream compute) {
  AwaitSubmissions(lock);
  while (owner_.lock() != run) {
    const auto only_here = std::find_if(window_.begin(), window_.end(), [](const EntryPtr& e) { return !e->copied_out; });
    if (only_here != window_.end()) {
      CopyOut(lock, EntryPtr(*only_here));  // may release the mutex: look again
      AwaitSubmissions(lock);
      continue;
    }
    Empty();
    owner_ = run;
    Wait(compute, last_out_);
    Wait(compute, last_in_);
    Wait(compute, consumed_);  // on the former run's stream, should it have had another
    consumed_ = events_->Record(compute);
    out_fence_ = last_out_;
    last_in_.reset();
  }
}

// Gives the entry a slot. False where the entry does not need one any more.
bool Ring::GiveSlot(Lock& lock, const EntryPtr& entry) {
  const bool in_ring = entry->in_ring;
  Slot* slot = store_->TakeSlot(lock, entry, /*pinned=*/true);
  if (!entry->live || entry->slot != nullptr || entry->in_ring != in_ring) {  // while the mutex was free
    store_->host_.Release(slot);
    return false;
  }
  entry->slot = slot;
  slot->serial = entry->serial;
  return true;
}

// Submits the copy of an entry of the window to a slot.
void Ring::CopyOut(Lock& lock, const EntryPtr& entry) {
  if (entry->slot == nullptr && !GiveSlot(lock, entry)) return;
  Wait(out_, entry->ready);
  Wait(out_, entry->slot->last_read);
  Wait(out_, entry->slot->last_write);
  Pieces(entry->offset, entry->bytes, [&](DevicePointer ring, int64_t at, int64_t bytes) {
    Check(driver_.copy_device_to_host(static_cast<char*>(entry->slot->data) + at, ring, bytes, out_), "cuMemcpyDtoHAsync");
  });
  entry->copied_out = events_->Record(out_);
  entry->slot->last_write = entry->copied_out;
  last_out_ = entry->copied_out;
  store_->stats_.copied_out_bytes += entry->bytes;
}

// Makes the compute stream wait, for all of `events`, and adds how long it then did to a counter once that is known.
void Ring::WaitCounted(Stream compute, std::initializer_list<const Event*> events, double* total) {
  Stall stall = WaitTimed(compute, events, total, stalls_.size() < kMostStalls);
  if (stall.end) stalls_.push_back(std::move(stall));
}

// Needs no mutex. The stall has no end where the stream need not wait.
Ring::Stall Ring::WaitTimed(Stream compute, std::initializer_list<const Event*> events, double* total, bool timed) {
  Stall stall;
  for (const Event* event : events) {
    if (!*event || driver_.event_query(event->get()) == 0) continue;
    if (!stall.begin && timed) stall.begin = timers_->Record(compute);
    Wait(compute, *event);
  }
  if (stall.begin) stall.end = timers_->Record(compute);
  stall.total = total;
  return stall;
}

void Ring::CountStalls() {
  while (!stalls_.empty() && driver_.event_query(stalls_.front().end.get()) == 0) {
    const Stall& stall = stalls_.front();
    float milliseconds = 0;
    const bool known = driver_.event_elapsed_time(&milliseconds, stall.begin.get(), stall.end.get()) == 0;
    if (known && milliseconds > kLeastStall) *stall.total += 1e-3 * milliseconds;
    stalls_.pop_front();
  }
}

// An entry larger than the ring goes straight to the host, and the compute stream waits for that.
void Ring::PushToHost(Lock& lock, const EntryPtr& entry, DevicePointer data, Stream compute) {
  if (entry->slot == nullptr && !GiveSlot(lock, entry)) return;
  Slot* const slot = entry->slot;
  Wait(compute, slot->last_read);
  Wait(compute, slot->last_write);
  if (entry->bytes > 0) {
    Check(driver_.copy_device_to_host(slot->data, data, entry->bytes, compute), "cuMemcpyDtoHAsync");
  }
  entry->copied_out = events_->Record(compute);
  slot->last_write = entry->copied_out;
  store_->stats_.copied_out_bytes += entry->bytes;
}

// Whether an entry needs no copy on the host: it is one of the last of a forward pass, which backward fetches from the
// ring. An entry that the host cannot hold stays as long as it can.
bool Ring::Stays(const Run& run, const Entry& entry, int64_t span) const {
  if (store_->options_.host_bytes < entry.bytes) return true;
  const Peak* const peak = store_->prediction_.PeakOf(run);
  const bool on_top = peak != nullptr && peak->top >= entry.offset + span && peak->top - entry.offset <= capacity_;
  return on_top && store_->prediction_.UsesOf(entry.site) == Prediction::Uses::kOnce;
}

// Entries at the bottom of the window leave until `span` bytes at `offset` are free.
void Ring::MakeRoom(Lock& lock, const RunPtr& run, int64_t offset, int64_t span, Stream compute) {
  while (true) {
    Own(lock, run, compute);  // each time: CopyOut may release the mutex, and another run take the window
    if (window_.empty() || window_.front()->offset >= offset + span - capacity_) return;
    const EntryPtr bottom = window_.front();
    if (!bottom->copied_out) {
      CopyOut(lock, bottom);
      continue;
    }
    // For each: an entry that was to stay is copied later than those above it.
    WaitCounted(compute, {&bottom->copied_out}, &store_->stats_.device_store_stall_seconds);
    bottom->in_ring = false;
    window_.pop_front();
    if (store_->ShouldWrite(run, *bottom)) store_->io_.QueueWrite(bottom);
  }
}

void Ring::Push(Lock& lock, const RunPtr& run, const EntryPtr& entry, DevicePointer data, Stream compute) {
  const int64_t span = RoundUp(entry->bytes, kAlign);
  entry->offset = run->top;
  if (span > capacity_ || span == 0) return PushToHost(lock, entry, data, compute);
  const bool stays = Stays(*run, *entry, span);
  if (!stays && !GiveSlot(lock, entry)) return;
  MakeRoom(lock, run, entry->offset, span, compute);
  if (!entry->live) return;
  if (span > capacity_) return PushToHost(lock, entry, data, compute);  // another call exchanges the ring's memory
  WaitCounted(compute, {&out_fence_, &last_in_}, &store_->stats_.device_store_stall_seconds);
  last_in_.reset();
  Pieces(entry->offset, entry->bytes, [&](DevicePointer ring, int64_t at, int64_t bytes) {
    Check(driver_.copy_device_to_device(ring, data + at, bytes, compute), "cuMemcpyDtoDAsync");
  });
  entry->ready = events_->Record(compute);
  entry->span = span;
  entry->in_ring = true;
  entry->prefetched = false;
  run->top = entry->offset + span;
  run->peak_top = std::max(run->peak_top, run->top);
  window_.push_back(entry);
  if (!stays) CopyOut(lock, entry);
}

// Brings the entry right below the window back into it.
void Ring::Load(Lock* lock, const EntryPtr& entry) {
  Slot* const slot = entry->slot;
  const Event consumed = consumed_, seen = consumed_seen_by_in_;
  const Event fence = out_fence_, copied_out = entry->copied_out, last_write = slot->last_write, last_read = slot->last_read;
  Event ready;
  ++slot->pins;
  try {
    SubmitWithout(lock, [&] {
      // The slot is free once its last reader has ended, so the last must end last.
      if (consumed != seen) Wait(in_, consumed);
      for (const Event* event : {&fence, &copied_out, &last_write, &last_read}) Wait(in_, *event);
      Pieces(entry->offset, entry->bytes, [&](DevicePointer ring, int64_t at, int64_t bytes) {
        Check(driver_.copy_host_to_device(ring, static_cast<char*>(slot->data) + at, bytes, in_), "cuMemcpyHtoDAsync");
      });
      ready = events_->Record(in_);
    });
  } catch (...) {
    --slot->pins;
    throw;
  }
  --slot->pins;
  consumed_seen_by_in_ = consumed;
  slot->last_read = ready;
  last_in_ = ready;
  if (!entry->live) return;  // dropped while the mutex was free
  entry->ready = ready;
  entry->in_ring = true;
  entry->prefetched = true;
  window_.push_front(entry);
}

void Ring::Pop(Lock& lock, const RunPtr& run, const EntryPtr& entry, DevicePointer data, Stream compute) {
  bool loaded_now = false;
  // The entry leaves the ring, and its files, with its first fetch: further ones need its bytes on the host.
  if (entry->in_ring && entry->slot == nullptr && store_->host_.CanHold(entry->bytes) &&
      store_->host_.IsShared(*entry)) {
    CopyOut(lock, entry);
  }
  if (!entry->in_ring) {
    store_->AwaitHost(lock, entry, /*pinned=*/true);
    if (run && entry->live) Own(lock, run, compute);
    const bool below = window_.empty() || (entry->offset + entry->span == window_.front()->offset);
    if (!entry->in_ring && run && entry->live && entry->slot != nullptr && !entry->reading && entry->span > 0 && below &&
        run->top - entry->offset <= capacity_) {
      // Through the ring all the same: the launch thread is ahead of the GPU, so the copy overlaps earlier work.
      Load(&lock, entry);
      loaded_now = true;
    }
  }
  AwaitSubmissions(lock);
  if (entry->in_ring) {
    const Event ready = entry->ready;
    const bool timed = entry->prefetched && stalls_.size() < kMostStalls;
    Stall stall;
    Event consumed;
    SubmitWithout(&lock, [&] {
      stall = WaitTimed(compute, {&ready}, &store_->stats_.device_fetch_stall_seconds, timed);
      Pieces(entry->offset, entry->bytes, [&](DevicePointer ring, int64_t at, int64_t bytes) {
        Check(driver_.copy_device_to_device(data + at, ring, bytes, compute), "cuMemcpyDtoDAsync");
      });
      consumed = events_->Record(compute);
    });
    if (stall.end) stalls_.push_back(std::move(stall));
    auto& counter = loaded_now ? store_->stats_.demand_bytes
                               : (entry->prefetched ? store_->stats_.prefetched_bytes : store_->stats_.ring_hit_bytes);
    counter += entry->bytes;
    consumed_ = consumed;
    return;
  }
  store_->AwaitHost(lock, entry, /*pinned=*/true);
  Wait(compute, entry->copied_out);
  Wait(compute, entry->slot->last_write);
  Wait(compute, entry->slot->last_read);
  if (entry->bytes > 0) {
    Check(driver_.copy_host_to_device(data, entry->slot->data, entry->bytes, compute), "cuMemcpyHtoDAsync");
  }
  consumed_ = events_->Record(compute);
  entry->slot->last_read = consumed_;
  store_->stats_.demand_bytes += entry->bytes;
}

void Ring::Leave(const EntryPtr& entry) {
  if (!entry->in_ring) return;
  const auto at = std::find(window_.rbegin(), window_.rend(), entry);
  if (at == window_.rend()) return;  // of another device
  window_.erase(std::next(at).base());
  entry->in_ring = false;
  if (entry->copied_out) out_fence_ = last_out_;
}

void Ring::Prefetch(const RunPtr& run, Lock* lock) {
  while (run && owner_.lock() == run && capacity_ != 0 && !submitting_) {
    auto at = run->stack.end();
    if (!window_.empty()) {
      at = std::lower_bound(run->stack.begin(), run->stack.end(), window_.front()->serial,
                            [](const EntryPtr& e, uint64_t serial) { return e->serial < serial; });
    }
    EntryPtr next;
    while (at != run->stack.begin()) {
      --at;
      if ((*at)->live && (*at)->span > 0) {
        next = *at;
        break;
      }
    }
    if (!next || next->in_ring || next->slot == nullptr || next->reading) return;
    if (run->top - next->offset > capacity_) return;
    Load(lock, next);
  }
}

void Ring::SetHandle(DevicePointer handle, uint64_t value, Stream compute) {
  Check(driver_.memset_d32(handle, static_cast<unsigned>(value), 1, compute), "cuMemsetD32Async");
  Check(driver_.memset_d32(handle + 4, static_cast<unsigned>(value >> 32), 1, compute), "cuMemsetD32Async");
}

}  // namespace dejax::offload
