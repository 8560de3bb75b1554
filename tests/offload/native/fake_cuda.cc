// A CUDA driver for tests on machines without one. Device memory is host memory. Work is queued, and runs as late and in
// as unlucky an order as streams and events allow: code that forgets to wait for an event finds wrong bytes.
// FAKE_CUDA_SEED chooses the order. It counts calls and device memory. FAKE_CUDA_BATCH: how it copies several pieces at
// once: "refused", else as asked. Built with -DOLD_BATCH it has that call as CUDA 12.8 has it.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace {
// A wait is for the last record of the event before the wait; later records do not change it.
struct Event {
  uint64_t recorded = 0;
  std::set<uint64_t> happened;
  bool Done(uint64_t version) const { return version == 0 || happened.count(version) > 0; }
};
struct Op { std::function<void()> run; Event* wait = nullptr; uint64_t version = 0; };
struct Stream { std::deque<Op> ops; };

std::recursive_mutex mutex;
std::map<Stream*, bool> streams;
std::map<Stream*, unsigned> favourites;
std::mt19937 rng(std::getenv("FAKE_CUDA_SEED") ? std::atoi(std::getenv("FAKE_CUDA_SEED")) : 0);
int context, module, function;

// Runs queued work until `finished`, one stream's at a time. Returns false where none is left that can run.
bool RunUntil(const std::function<bool()>& finished) {
  while (!finished()) {
    std::vector<Stream*> ready;
    for (auto& [stream, alive] : streams) {
      if (!stream->ops.empty() && (!stream->ops.front().wait || stream->ops.front().wait->Done(stream->ops.front().version))) {
        ready.push_back(stream);
      }
    }
    if (ready.empty()) return false;
    // Some streams stay far behind for a while: each runs as far as it can before another one runs at all.
    if (rng() % 200 == 0) favourites.clear();
    Stream* stream = ready[0];
    for (Stream* other : ready) {
      if (!favourites.count(other)) favourites[other] = rng();
      if (favourites[other] > favourites[stream]) stream = other;
    }
    Op op = std::move(stream->ops.front());
    stream->ops.pop_front();
    if (op.run) op.run();
  }
  return true;
}

// While a test holds the device, calls that wait for it return only one by one, as the test lets them go; while it holds
// copies, calls that submit one from the host.
std::atomic<bool> held{false}, held_copies{false};
std::atomic<int> waiting{0}, let_go{0};

void WaitWhileHeld(const std::atomic<bool>& held = ::held) {
  if (!held) return;
  ++waiting;
  while (held) {
    int some = let_go;
    if (some > 0 && let_go.compare_exchange_strong(some, some - 1)) break;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  --waiting;
}

std::map<std::string, long> counts;
void Count(const char* what, long by = 1) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  counts[what] += by;
}
std::map<unsigned long long, size_t> allocated;

Stream* Of(void* stream) {
  streams[static_cast<Stream*>(stream)] = true;
  return static_cast<Stream*>(stream);
}

int Queue(void* stream, std::function<void()> run) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  Of(stream)->ops.push_back({std::move(run)});
  return 0;
}
}  // namespace

