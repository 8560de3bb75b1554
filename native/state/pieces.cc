#include "state/pieces.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "driver/cuda_calls.h"
#include "driver/together.h"
#include "state/staging.h"
#include "state/state_disk.h"

namespace dejax::offload {
namespace {

constexpr int kMostChains = 64;  // a run that failed early leaves its chain; beyond this the oldest are forgotten

// A piece that was pulled and not taken yet.
struct Waiting {
  int64_t array = -1, offset = 0;
  size_t bytes = 0;
  StagingRegionPtr region;  // on a GPU: where it is, together with others that were pulled by the same call
  DevicePointer staged = 0;
  Event ready;
  std::vector<char> memory;  // on the CPU
  std::shared_ptr<StateDisk> disk;
  std::vector<StateIoPtr> reads;  // of an array in files, until its bytes are in staging memory
};

// A piece whose copy to the host begins.
struct Pushed {
  const void* from = nullptr;
  char* to = nullptr;
  size_t bytes = 0;
  int64_t array = -1, offset = 0;
};

// A piece whose copy to the device begins, and where it comes from.
struct Pulled {
  const char* from = nullptr;
  Waiting* piece = nullptr;
};

// An array in files.
struct OnDisk {
  std::shared_ptr<StateDisk> disk;
  int64_t array = 0, version = 0;  // the version that is read
  size_t bytes = 0, pushed = 0;
};

// The calls of one program in one execution.
struct Chain {
  int64_t number = 0;
  std::deque<Waiting> waiting;         // in the order in which they were pulled
  std::map<int64_t, void*> addresses;  // of the host arrays
  std::map<int64_t, size_t> sizes;
  std::map<int64_t, OnDisk> on_disk;
  std::map<int64_t, int64_t> iterations;  // calls so far, by call
  std::map<std::pair<int64_t, int64_t>, Event> pushed;  // rows that loops have pushed, by array and offset: after which
};

void Require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("offload.optimizer: " + what);
}

class Pieces {
 public:
  explicit Pieces(int device) : device_(device) {}

  void Abandon(int64_t run, int64_t site) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = chains_.find({run, site});
    if (found != chains_.end()) Drop(found);
  }

