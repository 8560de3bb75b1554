#include "blocks/block_queue.h"

#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "driver/thread_name.h"

namespace dejax::offload {
namespace {

constexpr Result kNotReady = 600;  // CUDA_ERROR_NOT_READY
constexpr auto kPoll = std::chrono::microseconds(100);
// How long the thread of a ring is watched, and the shares of that time for which a thread that is too slow, or one that
// the drive does not need, works.
constexpr double kWatchSeconds = 4e-3, kTooBusy = 0.85, kHardlyBusy = 0.4;

double ThreadSeconds() {
  struct timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// cuEventSynchronize alone would keep a core busy for each waiting thread, and cores are needed to read and write.
// (Events made for a blocking wait cost the launch thread a millisecond a call.)
void Await(const Event& event) {
  while (GetDriver().event_query(event.get()) == kNotReady) std::this_thread::sleep_for(kPoll);
  Check(GetDriver().event_synchronize(event.get()), "cuEventSynchronize");
}

Chunk& ChunkOf(const ChunkJob& job) { return (*job.io->chunks)[job.chunk]; }

// Memory of whole pages for the chunks that a thread has under way.
class Pages {
 public:
  explicit Pages(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) throw std::bad_alloc();
  }
  ~Pages() { munmap(data_, bytes_); }
  Pages(const Pages&) = delete;
  char* data() const { return static_cast<char*>(data_); }

 private:
  const size_t bytes_;
  void* data_;
};

}  // namespace

void BlockQueue::StartThread(const char* name, int wanted, std::function<void()> work) {
  try {
    threads_.emplace_back([name, work = std::move(work)] {
      NameThisThread(name);
      work();
    });
  } catch (const std::system_error& error) {
    {
      const Lock lock(monitor_->mutex);
      BeginClose();
    }
    Join();
    throw std::runtime_error("offload: I/O thread " + std::to_string(threads_.size() + 1) + " of " +
                             std::to_string(wanted) + " cannot be started (" + error.what() +
                             "); give a smaller io_threads, or raise the limits of the process");
  }
}

void BlockQueue::StartThreads(const char* name) {
  for (int i = 0; i < options_.num_threads; ++i) StartThread(name, options_.num_threads, [this] { Work(); });
}

void BlockQueue::StartRings(const char* name, std::vector<std::unique_ptr<ReadRing>> rings) {
  rings_ = std::move(rings);
  for (size_t number = 0; number < rings_.size(); ++number) {
    StartThread(name, static_cast<int>(rings_.size()), [this, number] { WorkRing(number); });
  }
}

void BlockQueue::Push(const BlockIoPtr& io) {
  if (!io->chunks->empty()) (io->write ? writes_ : reads_).push_back({io, 0});
  ready_.notify_all();
}

void BlockQueue::Clear() {
  reads_.clear();
  writes_.clear();
}

void BlockQueue::BeginClose() {
  closing_ = true;
  ready_.notify_all();
}

void BlockQueue::Join() {
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
  const Lock lock(monitor_->mutex);
  external_.clear();
}

bool BlockQueue::Pop(ChunkJob* job) {
  while (!reads_.empty() || (!writes_.empty() && writing_ < most_writes_)) {
    auto& queue = reads_.empty() ? writes_ : reads_;
    *job = ChunkJob();
    job->io = queue.front().io;
    job->chunk = queue.front().next++;
    if (queue.front().next == job->io->chunks->size()) queue.pop_front();
    job->write = job->io->write;
    job->id = next_id_++;
    ++running_;
    writing_ += job->write;
    if (job->io->IsWanted()) {
      const Chunk& chunk = ChunkOf(*job);
      job->interceptor = source_->interceptor();
      job->path = chunk.path;
      job->index = chunk.offset;
      job->data = job->io->MemoryOf(job->chunk, options_.chunk_bytes);
      job->bytes = chunk.bytes;
      return true;
    }
    End(*job, "");
  }
  return false;
}

void BlockQueue::End(const ChunkJob& job, const std::string& error) {
  --running_;
  writing_ -= job.write;
  if (job.write && most_writes_ < options_.num_threads) ready_.notify_all();
  job.io->ChunkEnded(job.chunk, job.bytes, error);
  monitor_->changed.notify_all();
}

// What precedes the input or output itself, without the mutex.
void BlockQueue::Begin(const ChunkJob& job) {
  const BlockIo& io = *job.io;
  for (const Event& event : io.after) {
    if (!event) continue;
    const ContextScope scope(io.context);
    Await(event);
  }
  if (job.write) {
    const int64_t own = io.bytes - (job.data - io.data);
    if (own < job.bytes) std::memset(job.data + own, 0, static_cast<size_t>(job.bytes - own));
    if (options_.checksum) ChunkOf(job).checksum = Checksum(job.data, job.bytes);
  }
  if (job.interceptor) job.interceptor->Before(job.write ? Operation::kWrite : Operation::kRead);
}

void BlockQueue::RequireSame(const ChunkJob& job) const {
  if (!options_.checksum || Checksum(job.data, job.bytes) == ChunkOf(job).checksum) return;
  throw std::runtime_error("offload: " + source_->Name(ChunkOf(job)) +
                           " is damaged: it does not hold what was written to it (its checksum differs); look after the "
                           "drive, and restore training state from a checkpoint");
}

// Without the mutex. Returns what went wrong.
std::string BlockQueue::Do(const ChunkJob& job) {
  try {
    Begin(job);
    Chunk& chunk = ChunkOf(job);
    if (job.write) {
      source_->Write(chunk, job.data);
      if (job.interceptor) job.interceptor->Written(&chunk);
    } else {
      source_->Read(chunk, job.data);
      RequireSame(job);
      job.io->Arrived(job.chunk, job.data);
    }
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

void BlockQueue::Work() {
  std::unique_ptr<Pages> own;
  Lock lock(monitor_->mutex);
  while (true) {
    {
      ChunkJob job;
      if (Pop(&job)) {
        lock.unlock();
        if (job.data == nullptr) {
          if (!own) own = std::make_unique<Pages>(options_.chunk_bytes);
          job.data = own->data();
        }
        const std::string error = Do(job);
        lock.lock();
        End(job, error);
        continue;
      }
    }
    if (closing_ && reads_.empty() && writes_.empty()) return;
    ready_.wait(lock);
  }
}

// The reads of one ring: each that is under way has a place, with memory of its own.
struct BlockQueue::Flight {
  std::vector<ChunkJob> jobs;
  std::vector<size_t> free;  // places without a job
  // Jobs without a place. When reads end, the thread hands these to the ring at once, and only then does what it needs the
  // mutex for: else the drive would have nothing to do meanwhile.
  std::deque<ChunkJob> next;
  std::vector<std::pair<ChunkJob, std::string>> ended;
  char* memory = nullptr;          // of the places
  double watched = 0, worked = 0;  // when the thread was last watched, and its processor time then; 0: it has had no reads

  size_t under_way() const { return jobs.size() - free.size(); }
  // An eighth of the reads at a time goes to the ring, or is waited for: a call of the kernel for each would cost as much as
  // the read.
  size_t together() const { return std::max<size_t>(1, jobs.size() / 8); }
};

// Hands jobs to the ring as far as it has places, without the mutex. What the ring does not take ends at once.
void BlockQueue::BeginFlights(ReadRing* ring, Flight* flight) {
  while (!flight->next.empty() && !flight->free.empty()) {
    const size_t place = flight->free.back();
    ChunkJob job = std::move(flight->next.front());
    flight->next.pop_front();
    if (job.data == nullptr) job.data = flight->memory + static_cast<int64_t>(place) * options_.chunk_bytes;
    const int file = job.write ? -1 : source_->Descriptor(ChunkOf(job));
    std::string error;
    if (file < 0) {
      error = Do(job);
    } else {
      try {
        Begin(job);
      } catch (const std::exception& caught) {
        error = caught.what();
      }
    }
    if (file < 0 || !error.empty()) {
      flight->ended.emplace_back(std::move(job), error);
      continue;
    }
    ring->Prepare(file, job.data, static_cast<unsigned>(job.bytes), ChunkOf(job).offset, place);
    flight->jobs[place] = std::move(job);
    flight->free.pop_back();
  }
}

// Takes reads that have ended, without the mutex, and hands others to the ring in their place.
void BlockQueue::LandFlights(ReadRing* ring, Flight* flight) {
  uint64_t place = 0;
  size_t landed = 0;
  for (int result = 0; ring->Take(&place, &result);) {
    ChunkJob job = std::move(flight->jobs[place]);
    flight->jobs[place] = ChunkJob();
    std::string error = Land(job, result);
    flight->ended.emplace_back(std::move(job), std::move(error));
    flight->free.push_back(place);
    if (++landed % flight->together() != 0 || flight->next.empty()) continue;
    BeginFlights(ring, flight);
    ring->Submit(0);
  }
  BeginFlights(ring, flight);
  ring->Submit(0);
}

// A read of the ring has ended. Returns what went wrong.
std::string BlockQueue::Land(const ChunkJob& job, int64_t result) {
  try {
    // The end of a file, a signal, an error: a read by itself goes on, or says what is wrong.
    if (result != job.bytes) source_->Read(ChunkOf(job), job.data);
    RequireSame(job);
    job.io->Arrived(job.chunk, job.data);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// With the mutex, while the ring has reads under way.
void BlockQueue::BalanceRings(size_t number, Flight* flight) {
  const double now = Seconds(), past = now - flight->watched;
  if (past < kWatchSeconds) return;
  const double worked = ThreadSeconds(), share = flight->watched > 0 ? (worked - flight->worked) / past : 0.5;
  flight->watched = now;
  flight->worked = worked;
  if (share > kTooBusy && !reads_.empty() && number + 1 == rings_open_ && rings_open_ < rings_.size()) {
    ++rings_open_;
    ready_.notify_all();
  } else if (share < kHardlyBusy && number > 0 && number + 1 == rings_open_) {
    --rings_open_;
  }
}

void BlockQueue::WorkRing(size_t number) {
  ReadRing* const ring = rings_[number].get();
  const Pages memory(options_.chunk_bytes * ring->depth());
  Flight flight;
  flight.memory = memory.data();
  flight.jobs.resize(ring->depth());
  for (size_t place = ring->depth(); place-- > 0;) flight.free.push_back(place);
  Lock lock(monitor_->mutex);
  while (true) {
    ChunkJob job;
    while (number < rings_open_ && flight.next.size() < ring->depth() && Pop(&job)) flight.next.push_back(std::move(job));
    if (flight.under_way() == 0 && flight.next.empty()) {
      if (closing_ && (number >= rings_open_ || (reads_.empty() && writes_.empty()))) return;
      flight.watched = 0;
      ready_.wait(lock);
      continue;
    }
    BalanceRings(number, &flight);
    lock.unlock();
    BeginFlights(ring, &flight);
    const size_t wait = flight.ended.empty() ? std::min(flight.under_way(), flight.together()) : 0;
    if (!ring->Submit(static_cast<unsigned>(wait))) std::this_thread::sleep_for(kPoll);  // the kernel has no room: it makes some
    LandFlights(ring, &flight);
    lock.lock();
    for (auto& [ended, error] : flight.ended) End(ended, error);
    flight.ended.clear();
  }
}

ChunkJob BlockQueue::Next(double seconds, bool* closed) {
  Lock lock(monitor_->mutex);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  ChunkJob job;
  while (!Pop(&job)) {
    *closed = closing_;
    if (*closed || ready_.wait_until(lock, deadline) == std::cv_status::timeout) return ChunkJob();
  }
  external_[job.id] = job;
  std::string error;
  {
    const Unlocked unlocked(monitor_, lock);
    try {
      Begin(job);
    } catch (const std::exception& caught) {
      error = caught.what();
    }
  }
  if (error.empty()) return job;
  lock.unlock();
  Finish(job.id, error);
  return ChunkJob();
}

void BlockQueue::Finish(int64_t id, const std::string& error) {
  Lock lock(monitor_->mutex);
  const auto found = external_.find(id);
  if (found == external_.end()) return;
  const ChunkJob job = std::move(found->second);
  external_.erase(found);
  std::string why = error;
  if (why.empty() && job.write && job.interceptor) job.interceptor->Written(&ChunkOf(job));
  if (why.empty() && !job.write) {
    const Unlocked unlocked(monitor_, lock);
    try {
      RequireSame(job);
    } catch (const std::exception& caught) {
      why = caught.what();
    }
  }
  End(job, why);
}

}  // namespace dejax::offload
