// Many threads on one store: stores, fetches, failing ones, counters, clear, drain and close, with files and without, on
// the CPU and, with the driver of fake_cuda.cc, on the CUDA side. Built with -fsanitize=thread (tests/native/tsan.sh) or
// without (test_hammer.py). Every fetch returns the stored bytes or throws.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "activations/store.h"
#include "testing/interceptor.h"

using namespace dejax::offload;

namespace {

std::atomic<long> right{0}, threw{0}, wrong{0};
std::atomic<int64_t> next_run{1};

struct Setting {
  bool cuda = false, external = false, faults = false;
  int64_t device_bytes = 1 << 16, host_bytes = 1 << 18;
  std::string folder;
};

void Check(const std::vector<uint32_t>& got, uint32_t value) {
  for (uint32_t word : got) {
    if (word != value) {
      std::printf("a tensor of %zu words has %u in place of %u\n", got.size(), word, value);
      ++wrong;
      return;
    }
  }
  ++right;
}

// A forward and a backward pass over tensors of many sizes.
void OneRun(Store& store, const Setting& setting, std::mt19937& rng, Stream stream, int device) {
  const int64_t run = next_run++;
  const int count = 1 + static_cast<int>(rng() % 12);
  std::vector<std::vector<uint32_t>> tensors;
  std::vector<std::vector<uint32_t>> outs;
  std::vector<uint64_t> handles(count);
  for (int i = 0; i < count; ++i) {
    static constexpr int kWords[] = {0, 1, 256, 1024, 1500, 5000, 16384};
    tensors.emplace_back(kWords[rng() % 7], static_cast<uint32_t>(run * 64 + i + 1));
  }
  const auto address = [](const void* data) { return reinterpret_cast<DevicePointer>(data); };
  try {
    for (int i = 0; i < count; ++i) {
      const int64_t bytes = static_cast<int64_t>(4 * tensors[i].size());
      if (setting.cuda) {
        store.StoreOnCuda({run, device, i % 3, {0, device}, stream}, 1 << 14, address(tensors[i].data()), bytes,
                          address(&handles[i]));
      } else {
        handles[i] = store.StoreOnCpu({run, kCpu, i % 3, {}}, tensors[i].data(), bytes);
      }
    }
    if (rng() % 10 == 0) {  // forward without backward
      if (setting.cuda) GetDriver().stream_synchronize(stream);
      return;
    }
    for (int i = 0; i < count; ++i) outs.emplace_back(tensors[i].size());
    for (int i = count - 1; i >= 0; --i) {
      const int64_t bytes = static_cast<int64_t>(4 * tensors[i].size());
      if (setting.cuda) {
        const uint64_t handle = ReadHandle(address(&handles[i]), stream);
        store.FetchOnCuda({run, device, i % 3, {0, device}, stream}, handle, address(outs[i].data()), bytes);
      } else {
        store.FetchOnCpu({run, kCpu, i % 3, {}}, handles[i], outs[i].data(), bytes);
      }
    }
    if (setting.cuda) GetDriver().stream_synchronize(stream);
    for (int i = 0; i < count; ++i) Check(outs[i], static_cast<uint32_t>(run * 64 + i + 1));
  } catch (const std::exception& error) {
    if (std::strstr(error.what(), "FAKE") != nullptr) throw;
    ++threw;
    if (setting.cuda) GetDriver().stream_synchronize(stream);  // queued work uses these buffers
  }
}

// An external engine that keeps chunks in memory.
void External(Store& store) {
  static std::mutex mutex;
  static std::map<std::tuple<const void*, int, int64_t, int64_t>, std::vector<char>> chunks;
  bool closed = false;
  while (true) {
    const ChunkJob job = store.NextJob(0.05, &closed);
    if (closed) return;
    if (job.id == 0) continue;
    {
      std::lock_guard<std::mutex> lock(mutex);
      auto& chunk = chunks[{&store, job.path, job.index, job.bytes}];
      if (job.write) {
        chunk.assign(job.data, job.data + job.bytes);
      } else {
        std::memcpy(job.data, chunk.data(), std::min<size_t>(chunk.size(), job.bytes));
      }
    }
    store.FinishJob(job.id, "");
  }
}

void Hammer(const Setting& setting, double seconds, int num_threads, unsigned seed) {
  StoreOptions options;
  options.device_bytes = setting.device_bytes;
  options.host_bytes = setting.host_bytes;
  options.chunk_bytes = 1 << 14;
  options.num_threads = 3;
  options.external = setting.external;
  options.disk_bytes = 4 << 20;
  if (!setting.folder.empty()) options.folders = {setting.folder};
  const std::shared_ptr<Store> store = Store::Open(options);
  const auto faults = std::make_shared<TestInterceptor>();
  store->Intercept(faults);
  std::atomic<bool> over{false};
  std::vector<std::thread> threads, engines;
  Stream shared = nullptr;
  if (setting.cuda) GetDriver().stream_create(&shared, 0);
  for (int i = 0; i < num_threads; ++i) {
    threads.emplace_back([&, i] {
      std::mt19937 rng(seed * 100 + i);
      // XLA has one compute stream for each device; the store must work with several, too.
      Stream stream = shared;
      const int device = seed % 4 == 3 ? i % 2 : 0;
      if (setting.cuda && seed % 4 >= 2) GetDriver().stream_create(&stream, 0);
      while (!over) OneRun(*store, setting, rng, stream, device);
    });
  }
  threads.emplace_back([&] {
    std::mt19937 rng(seed);
    while (!over) {
      const Counters stats = store->GetStats();
      if (stats.host_bytes > setting.host_bytes || stats.disk_bytes > options.disk_bytes) {
        std::printf("a cap was exceeded: %ld of host memory, %ld of disk\n", static_cast<long>(stats.host_bytes),
                    static_cast<long>(stats.disk_bytes));
        ++wrong;
      }
      if (setting.faults) {
        static constexpr const char* kKinds[] = {"write", "read", "corrupt", "store", "fetch"};
        faults->Inject(kKinds[rng() % 5], 1);
        if (rng() % 50 == 0 && !setting.cuda) store->Clear();
      }
      if (rng() % 100 == 0) store->Drain();
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  });
  if (setting.external) {
    for (int i = 0; i < 3; ++i) engines.emplace_back([&] { External(*store); });
  }
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  // In half of the settings the store closes while steps use it: they throw, and nothing hangs.
  const bool under_load = seed % 2 == 1 && !setting.cuda;
  if (!under_load) over = true;
  if (under_load) {
    store->BeginClose();
    for (std::thread& engine : engines) engine.join();
    store->Close();
    over = true;
  }
  for (std::thread& thread : threads) thread.join();
  if (!under_load) {
    store->BeginClose();
    for (std::thread& engine : engines) engine.join();
    store->Close();
  }
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 1;
  const std::string folder = argc > 2 ? argv[2] : "/tmp";
  const bool cuda = argc > 3 && std::string(argv[3]) == "cuda";
  unsigned seed = 0;
  for (const bool disk : {false, true}) {
    for (const bool external : {false, true}) {
      for (const bool faults : {false, true}) {
        if (external && !disk) continue;
        Setting setting;
        setting.cuda = cuda;
        setting.external = external;
        setting.faults = faults;
        if (disk) setting.folder = folder;
        if (cuda) setting.host_bytes = 1 << 20;
        Hammer(setting, seconds, cuda ? 3 : 4, seed);
        Hammer(setting, seconds, cuda ? 3 : 4, seed + 1);
        seed += 2;
        std::printf("%s disk %d external %d faults %d: %ld right, %ld threw, %ld wrong\n", cuda ? "cuda" : "cpu", disk, external,
                    faults, right.load(), threw.load(), wrong.load());
        std::fflush(stdout);
      }
    }
  }
  return wrong == 0 && right > 0 ? 0 : 1;
}
