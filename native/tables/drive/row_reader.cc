#include "tables/drive/row_reader.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <thread>
#include <utility>

namespace dejax {
namespace {

using offload::Chunk;
using offload::kPage;
using offload::Lock;

constexpr int64_t kChunkBytes = 128 << 10;  // of one read, at most: drives reach their rate for long runs with less
constexpr int64_t kIdsAtOnce = 1024;        // looked up while the mutex is held
constexpr size_t kMostKept = 256;
constexpr int kThreads = 32;  // without a ring each thread has one read in flight

std::mutex& ReadersMutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

std::unordered_map<int64_t, std::weak_ptr<RowReader>>& Readers() {
  static auto* const readers = new std::unordered_map<int64_t, std::weak_ptr<RowReader>>;
  return *readers;
}

std::atomic<int64_t> next_number{1};

std::shared_ptr<char> AllocatePages(int64_t bytes) {
  void* data = nullptr;
  if (posix_memalign(&data, kPage, static_cast<size_t>(std::max<int64_t>(bytes, 1))) != 0) throw std::bad_alloc();
  return std::shared_ptr<char>(static_cast<char*>(data), [](char* at) { std::free(at); });
}

}  // namespace

// Reads of a request's missing rows. A chunk has whole pages of one file, and some of the rows. A request that is released
// before its load has ended keeps its pins until then: the load fills its slots.
struct RowReader::Load : offload::BlockIo {
  char* MemoryOf(size_t chunk, int64_t) override { return into[chunk]; }
  void Arrived(size_t chunk, const char* data) override;
  void ChunkEnded(size_t chunk, int64_t done, const std::string& why) override;
  char* WholeRows(size_t chunk, int64_t row_bytes) const;