  void Call(const PiecesRequest& request, Stream compute) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto key = std::make_pair(request.run, request.site);
    try {
      if (device_ >= 0 && context_ == nullptr) OpenDevice(compute);
      const ContextScope scope(context_);
      const bool first = chains_.find(key) == chains_.end();
      Chain& chain = chains_[key];
      if (first) {
        chain.number = ++chains_begun_;
        ForgetOldChains();
        // The host arrays hold their values once the compute stream has come so far.
        if (device_ >= 0) {
          const Event here = events_->Record(compute);
          Wait(in_, here);
          Wait(out_, here);
        }
      }
      if (request.call >= 0) {
        RunIteration(request, &chain, compute);
      } else {
        Register(request, &chain);
      }
      Open(request, &chain, compute);
      for (int64_t number : request.committed) {
        const OnDisk& array = chain.on_disk.at(number);
        Require(array.pushed == array.bytes, "a part of the new state was not written; this is a defect of dejax");
        array.disk->Commit(array.array, array.version + 1, request.run);
      }
      // What has been read goes on to the device at once.
      for (Waiting& piece : chain.waiting) {
        if (device_ >= 0 && IsRead(piece)) Stage(&piece, request.staging_bytes);
      }
      if (request.finish) {
        Require(chain.waiting.empty(), "pieces of the state were left over; this is a defect of dejax");
        if (device_ >= 0) Wait(compute, last_out_);
        chains_.erase(key);
      }
    } catch (...) {
      const auto found = chains_.find(key);
      if (found != chains_.end()) Drop(found);
      throw;
    }
  }

 private:
  using Chains = std::map<std::pair<int64_t, int64_t>, Chain>;  // by run and site

  void Drop(Chains::iterator chain) {
    // XLA reuses the memory of a failed step: nothing may write to it any more.
    if (context_ != nullptr) {
      const ContextScope scope(context_);
      GetDriver().stream_synchronize(in_);
      GetDriver().stream_synchronize(out_);
    }
    Forget(chain->second);
    chains_.erase(chain);
  }

  void OpenDevice(Stream compute) {
    const Driver& driver = GetDriver();
    Context context = nullptr;
    Check(driver.stream_get_ctx(compute, &context), "cuStreamGetCtx");
    const ContextScope scope(context);
    Check(driver.stream_create(&in_, /*non-blocking*/ 1), "cuStreamCreate");
    Check(driver.stream_create(&out_, /*non-blocking*/ 1), "cuStreamCreate");
    events_ = std::make_shared<EventPool>();
    context_ = context;
  }

  static void Register(const PiecesRequest& request, Chain* chain) {
    for (size_t i = 0; i < request.arrays.size(); ++i) {
      void*& known = chain->addresses[request.arrays[i]];
      // A copy that XLA makes in the middle would lack the pieces that are still on their way.
      Require(known == nullptr || known == request.addresses[i],
              "XLA copied the state in the middle of the update; use optimizer(tx, streams=False)");
      known = request.addresses[i];
      chain->sizes[request.arrays[i]] = request.sizes[i];
    }
  }

  // The arrays in files. Their tickets say which version this step goes on from, so the launching thread waits for it.
  void Open(const PiecesRequest& request, Chain* chain, Stream compute) {
    if (request.opened.empty()) return;
    const bool divided = !request.marks.empty();
    const size_t words = divided ? 6 : 4;
    std::vector<uint32_t> tickets(words * request.opened.size());
    if (device_ < 0) {
      std::memcpy(tickets.data(), request.tickets, 4 * tickets.size());
    } else {
      const auto from = reinterpret_cast<DevicePointer>(request.tickets);
      Check(GetDriver().copy_device_to_host(tickets.data(), from, 4 * tickets.size(), compute), "cuMemcpyDtoHAsync");
      Check(GetDriver().stream_synchronize(compute), "cuStreamSynchronize");
    }
    for (size_t i = 0; i < request.opened.size(); ++i) {
      const uint32_t* const ticket = tickets.data() + words * i;
      OnDisk array;
      array.array = ticket[1];
      array.version = ticket[2];
      array.bytes = static_cast<size_t>(request.opened_bytes[i]);
      if (divided && ticket[3] == request.marks[i]) RequireOwnShard(ticket[4], ticket[5]);
      try {
        array.disk = StateDisk::Find(ticket[0]);
        RequireDivision(ticket[3], divided ? request.marks[i] : 0);
        array.disk->Check(array.array, array.version, request.opened_bytes[i], /*newest=*/divided);
      } catch (const std::exception& error) {
        throw FailsEverywhere(error.what());
      }
      chain->on_disk[request.opened[i]] = array;
    }
  }

  // The files must hold the part of an array that this device takes: another part would be a wrong number.
  static void RequireDivision(int64_t mark, int64_t wanted) {
    if (mark == wanted) return;
    throw std::runtime_error("offload: `state` must be divided as it was made, got arrays of another mesh, or divided in "
                             "another way; read it, and restore it into the state that init makes on this mesh");
  }

  static void RequireOwnShard(int64_t place, int64_t wanted) {
    if (place == wanted) return;
    throw std::runtime_error("offload: `state` must stay on the devices that it was made on, got the part of another "
                             "device; read it, and restore it into the state that init makes on this mesh");
  }

  // A call in a loop: its pieces advance by their strides. The loop's counter is on the device, so the launching thread
  // counts the calls. Taken pieces must be those that were pulled for this iteration.
  void RunIteration(const PiecesRequest& request, Chain* chain, Stream compute) {
    const int64_t at = chain->iterations[request.call]++;
    const char* const other = "XLA ran the iterations of a step in another order than written; this is a defect of dejax";
    Require(chain->waiting.size() >= request.taken.size(), other);
    for (size_t i = 0; i < request.taken.size(); ++i) {
      const Transfer& t = request.takes[i];
      Waiting& piece = chain->waiting[i];
      Require(piece.array == t.array && piece.offset == t.offset + at * t.stride &&
                  piece.bytes == request.taken[i].second,
              other);
      Stage(&piece, request.staging_bytes);
    }
    Take(chain, request.taken, compute);
    std::vector<Pushed> pushed;
    for (size_t i = 0; i < request.pushes.size(); ++i) {
      const Transfer& t = request.pushes[i];
      const int64_t offset = t.offset + at * t.stride;
      const auto file = chain->on_disk.find(t.array);
      if (file != chain->on_disk.end()) {
        PushToDisk(request.pushed[i], &file->second, offset, t.bytes, request.staging_bytes, compute);
        continue;
      }
      pushed.push_back(
          {request.pushed[i], Address(*chain, t, at), static_cast<size_t>(t.bytes), t.array, offset});
    }
    Push(pushed, request.staging_bytes, chain, compute);
    if (at >= request.pull_iterations) return;
    std::vector<Pulled> pulled;
    Event last;
    for (const Transfer& t : request.pulls) {
      const auto file = chain->on_disk.find(t.array);
      const char* const from = file == chain->on_disk.end() ? Address(*chain, t, at) : nullptr;
      chain->waiting.emplace_back();
      Waiting& piece = chain->waiting.back();
      piece.array = t.array;
      piece.offset = t.offset + at * t.stride;
      piece.bytes = t.bytes;
      if (file != chain->on_disk.end()) {
        const OnDisk& array = file->second;
        piece.disk = array.disk;
        piece.reads = array.disk->Read(array.array, array.version, piece.offset, t.bytes, context_);
        continue;
      }
      // A later loop may read what an earlier one has written: gradients.
      const auto written = chain->pushed.find({piece.array, piece.offset});
      if (written != chain->pushed.end() && written->second != last) Wait(in_, last = written->second);
      pulled.push_back({from, &piece});
    }
    Pull(pulled, request.staging_bytes);
  }

  static char* Address(const Chain& chain, const Transfer& t, int64_t at) {
    const auto address = chain.addresses.find(t.array);
    Require(address != chain.addresses.end(), "a call names an array that its step has not begun with");
    const int64_t offset = t.offset + at * t.stride;
    Require(offset >= 0 && t.bytes > 0 && static_cast<size_t>(offset + t.bytes) <= chain.sizes.at(t.array),
            "a piece lies outside of its array; this is a defect of dejax");
    return static_cast<char*>(address->second) + offset;
  }

  // Begins to copy pieces of one call to the device. They share regions of staging memory, and so events.
  void Pull(const std::vector<Pulled>& pulled, int64_t staging_bytes) {
    if (device_ < 0) {
      for (const Pulled& p : pulled) p.piece->memory.assign(p.from, p.from + p.piece->bytes);
      return;
    }
    for (size_t begin = 0, end = 0; begin < pulled.size(); begin = end) {
      size_t bytes = 0;
      const auto size = [&](size_t i) { return pulled[i].piece->bytes; };
      end = EndOfRegion(begin, pulled.size(), size, staging_bytes, &bytes);
      const StagingRegionPtr region = staging_.Take(bytes, staging_bytes, in_);
      Copies copies(Copies::Kind::kHostToDevice);
      DevicePointer to = region->memory;
      for (size_t i = begin; i < end; ++i) {
        Waiting& piece = *pulled[i].piece;
        piece.region = region;
        piece.staged = to;
        ++region->held;
        copies.Add(to, reinterpret_cast<DevicePointer>(pulled[i].from), piece.bytes);
        to += Aligned(piece.bytes);
      }
      copies.Run(in_);
      region->free = events_->Record(in_);
      for (size_t i = begin; i < end; ++i) pulled[i].piece->ready = region->free;
    }
  }

  // Pieces [begin, result) have one region: a quarter of the staging memory at most, or one piece. A layer has that much
  // where one is on its way and one in use, in each direction.
  template <typename Size>
  static size_t EndOfRegion(size_t begin, size_t count, const Size& size, int64_t staging_bytes, size_t* bytes) {
    size_t end = begin;
    do {
      *bytes += Aligned(size(end++));
    } while (end < count && *bytes + Aligned(size(end)) <= static_cast<size_t>(staging_bytes) / 4);
    return end;
  }

  static bool IsRead(const Waiting& piece) {
    return !piece.reads.empty() && std::all_of(piece.reads.begin(), piece.reads.end(), [&](const StateIoPtr& io) {
      return piece.disk->IsDone(io);
    });
  }

  // Copies what was read from files to the device, once it is there.
  void Stage(Waiting* piece, int64_t staging_bytes) {
    if (piece->reads.empty()) return;
    for (const StateIoPtr& io : piece->reads) piece->disk->WaitFor(io);
    if (device_ < 0) {
      for (const StateIoPtr& io : piece->reads) {
        piece->memory.insert(piece->memory.end(), io->buffer->data, io->buffer->data + io->bytes);
      }
      piece->reads.clear();
      return;
    }
    piece->region = staging_.Take(piece->bytes, staging_bytes, in_);
    piece->staged = piece->region->memory;
    piece->region->held = 1;
    DevicePointer to = piece->staged;
    for (const StateIoPtr& io : piece->reads) {
      Check(GetDriver().copy_host_to_device(to, io->buffer->data, static_cast<size_t>(io->bytes), in_),
            "cuMemcpyHtoDAsync");
      to += static_cast<DevicePointer>(io->bytes);
      io->buffer->busy = events_->Record(in_);
    }
    piece->ready = piece->region->free = events_->Record(in_);
    piece->reads.clear();
  }

  void PushToDisk(const void* from, OnDisk* array, int64_t offset, size_t bytes, int64_t host_bytes, Stream compute) {
    const auto writes = array->disk->Write(array->array, array->version + 1, offset, static_cast<int64_t>(bytes),
                                           host_bytes, context_);
    array->pushed += bytes;
    if (writes.empty()) return;  // another device writes them
    StagingRegionPtr region;
    if (device_ >= 0) {
      region = staging_.Take(bytes, host_bytes, compute);
      Check(GetDriver().copy_device_to_device(region->memory, reinterpret_cast<DevicePointer>(from), bytes, compute),
            "cuMemcpyDtoDAsync");
      region->free = events_->Record(compute);
      Wait(out_, region->free);
    }
    int64_t at = 0;
    for (const StateIoPtr& io : writes) {
      const auto size = static_cast<size_t>(io->bytes);
      if (device_ < 0) {
        std::memcpy(io->buffer->data, static_cast<const char*>(from) + at, size);
      } else {
        Wait(out_, io->buffer->busy);
        Check(GetDriver().copy_device_to_host(io->buffer->data, region->memory + static_cast<DevicePointer>(at), size,
                                             out_),
              "cuMemcpyDtoHAsync");
        io->after[0] = last_out_ = region->free = events_->Record(out_);
      }
      at += io->bytes;
      array->disk->Submit(io);
    }
  }

  // The first pieces that wait, into XLA's buffers.
  void Take(Chain* chain, const std::vector<std::pair<void*, size_t>>& taken, Stream compute) {
    if (taken.empty()) return;
    if (device_ < 0) {
      for (size_t i = 0; i < taken.size(); ++i) {
        std::memcpy(taken[i].first, chain->waiting[i].memory.data(), taken[i].second);
      }
    } else {
      Copies copies(Copies::Kind::kDeviceToDevice);
      Event last;
      for (size_t i = 0; i < taken.size(); ++i) {
        const Waiting& piece = chain->waiting[i];
        if (piece.ready != last) Wait(compute, last = piece.ready);
        copies.Add(reinterpret_cast<DevicePointer>(taken[i].first), piece.staged, piece.bytes);
      }
      copies.Run(compute);
      const Event done = events_->Record(compute);
      for (size_t i = 0; i < taken.size(); ++i) {
        StagingRegion& region = *chain->waiting[i].region;
        --region.held;
        region.free = done;
      }
    }
    chain->waiting.erase(chain->waiting.begin(), chain->waiting.begin() + static_cast<std::ptrdiff_t>(taken.size()));
  }

  // Begins to copy pieces of one call to the host. They share regions of staging memory, and so events.
  void Push(const std::vector<Pushed>& pushed, int64_t staging_bytes, Chain* chain, Stream compute) {
    if (device_ < 0) {
      for (const Pushed& p : pushed) std::memcpy(p.to, p.from, p.bytes);
      return;
    }
    for (size_t begin = 0, end = 0; begin < pushed.size(); begin = end) {
      size_t bytes = 0;
      const auto size = [&](size_t i) { return pushed[i].bytes; };
      end = EndOfRegion(begin, pushed.size(), size, staging_bytes, &bytes);
      const StagingRegionPtr region = staging_.Take(bytes, staging_bytes, compute);
      Copies near(Copies::Kind::kDeviceToDevice), out(Copies::Kind::kDeviceToHost);
      DevicePointer at = region->memory;
      for (size_t i = begin; i < end; ++i) {
        const Pushed& p = pushed[i];
        near.Add(at, reinterpret_cast<DevicePointer>(p.from), p.bytes);
        out.Add(reinterpret_cast<DevicePointer>(p.to), at, p.bytes);
        at += Aligned(p.bytes);
      }
      near.Run(compute);
      region->free = events_->Record(compute);
      Wait(out_, region->free);
      out.Run(out_);
      last_out_ = region->free = events_->Record(out_);
      for (size_t i = begin; i < end; ++i) {
        chain->pushed[{pushed[i].array, pushed[i].offset}] = last_out_;
      }
    }
  }

  void Forget(const Chain& chain) {
    for (const Waiting& piece : chain.waiting) {
      if (piece.region != nullptr) piece.region->held = 0;
    }
  }

  void ForgetOldChains() {
    for (auto at = chains_.begin(); at != chains_.end();) {
      if (chains_begun_ - at->second.number > kMostChains) {
        Forget(at->second);
        at = chains_.erase(at);
      } else {
        ++at;
      }
    }
  }

  const int device_;
  std::mutex mutex_;
  Context context_ = nullptr;
  Stream in_ = nullptr, out_ = nullptr;
  std::shared_ptr<EventPool> events_;
  Event last_out_;
  Staging staging_;
  Chains chains_;
  int64_t chains_begun_ = 0;
};

Pieces& PiecesOf(int device) {
  static std::mutex* const mutex = new std::mutex;
  static auto* const all = new std::map<int, std::unique_ptr<Pieces>>;  // never destroyed, like the driver
  std::lock_guard<std::mutex> lock(*mutex);
  auto& pieces = (*all)[device];
  if (!pieces) pieces = std::make_unique<Pieces>(device);
  return *pieces;
}

}  // namespace

void CallPieces(int device, const PiecesRequest& request, Stream compute) { PiecesOf(device).Call(request, compute); }

void AbandonPieces(int device, int64_t run, int64_t site) { PiecesOf(device).Abandon(run, site); }

}  // namespace dejax::offload