extern "C" {
void fake_hold(int on) { held = on != 0; }
void fake_hold_copies(int on) { held_copies = on != 0; }
int fake_waiting() { return waiting; }
void fake_let_go() { ++let_go; }
long fake_count(const char* what) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  return counts[what];
}
// Device memory now, and the most since this was last called.
void fake_memory(long* now, long* peak) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  *now = counts["bytes"];
  *peak = counts["peak"];
  counts["peak"] = counts["bytes"];
}
// Only so much device memory: allocations beyond it fail.
void fake_limit(long bytes) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  counts["limit"] = bytes;
}

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuDeviceGetCount(int* count) { return *count = 1, 0; }
int cuDeviceGet(int* device, int) { return *device = 0, 0; }
int cuDeviceGetName(char* name, int length, int) { return std::strncpy(name, "Fake", length), 0; }
int cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = 1ull << 30, 0; }
int cuDeviceGetAttribute(int* value, int, int) { return *value = 0, 0; }
int cuStreamGetCtx(void*, void** out) { return *out = &context, 0; }
int cuCtxPushCurrent_v2(void*) { return 0; }
int cuCtxPopCurrent_v2(void**) { return 0; }
int cuStreamCreate(void** stream, unsigned) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  Stream* made = new Stream;
  streams[made] = true;
  return *stream = made, 0;
}
int cuStreamDestroy_v2(void* stream) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  streams.erase(static_cast<Stream*>(stream));
  return 0;
}
int cuStreamSynchronize(void* stream) {
  WaitWhileHeld();
  std::lock_guard<std::recursive_mutex> lock(mutex);
  return RunUntil([&] { return Of(stream)->ops.empty(); }) ? 0 : 999;
}
int cuStreamWaitEvent(void* stream, Event* event, unsigned) {
  Count("wait");
  std::lock_guard<std::recursive_mutex> lock(mutex);
  Of(stream)->ops.push_back({nullptr, event, event->recorded});
  return 0;
}
int cuEventCreate(Event** event, unsigned) { return *event = new Event, 0; }
int cuEventDestroy_v2(Event*) { return 0; }  // queued work may still name it
int cuEventRecord(Event* event, void* stream) {
  Count("record");
  std::lock_guard<std::recursive_mutex> lock(mutex);
  const uint64_t version = ++event->recorded;
  return Queue(stream, [event, version] { event->happened.insert(version); });
}
int cuEventSynchronize(Event* event) {
  WaitWhileHeld();
  std::lock_guard<std::recursive_mutex> lock(mutex);
  return RunUntil([&] { return event->Done(event->recorded); }) ? 0 : 999;
}
int cuEventQuery(Event* event) {
  Count("query");
  std::lock_guard<std::recursive_mutex> lock(mutex);
  static int asked = 0;
  if (event->Done(event->recorded)) return 0;
  if (++asked % 8 == 0) {  // polling must end some time
    int done = 0;
    RunUntil([&] { return done++ > 100; });
  }
  return 600;
}
int cuEventElapsedTime(float* ms, Event*, Event*) { return *ms = 0, 0; }
int cuMemAlloc_v2(unsigned long long* out, size_t bytes) {
  WaitWhileHeld();
  std::lock_guard<std::recursive_mutex> lock(mutex);
  if (counts["limit"] > 0 && counts["bytes"] + static_cast<long>(bytes) > counts["limit"]) return 2;
  void* memory = std::malloc(bytes);
  std::memset(memory, 0xAB, bytes);
  *out = reinterpret_cast<unsigned long long>(memory);
  allocated[*out] = bytes;
  counts["bytes"] += static_cast<long>(bytes);
  if (counts["bytes"] > counts["peak"]) counts["peak"] = counts["bytes"];
  return 0;
}
int cuMemFree_v2(unsigned long long memory) {
  WaitWhileHeld();
  std::lock_guard<std::recursive_mutex> lock(mutex);
  counts["bytes"] -= static_cast<long>(allocated[memory]);
  allocated.erase(memory);
  return std::free(reinterpret_cast<void*>(memory)), 0;
}
int cuMemHostAlloc(void** out, size_t bytes, unsigned) {
  WaitWhileHeld();
  *out = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  std::memset(*out, 0xCD, bytes);
  return 0;
}
int cuMemFreeHost(void* memory) {
  WaitWhileHeld();
  return std::free(memory), 0;
}
int cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, size_t n, void* stream) {
  Count("on device");
  return Queue(stream, [=] { std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), n); });
}
int cuMemcpyDtoHAsync_v2(void* to, unsigned long long from, size_t n, void* stream) {
  Count("to host");
  return Queue(stream, [=] { std::memcpy(to, reinterpret_cast<void*>(from), n); });
}
int cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, size_t n, void* stream) {
  WaitWhileHeld(held_copies);
  Count("to device");
  return Queue(stream, [=] { std::memcpy(reinterpret_cast<void*>(to), from, n); });
}
// The copies of a batch have no order among themselves.
#ifdef OLD_BATCH
int cuMemcpyBatchAsync(unsigned long long* to, unsigned long long* from, size_t* bytes, size_t count, int* order,
                       size_t* first, size_t num_attributes, size_t*, void* stream) {
#else
int cuMemcpyBatchAsync_v2(unsigned long long* to, unsigned long long* from, size_t* bytes, size_t count, int* order,
                          size_t* first, size_t num_attributes, void* stream) {
#endif
  const char* how = std::getenv("FAKE_CUDA_BATCH");
  Count("batch");
  if (how != nullptr && std::string(how) == "refused") return 801;
  if (stream == nullptr || count == 0 || num_attributes != 1 || first[0] != 0 || order[0] != 1) return 1;
  for (size_t i = 0; i < count; ++i) {
    if (to[i] == 0 || from[i] == 0 || bytes[i] == 0) return 1;
  }
  std::vector<std::function<void()>> copies;
  for (size_t i = 0; i < count; ++i) {
    copies.push_back([to = to[i], from = from[i], n = bytes[i]] {
      std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), n);
    });
  }
  return Queue(stream, [copies] {
    for (auto copy = copies.rbegin(); copy != copies.rend(); ++copy) (*copy)();
  });
}
int cuMemsetD32Async(unsigned long long to, unsigned value, size_t count, void* stream) {
  return Queue(stream, [=] { for (size_t i = 0; i < count; ++i) reinterpret_cast<unsigned*>(to)[i] = value; });
}
int cuGetErrorName(int result, const char** name) { return *name = result == 999 ? "FAKE_DEADLOCK" : "FAKE", 0; }
}