  RowReader* reader = nullptr;  // it ends its queue before it ends itself
  int64_t number = 0;
  std::vector<Missing> rows;  // in the order of files and offsets
  std::vector<Chunk> of;      // `chunks` points to it
  std::vector<std::pair<size_t, size_t>> within;  // of each chunk: the first of its rows, and the one after the last
  std::vector<char*> into;                        // of each chunk: where its rows go as they lie; null: row by row
  std::shared_ptr<char> more;                     // the request's, which it fills
  // With the monitor's mutex.
  size_t left = 0;
  int64_t read_bytes = 0, reads = 0;
  bool done = false;
  std::string error;
  // With the reader's `mutex_`.
  bool ended = false;
  RequestPtr released;  // the request that was released before
};

RowReader::RowReader(Options options)
    : options_(std::move(options)), number_(next_number++), process_(getpid()),
      files_(options_.paths, options_.layout, options_.direct),
      cache_(options_.layout.rows, options_.slots, options_.wanted),
      filled_by_(static_cast<size_t>(options_.slots)) {}

std::shared_ptr<RowReader> RowReader::Open(Options options) {
  std::shared_ptr<RowReader> reader(new RowReader(std::move(options)));
  reader->Start();
  std::lock_guard<std::mutex> lock(ReadersMutex());
  Readers()[reader->number_] = reader;
  return reader;
}

std::shared_ptr<RowReader> RowReader::Find(int64_t number) {
  std::lock_guard<std::mutex> lock(ReadersMutex());
  const auto found = Readers().find(number);
  return found == Readers().end() ? nullptr : found->second.lock();
}

void RowReader::Start() {
  offload::DiskOptions how;
  how.chunk_bytes = kChunkBytes;
  how.checksum = false;
  const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  std::vector<std::unique_ptr<offload::ReadRing>> rings;
  std::string why = "it was not asked for";
  const int wanted = options_.threads > 0 ? options_.threads : std::clamp(cores / 4, 1, 4);
  for (int k = 0; options_.use_ring && k < wanted; ++k) {
    auto ring = offload::ReadRing::Make(static_cast<unsigned>(options_.depth), &why);
    if (!ring) break;
    rings.push_back(std::move(ring));
  }
  how.num_threads = options_.threads > 0 ? options_.threads : kThreads;
  queue_ = std::make_unique<offload::BlockQueue>(how, &files_, &monitor_, /*most_writes=*/1);
  if (!rings.empty()) {
    engine_ = "io_uring";
    queue_->StartRings("dejax-drive", std::move(rings));
  } else {
    engine_ = "threads (no io_uring: " + why + ")";
    queue_->StartThreads("dejax-drive");
  }
  if (!files_.direct()) engine_ += ", through the page cache";
}

RowReader::~RowReader() { Close(); }

void RowReader::Close() {
  if (process_ != getpid()) {  // a forked child has none of the threads
    static_cast<void>(queue_.release());
    return;
  }
  {
    std::lock_guard<std::mutex> lock(ReadersMutex());
    Readers().erase(number_);
  }
  {
    Lock lock(monitor_.mutex);
    monitor_.closing = true;
    monitor_.changed.wait(lock, [&] { return monitor_.active == 0; });
    if (queue_) queue_->BeginClose();
  }
  if (queue_) queue_->Join();
}

RowReader::Use::Use(RowReader* reader) : reader_(reader) {
  Lock lock(reader->monitor_.mutex);
  if (reader->monitor_.closing) throw std::runtime_error("the table was closed");
  ++reader->monitor_.active;
}

RowReader::Use::~Use() {
  Lock lock(reader_->monitor_.mutex);
  --reader_->monitor_.active;
  reader_->monitor_.changed.notify_all();
}

// ------------------------------------------------------------------------------------------------ requests

// Finds a place for each id. What must be read goes to the load.
template <typename Id>
void RowReader::LookUp(const Id* ids, int64_t count, bool clip, bool ahead, Request* request,
                       const std::shared_ptr<Load>& load) {
  const int64_t rows = options_.layout.rows, row_bytes = options_.layout.row_bytes;
  std::vector<int64_t> beyond;  // rows without a slot
  std::unordered_map<int64_t, int64_t> numbers;
  int64_t hits = 0, on_device = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    load->number = ++last_load_;
    open_loads_.push_back(load);
  }
  for (int64_t begin = 0; begin < count; begin += kIdsAtOnce) {
    std::lock_guard<std::mutex> lock(mutex_);
    const int64_t first_open = open_loads_.front()->number;
    for (int64_t i = begin; i < std::min(count, begin + kIdsAtOnce); ++i) {
      int64_t row = ids[i];
      if (ids[i] == kOnDevice<Id>) {
        ++on_device;
        continue;
      }
      if (row < 0 || row >= rows) {
        if (!request->has_outside) request->outside = row;
        request->has_outside = true;
        if (!clip || rows == 0) continue;
        row = std::clamp<int64_t>(row, 0, rows - 1);
      }
      int64_t slot = cache_.Find(row);
      if (slot >= 0) {
        cache_.Pin(slot);
        hits += !ahead && cache_.Touch(slot);
        if (filled_by_[slot] >= first_open && filled_by_[slot] != load->number) {
          const auto reads = [by = filled_by_[slot]](const auto& open) { return open->number == by; };
          const auto other = std::find_if(open_loads_.begin(), open_loads_.end(), reads);
          if (other != open_loads_.end() && (request->loads.empty() || request->loads.back() != *other)) {
            request->loads.push_back(*other);
          }
        }
      } else if (const auto known = numbers.find(row); known != numbers.end()) {
        slot = cache_.slots() + known->second;
      } else {
        load->rows.push_back({row, files_.PlaceOf(row), nullptr});  // first: a slot that nobody reads must not be found
        if ((slot = cache_.Insert(row)) >= 0) {
          filled_by_[slot] = load->number;
          if (ahead) cache_.MarkAhead(slot);
          load->rows.back().to = options_.cache + slot * row_bytes;
        } else {
          load->rows.pop_back();
          if (!ahead) {
            slot = cache_.slots() + static_cast<int64_t>(beyond.size());
            numbers[row] = static_cast<int64_t>(beyond.size());
            beyond.push_back(row);
          }
        }
      }
      request->places[i] = slot;
    }
  }
  request->more_rows = static_cast<int64_t>(beyond.size());
  if (!beyond.empty()) load->more = request->more = AllocatePages(request->more_rows * row_bytes);
  for (size_t k = 0; k < beyond.size(); ++k) {
    load->rows.push_back({beyond[k], files_.PlaceOf(beyond[k]), request->more.get() + static_cast<int64_t>(k) * row_bytes});
  }
  std::sort(request->loads.begin(), request->loads.end());
  request->loads.erase(std::unique(request->loads.begin(), request->loads.end()), request->loads.end());
  std::lock_guard<std::mutex> lock(mutex_);
  stats_.cache_rows += hits;
  stats_.device_rows += on_device;
  stats_.drive_rows += static_cast<int64_t>(load->rows.size());
}

