#include "driver/host_memory.h"

#include <fcntl.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "driver/cuda_launch.h"
#include "driver/thread_pool.h"

namespace nb = nanobind;

namespace dejax {
namespace {

constexpr unsigned kPortable = 1, kDeviceMap = 2;  // the same bits in cuMemHostAlloc and cuMemHostRegister
constexpr unsigned kRegisterReadOnly = 8;
constexpr int64_t kReadBytes = 8 << 20;  // that one thread reads or copies at a time

// A block of host memory. Its destructor, run by the last owner, releases it.
struct Block {
  char* data = nullptr;
  int64_t bytes = 0;
  bool pinned = false;  // kernels can read it
  enum { kAllocated, kMapped, kForeign } kind = kAllocated;
  cuda::Context context = nullptr;  // that pinned it
  int file = -1;                    // of a mapped file, open to learn its length
  int64_t file_end = 0;             // its least length
  void* map_begin = nullptr;        // for munmap
  size_t map_bytes = 0;
  bool registered = false;
  PyObject* owner = nullptr;    // of foreign memory
  std::shared_ptr<void> user;  // what works in the memory, and ends before it
  pid_t process = getpid();

  Block() = default;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  ~Block() {
    if (process == getpid()) {
      user.reset();
    } else {  // a forked child has none of the user's threads
      static_cast<void>(new std::shared_ptr<void>(std::move(user)));
    }
    // A forked child cannot call the driver, and has no pinned pages.
    const bool unpinned = !pinned || (process == getpid() && Unpin());
    if (file >= 0) close(file);
    // Pages that the driver still holds stay mapped, and their owner stays alive: a kernel may read them.
    if (unpinned && map_begin != nullptr && munmap(map_begin, map_bytes) != 0) {
      Complain("munmap", std::strerror(errno));
    }
    if (unpinned && owner != nullptr && Py_IsInitialized()) {
      nb::gil_scoped_acquire gil;
      Py_DECREF(owner);
    }
  }

 private:
  // A destructor cannot raise, but a leak must be reported.
  void Complain(const char* call, const std::string& why) const {
    std::fprintf(stderr, "dejax.host_gather: %s failed when %lld bytes of a table were released: %s; they stay allocated\n",
                 call, static_cast<long long>(bytes), why.c_str());
  }