template <typename Id>
RowReader::RequestPtr RowReader::Begin(const Id* ids, int64_t count, bool clip, bool ahead) {
  const auto request = std::make_shared<Request>();
  const auto load = std::make_shared<Load>();
  load->reader = this;
  request->places.resize(static_cast<size_t>(count), -1);
  if (options_.layout.row_bytes == 0) return request;
  try {
    LookUp(ids, count, clip, ahead, request.get(), load);
    Plan(load.get());
    if (load->rows.empty()) {
      std::lock_guard<std::mutex> lock(mutex_);
      LeaveOpenLoads(load.get());
      return request;
    }
    request->loads.push_back(load);
    request->own = load;
    Push(load);
  } catch (const std::exception& error) {  // others may wait for the load
    Fail(load.get(), error.what());
    Release(request);
    throw;
  }
  return request;
}

template RowReader::RequestPtr RowReader::Begin(const int32_t*, int64_t, bool, bool);
template RowReader::RequestPtr RowReader::Begin(const int64_t*, int64_t, bool, bool);

// The chunks of a load: whole pages, those of neighbouring rows together.
void RowReader::Plan(Load* load) const {
  std::sort(load->rows.begin(), load->rows.end(), [](const Missing& a, const Missing& b) {
    return a.at.file != b.at.file ? a.at.file < b.at.file : a.at.offset < b.at.offset;
  });
  const int64_t row_bytes = options_.layout.row_bytes;
  for (size_t k = 0; k < load->rows.size(); ++k) {
    const TableFiles::Place at = load->rows[k].at;
    const int64_t end = offload::WholePages(at.offset + row_bytes);
    int64_t begin = at.offset / kPage * kPage;
    if (!load->of.empty()) {
      Chunk& last = load->of.back();
      const int64_t reached = last.offset + last.bytes;
      if (last.file == at.file && begin <= reached) {
        // The part of the row that the last chunk has, or can get.
        last.bytes = std::max(last.bytes, std::min(end - last.offset, std::max(last.bytes, kChunkBytes)));
        if (at.offset < last.offset + last.bytes) load->within.back().second = k + 1;
        begin = std::max(begin, last.offset + last.bytes);
      }
    }
    for (; begin < end; begin += kChunkBytes) {
      Chunk chunk;
      chunk.file = at.file;
      chunk.offset = begin;
      chunk.bytes = std::min(kChunkBytes, end - begin);
      load->of.push_back(chunk);
      load->within.emplace_back(k, k + 1);
    }
  }
  for (size_t k = 0; k < load->of.size(); ++k) load->into.push_back(load->WholeRows(k, row_bytes));
  load->chunks = &load->of;
  load->left = load->of.size();
}

void RowReader::Push(const std::shared_ptr<Load>& load) {
  Lock lock(monitor_.mutex);
  queue_->Push(load);
}

void RowReader::Fail(Load* load, const std::string& why) {
  Lock lock(monitor_.mutex);
  load->error = why;
  Ended(load);
}

void RowReader::Wait(const RequestPtr& request) {
  std::string error;
  {
    Lock lock(monitor_.mutex);
    const double begin = offload::Seconds();
    bool waited = false;
    for (const auto& load : request->loads) {
      while (!load->done) {
        waited = true;
        loaded_.wait(lock);
      }
      if (error.empty()) error = load->error;
    }
    if (waited) {
      std::lock_guard<std::mutex> own(mutex_);
      ++stats_.waits;
      stats_.wait_seconds += offload::Seconds() - begin;
    }
  }
  if (!error.empty()) throw std::runtime_error(error);
}

void RowReader::Release(const RequestPtr& request) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!request->pinned) return;
  request->pinned = false;
  if (request->own && !request->own->ended) {
    request->own->released = request;
  } else {
    UnpinPlaces(*request);
  }
}

// With `mutex_`.
void RowReader::UnpinPlaces(const Request& request) {
  for (const int64_t place : request.places) {
    if (place >= 0 && place < cache_.slots()) cache_.Unpin(place);
  }
}

int64_t RowReader::Keep(RequestPtr request) {
  RequestPtr oldest;
  int64_t number = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    number = next_kept_++;
    kept_[number] = std::move(request);
    if (kept_.size() > kMostKept) {
      oldest = kept_.begin()->second;
      kept_.erase(kept_.begin());
    }
  }
  if (oldest) Release(oldest);
  return number;
}

RowReader::RequestPtr RowReader::Take(int64_t kept) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = kept_.find(kept);
  if (found == kept_.end()) return nullptr;
  RequestPtr request = std::move(found->second);
  kept_.erase(found);
  return request;
}