  bool Unpin() try {
    const cuda::Driver& driver = cuda::GetDriver(cuda::kTables);
    const auto done = [this](const char* call, cuda::Result result) {
      if (result != 0) Complain(call, cuda::ErrorName(result));
      return result == 0;
    };
    // A step in flight may still read the memory: jax drops its references when work is enqueued, not when it is done.
    // Only devices that this process uses can have such a step.
    bool idle = true;
    for (cuda::Context each : cuda::ActiveContexts()) {
      const cuda::ContextScope scope(each);
      idle = done("cuCtxSynchronize", driver.ctx_synchronize()) && idle;
    }
    if (!idle) return false;
    const cuda::ContextScope scope(context);
    if (registered) return done("cuMemHostUnregister", driver.host_unregister(data));
    return kind != kAllocated || data == nullptr || done("cuMemFreeHost", driver.host_free(data));
  } catch (const std::runtime_error& error) {  // the context is gone
    Complain("releasing them", error.what());
    return false;
  }
};

using Shared = std::shared_ptr<Block>;

// Blocks by address, so that dejax finds the block of an array that a jitted function returned.
std::mutex& BlocksMutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}
std::map<uintptr_t, std::weak_ptr<Block>>& Blocks() {
  static auto* const registry = new std::map<uintptr_t, std::weak_ptr<Block>>;
  return *registry;
}

void Register(const Shared& block) {
  std::lock_guard<std::mutex> lock(BlocksMutex());
  auto& registry = Blocks();
  for (auto it = registry.begin(); it != registry.end();)
    it = it->second.expired() ? registry.erase(it) : std::next(it);
  registry[reinterpret_cast<uintptr_t>(block->data)] = block;
}

cuda::Context ContextOf(int ordinal) {
  std::string why;
  cuda::Context context = cuda::PrimaryContext(ordinal, &why);
  if (context == nullptr) throw std::runtime_error(why);
  return context;
}

// Maps memory. For a drive its pages are large, where the system has such pages: a small one at a time, the kernel would
// spend as much on a new page as on the read that fills it.
void MapMemory(Block* block, size_t size, bool from_drive) {
  constexpr size_t kLarge = 2 << 20;
  const bool large = from_drive && size >= kLarge;
  block->map_bytes = large ? size + kLarge : size;
  void* data = mmap(nullptr, block->map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  block->map_begin = data;
  block->data = static_cast<char*>(data);
  if (!large) return;
  block->data += (kLarge - reinterpret_cast<uintptr_t>(data) % kLarge) % kLarge;
  madvise(block->data, size, MADV_HUGEPAGE);
}

// Pins memory of large pages, if the driver can. A virtual drive reads runs into them up to twice as fast as into the
// pages of 4 KiB of cuMemHostAlloc.
bool PinLargePages(Block* block, size_t size) {
  const cuda::Driver& driver = cuda::GetDriver(cuda::kTables);
  MapMemory(block, size, /*from_drive=*/true);
  char* const data = block->data;
  ThreadPool::Get().ParallelFor(static_cast<int64_t>(size), kReadBytes, [&](int64_t begin, int64_t end) {
    std::memset(data + begin, 0, static_cast<size_t>(end - begin));  // the pages are there before they are pinned
  });
  cuda::DevicePointer seen = 0;
  if (driver.host_register(data, size, kPortable | kDeviceMap) == 0) {
    if (driver.host_get_device_pointer(&seen, data, 0) == 0 && seen == reinterpret_cast<uintptr_t>(data)) {
      block->registered = block->pinned = true;
      // As memory of cuMemHostAlloc: a fork would copy pinned pages at once.
      madvise(block->map_begin, block->map_bytes, MADV_DONTFORK);
      return true;
    }
    if (driver.host_unregister(data) != 0) throw std::runtime_error("cuMemHostUnregister failed");
  }
  munmap(block->map_begin, block->map_bytes);
  block->data = nullptr;
  block->map_begin = nullptr;
  return false;
}

// `device`: the ordinal of the CUDA device for which memory is pinned; none for memory that is not pinned. `from_drive`:
// a drive reads into the memory.
Shared Allocate(int64_t bytes, std::optional<int> device, bool from_drive) {
  auto block = std::make_shared<Block>();
  block->bytes = bytes;
  const size_t size = static_cast<size_t>(std::max<int64_t>(bytes, 128));
  if (device) {
    block->context = ContextOf(*device);
    const cuda::ContextScope scope(block->context);
    if (!from_drive || !PinLargePages(block.get(), size)) {
      void* data = nullptr;
      if (cuda::Result result = cuda::GetDriver(cuda::kTables).host_alloc(&data, size, kPortable | kDeviceMap)) {
        throw std::runtime_error("cuMemHostAlloc of " + std::to_string(bytes) + " bytes failed: " + cuda::ErrorName(result));
      }
      block->data = static_cast<char*>(data);
      block->pinned = true;
    }
  } else {
    MapMemory(block.get(), size, from_drive);
  }
  Register(block);
  return block;
}

// A part of a file, mapped read-only, and pinned for a device. Throws if the driver cannot pin pages of the file.
Shared MapFile(const std::string& path, int64_t offset, int64_t bytes, std::optional<int> device) {
  auto block = std::make_shared<Block>();
  block->file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (block->file < 0) throw std::runtime_error(path + ": " + std::strerror(errno));
  const int64_t page = sysconf(_SC_PAGESIZE), begin = offset / page * page;
  const size_t size = static_cast<size_t>(std::max<int64_t>(offset + bytes - begin, 1));
  void* data = mmap(nullptr, size, PROT_READ, MAP_SHARED, block->file, begin);
  if (data == MAP_FAILED) throw std::runtime_error(path + ": mmap failed: " + std::strerror(errno));
  block->kind = Block::kMapped;
  block->file_end = offset + bytes;
  block->map_begin = data;
  block->map_bytes = size;
  block->data = static_cast<char*>(data) + (offset - begin);
  block->bytes = bytes;
  if (device) {
    block->context = ContextOf(*device);
    const cuda::ContextScope scope(block->context);
    const cuda::Result result = cuda::GetDriver(cuda::kTables).host_register(
        block->data, static_cast<size_t>(bytes), kPortable | kDeviceMap | kRegisterReadOnly);
    if (result != 0) throw std::runtime_error("cuMemHostRegister of " + path + " failed: " + cuda::ErrorName(result));
    block->registered = block->pinned = true;
  }
  Register(block);
  return block;
}

// A caller's memory, which `owner` keeps alive.
Shared Adopt(uintptr_t address, int64_t bytes, bool writable, std::optional<int> device, nb::object owner) {
  auto block = std::make_shared<Block>();
  block->kind = Block::kForeign;
  block->data = reinterpret_cast<char*>(address);
  block->bytes = bytes;
  if (device && bytes > 0) {
    block->context = ContextOf(*device);
    const cuda::ContextScope scope(block->context);
    const cuda::Driver& driver = cuda::GetDriver(cuda::kTables);
    unsigned flags = kPortable | kDeviceMap | (writable ? 0 : kRegisterReadOnly);
    if (cuda::Result result = driver.host_register(block->data, static_cast<size_t>(bytes), flags)) {
      throw std::runtime_error("cuMemHostRegister of " + std::to_string(bytes) + " bytes failed: " + cuda::ErrorName(result));
    }
    block->registered = block->pinned = true;
    cuda::DevicePointer seen = 0;
    if (driver.host_get_device_pointer(&seen, block->data, 0) != 0 || seen != address) {
      throw std::runtime_error("this device reads registered memory at another address than the CPU");
    }
  }
  block->owner = owner.inc_ref().ptr();
  Register(block);
  return block;
}

void CopyIn(const Shared& block, int64_t offset, uintptr_t source, int64_t bytes) {
  if (offset < 0 || bytes < 0 || offset + bytes > block->bytes) throw std::out_of_range("copy beyond the memory");
  const char* from = reinterpret_cast<const char*>(source);
  ThreadPool::Get().ParallelFor(bytes, kReadBytes, [&](int64_t begin, int64_t end) {
    std::memcpy(block->data + offset + begin, from + begin, static_cast<size_t>(end - begin));
  });
}

void Zero(const Shared& block) {
  ThreadPool::Get().ParallelFor(block->bytes, kReadBytes, [&](int64_t begin, int64_t end) {
    std::memset(block->data + begin, 0, static_cast<size_t>(end - begin));
  });
}

void ReadFile(const Shared& block, const std::string& path, int64_t offset) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) throw std::runtime_error(path + ": " + std::strerror(errno));
  std::atomic<int> error{0};
  ThreadPool::Get().ParallelFor(block->bytes, kReadBytes, [&](int64_t begin, int64_t end) {
    while (begin < end && error == 0) {
      const ssize_t got = pread(file, block->data + begin, static_cast<size_t>(end - begin), offset + begin);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) error = got == 0 ? ENODATA : errno;  // ENODATA: the file became shorter
      if (got > 0) begin += got;
    }
  });
  close(file);
  if (error != 0) throw std::runtime_error(path + ": " + std::strerror(error));
}

// ------------------------------------------------------------------------------------------------ DLPack, version 0.8

struct DLTensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t type_code;
  uint8_t type_bits;
  uint16_t type_lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct DLManagedTensor {
  DLTensor tensor;
  void* context;
  void (*deleter)(DLManagedTensor*);
};

struct Exported {
  DLManagedTensor managed;
  std::vector<int64_t> shape;
  Shared block;
};

// A table's leaf: unsigned integers of `bits` bits. device_type: 1 CPU, 3 CUDA host memory.
nb::object Export(const Shared& block, std::vector<int64_t> shape, int bits, int device_type, int device_id) {
  int64_t bytes = bits / 8;
  for (int64_t size : shape) bytes *= size;
  if (bytes > block->bytes) throw std::out_of_range("the shape has more bytes than the memory");
  auto exported = std::make_unique<Exported>();
  exported->shape = std::move(shape);
  exported->block = block;
  DLTensor& tensor = exported->managed.tensor;
  tensor = {block->data, device_type,
            device_id,   static_cast<int32_t>(exported->shape.size()),
            1,           static_cast<uint8_t>(bits),
            1,           exported->shape.data(),
            nullptr,     0};
  exported->managed.context = exported.get();
  exported->managed.deleter = [](DLManagedTensor* managed) { delete static_cast<Exported*>(managed->context); };
  PyObject* capsule = PyCapsule_New(&exported->managed, "dltensor", [](PyObject* self) {
    // A consumer renames the capsule. Under its first name, nobody has consumed it.
    if (PyCapsule_IsValid(self, "dltensor")) {
      auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(self, "dltensor"));
      managed->deleter(managed);
    }
  });
  if (capsule == nullptr) throw nb::python_error();
  exported.release();
  return nb::steal(capsule);
}