RowReader::Stats RowReader::GetStats() {
  std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

int64_t RowReader::rows_in_cache() {
  std::lock_guard<std::mutex> lock(mutex_);
  return cache_.held();
}

int64_t RowReader::requests_kept() {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int64_t>(kept_.size());
}

// ------------------------------------------------------------------------------------------------ reads

void RowReader::RequireSums(const Chunk& chunk, const char* data) const {
  if (options_.checksums.empty()) return;
  int64_t first = chunk.offset / kPage;
  const int64_t pages = options_.pages[chunk.file];
  const uint64_t* sums = options_.checksums.data();
  for (int file = 0; file < chunk.file; ++file) sums += options_.pages[file];
  for (int64_t at = 0; at < chunk.bytes && first < pages; at += kPage, ++first) {
    if (offload::Checksum(data + at, kPage) == sums[first]) continue;
    throw std::runtime_error(files_.Name(chunk) + " is damaged at byte " + std::to_string(first * kPage) +
                             ": its block does not have the checksum with which it was written; write the table again");
  }
}

// Where the rows of a chunk go, if the drive can put them there: rows of whole pages whose places follow one another.
char* RowReader::Load::WholeRows(size_t chunk, int64_t row_bytes) const {
  const auto [first, last] = within[chunk];
  const bool whole = of[chunk].offset == rows[first].at.offset &&
                     of[chunk].bytes == static_cast<int64_t>(last - first) * row_bytes;
  if (!whole || row_bytes % kPage != 0 || reinterpret_cast<uintptr_t>(rows[first].to) % kPage != 0) return nullptr;
  for (size_t k = first + 1; k < last; ++k) {
    if (rows[k].to != rows[k - 1].to + row_bytes || rows[k].at.offset != rows[k - 1].at.offset + row_bytes) return nullptr;
  }
  return rows[first].to;
}

void RowReader::Load::Arrived(size_t chunk, const char* data) {
  const Chunk& here = of[chunk];
  reader->RequireSums(here, data);
  if (into[chunk] != nullptr) return;
  const int64_t row_bytes = reader->options_.layout.row_bytes;
  for (size_t k = within[chunk].first; k < within[chunk].second; ++k) {
    const Missing& row = rows[k];
    const int64_t begin = std::max(row.at.offset, here.offset);
    const int64_t end = std::min(row.at.offset + row_bytes, here.offset + here.bytes);
    if (begin < end) {
      std::memcpy(row.to + (begin - row.at.offset), data + (begin - here.offset), static_cast<size_t>(end - begin));
    }
  }
}

void RowReader::Load::ChunkEnded(size_t chunk, int64_t bytes_done, const std::string& why) {
  if (!why.empty() && error.empty()) {
    const std::string row = chunk < within.size() ? "row " + std::to_string(rows[within[chunk].first].row) + ": " : "";
    error = row + why;
  }
  read_bytes += bytes_done;
  reads += bytes_done > 0;
  if (--left == 0) reader->Ended(this);
}

// All reads of a load have ended. The monitor's mutex is held.
void RowReader::Ended(Load* load) {
  if (load->error.empty()) {
    try {
      files_.RequireUnchanged();
    } catch (const std::runtime_error& error) {
      load->error = "row " + std::to_string(load->rows.front().row) + ": " + error.what();
    }
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.read_bytes += load->read_bytes;
    stats_.reads += load->reads;
    if (!load->error.empty()) ForgetRows(*load);
    LeaveOpenLoads(load);
  }
  load->done = true;
  load->more = nullptr;
  loaded_.notify_all();
}

// With `mutex_`: no request finds rows of a load that failed.
void RowReader::ForgetRows(const Load& load) {
  for (const Missing& row : load.rows) {
    const int64_t slot = (row.to - options_.cache) / options_.layout.row_bytes;
    if (row.to >= options_.cache && slot < cache_.slots()) cache_.Forget(slot);
  }
}

// With `mutex_`: all reads of a load have ended, or it has none.
void RowReader::LeaveOpenLoads(Load* load) {
  load->ended = true;
  if (load->released) UnpinPlaces(*load->released);
  load->released = nullptr;
  const auto same = [load](const std::shared_ptr<Load>& open) { return open.get() == load; };
  open_loads_.erase(std::remove_if(open_loads_.begin(), open_loads_.end(), same), open_loads_.end());
}

}  // namespace dejax