struct HostMemory {
  Shared block;
};

}  // namespace

void SetUserOfMemory(nb::handle memory, std::shared_ptr<void> user) {
  nb::cast<HostMemory&>(memory).block->user = std::move(user);
}

void DefineHostMemory(nb::module_& m) {
  nb::class_<HostMemory>(m, "HostMemory")
      .def_static(
          "allocate",
          [](int64_t bytes, std::optional<int> device, bool from_drive) {
            return HostMemory{Allocate(bytes, device, from_drive)};
          },
          nb::arg("bytes"), nb::arg("device").none(), nb::arg("from_drive") = false,
          nb::call_guard<nb::gil_scoped_release>())
      .def_static(
          "map_file",
          [](const std::string& path, int64_t offset, int64_t bytes, std::optional<int> device) {
            return HostMemory{MapFile(path, offset, bytes, device)};
          },
          nb::arg("path"), nb::arg("offset"), nb::arg("bytes"), nb::arg("device").none(),
          nb::call_guard<nb::gil_scoped_release>())
      .def_static("adopt",
                  [](uintptr_t address, int64_t bytes, bool writable, std::optional<int> device, nb::object owner) {
                    return HostMemory{Adopt(address, bytes, writable, device, std::move(owner))};
                  },
                  nb::arg("address"), nb::arg("bytes"), nb::arg("writable"), nb::arg("device").none(),
                  nb::arg("owner"))
      .def_static("find",
                  [](uintptr_t address) -> nb::object {
                    Shared block;
                    {
                      std::lock_guard<std::mutex> lock(BlocksMutex());
                      const auto found = Blocks().find(address);
                      if (found != Blocks().end()) block = found->second.lock();
                    }
                    return block ? nb::cast(HostMemory{block}) : nb::none();
                  })
      .def_prop_ro("address", [](const HostMemory& m) { return reinterpret_cast<uintptr_t>(m.block->data); })
      .def("truncated",
           [](const HostMemory& m) {
             struct stat now;
             return m.block->file >= 0 && fstat(m.block->file, &now) == 0 && now.st_size < m.block->file_end;
           },
           "Whether the mapped file became shorter than the mapping.")
      .def(
          "copy_in",
          [](const HostMemory& m, int64_t offset, uintptr_t source, int64_t bytes) {
            CopyIn(m.block, offset, source, bytes);
          },
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "zero", [](const HostMemory& m) { Zero(m.block); }, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "read_file",
          [](const HostMemory& m, const std::string& path, int64_t offset) { ReadFile(m.block, path, offset); },
          nb::call_guard<nb::gil_scoped_release>())
      .def("dlpack", [](const HostMemory& m, std::vector<int64_t> shape, int bits, int device_type, int device_id) {
        return Export(m.block, std::move(shape), bits, device_type, device_id);
      });
}

}  // namespace dejax
