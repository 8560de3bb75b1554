#include "pieces.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "cuda_calls.h"
#include "state_disk.h"
#include "together.h"

namespace dejax::offload {
namespace {

constexpr int kMostChains = 64;  // a run that failed early leaves its chain; beyond this the oldest are forgotten

struct Staging {
  DevicePointer memory = 0;
  size_t capacity = 0;
  bool in_use = false;  // it holds a piece that is not taken yet
  Event free;           // after it other pieces may use the memory
};

// A piece that was pulled and not taken yet.
struct Waiting {
  int64_t tag = 0;
  int64_t array = -1, offset = 0;  // of a piece that a loop pulled
  size_t bytes = 0;
  Staging* staging = nullptr;  // on a GPU
  Event ready;
  std::vector<char> memory;  // on the CPU
  std::shared_ptr<StateDisk> disk;
  std::vector<StateIoPtr> reads;  // of an array in files, until its bytes are in staging memory
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
  std::deque<Waiting> waiting;         // in the order of their tags
  std::map<int64_t, void*> addresses;  // of the host arrays
  std::map<int64_t, size_t> sizes;
  std::map<int64_t, OnDisk> on_disk;
  std::map<int64_t, int64_t> iterations;  // calls so far, by slot
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
      if (request.slot >= 0) {
        RunIteration(request, &chain, compute);
      } else {
        Run(request, &chain, compute);
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
      GetCalls().stream_synchronize(in_);
      GetCalls().stream_synchronize(out_);
    }
    Forget(chain->second);
    chains_.erase(chain);
  }

  void OpenDevice(Stream compute) {
    const Calls& calls = GetCalls();
    Context context = nullptr;
    Check(calls.stream_get_ctx(compute, &context), "cuStreamGetCtx");
    const ContextScope scope(context);
    Check(calls.stream_create(&in_, /*non-blocking*/ 1), "cuStreamCreate");
    Check(calls.stream_create(&out_, /*non-blocking*/ 1), "cuStreamCreate");
    events_ = std::make_shared<EventPool>();
    context_ = context;
  }

  void Run(const PiecesRequest& request, Chain* chain, Stream compute) {
    for (size_t i = 0; i < request.arrays.size(); ++i) {
      void*& known = chain->addresses[request.arrays[i]];
      // A copy that XLA makes in the middle would lack the pieces that are still on their way.
      Require(known == nullptr || known == request.addresses[i],
              "XLA copied the state in the middle of the update; use optimizer(tx, streams=False)");
      known = request.addresses[i];
      chain->sizes[request.arrays[i]] = request.sizes[i];
    }
    for (const auto* transfers : {&request.pulls, &request.pushes}) {
      for (const Transfer& t : *transfers) {
        Require(t.array >= 0 && static_cast<size_t>(t.array) < request.arrays.size() && t.offset >= 0 && t.bytes > 0 &&
                    static_cast<size_t>(t.offset + t.bytes) <= request.sizes[t.array],
                "a piece lies outside of its array; this is a defect of dejax");
      }
    }
    int64_t tag = request.first_tag;
    for (const auto& [to, bytes] : request.taken) {
      Require(!chain->waiting.empty() && chain->waiting.front().tag == tag && chain->waiting.front().bytes == bytes,
              "XLA ran the pieces of an update in another order than written; use optimizer(tx, streams=False)");
      Take(chain->waiting.front(), to, compute);
      chain->waiting.pop_front();
      ++tag;
    }
    for (size_t i = 0; i < request.pushes.size(); ++i) {
      const Transfer& t = request.pushes[i];
      Push(request.pushed[i], request.addresses[t.array] + t.offset, t.bytes, request.staging_bytes, compute);
    }
    tag += static_cast<int64_t>(chain->waiting.size());
    for (const Transfer& t : request.pulls) {
      chain->waiting.emplace_back();
      Waiting& piece = chain->waiting.back();
      piece.tag = tag++;
      piece.bytes = t.bytes;
      Pull(request.addresses[t.array] + t.offset, t.bytes, request.staging_bytes, &piece);
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
      Check(GetCalls().copy_device_to_host(tickets.data(), from, 4 * tickets.size(), compute), "cuMemcpyDtoHAsync");
      Check(GetCalls().stream_synchronize(compute), "cuStreamSynchronize");
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
    const int64_t at = chain->iterations[request.slot]++;
    for (size_t i = 0; i < request.taken.size(); ++i) {
      const Transfer& t = request.takes[i];
      Require(!chain->waiting.empty() && chain->waiting.front().array == t.array &&
                  chain->waiting.front().offset == t.offset + at * t.stride &&
                  chain->waiting.front().bytes == request.taken[i].second,
              "XLA ran the iterations of a step in another order than written; this is a defect of dejax");
      Stage(&chain->waiting.front(), request.staging_bytes);
      Take(chain->waiting.front(), request.taken[i].first, compute);
      chain->waiting.pop_front();
    }
    for (size_t i = 0; i < request.pushes.size(); ++i) {
      const Transfer& t = request.pushes[i];
      const auto file = chain->on_disk.find(t.array);
      if (file != chain->on_disk.end()) {
        PushToDisk(request.pushed[i], &file->second, t.offset + at * t.stride, t.bytes, request.staging_bytes, compute);
        continue;
      }
      Push(request.pushed[i], Address(*chain, t, at), t.bytes, request.staging_bytes, compute);
      if (device_ >= 0) chain->pushed[{t.array, t.offset + at * t.stride}] = last_out_;
    }
    if (at >= request.pull_iterations) return;
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
      if (written != chain->pushed.end()) Wait(in_, written->second);
      Pull(from, t.bytes, request.staging_bytes, &piece);
    }
  }

  static char* Address(const Chain& chain, const Transfer& t, int64_t at) {
    const auto address = chain.addresses.find(t.array);
    Require(address != chain.addresses.end(), "a call names an array that its step has not begun with");
    const int64_t offset = t.offset + at * t.stride;
    Require(offset >= 0 && t.bytes > 0 && static_cast<size_t>(offset + t.bytes) <= chain.sizes.at(t.array),
            "a piece lies outside of its array; this is a defect of dejax");
    return static_cast<char*>(address->second) + offset;
  }

  void Pull(const char* from, size_t bytes, int64_t staging_bytes, Waiting* piece) {
    if (device_ < 0) {
      piece->memory.assign(from, from + bytes);
      return;
    }
    Staging* staging = TakeStaging(bytes, staging_bytes);
    piece->staging = staging;
    staging->in_use = true;
    Wait(in_, staging->free);
    Check(GetCalls().copy_host_to_device(staging->memory, from, bytes, in_), "cuMemcpyHtoDAsync");
    piece->ready = staging->free = events_->Record(in_);
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
    Staging* staging = TakeStaging(piece->bytes, staging_bytes);
    piece->staging = staging;
    staging->in_use = true;
    Wait(in_, staging->free);
    DevicePointer to = staging->memory;
    for (const StateIoPtr& io : piece->reads) {
      Check(GetCalls().copy_host_to_device(to, io->buffer->data, static_cast<size_t>(io->bytes), in_),
            "cuMemcpyHtoDAsync");
      to += static_cast<DevicePointer>(io->bytes);
      io->buffer->busy = events_->Record(in_);
    }
    piece->ready = staging->free = events_->Record(in_);
    piece->reads.clear();
  }

  void PushToDisk(const void* from, OnDisk* array, int64_t offset, size_t bytes, int64_t host_bytes, Stream compute) {
    const auto writes = array->disk->Write(array->array, array->version + 1, offset, static_cast<int64_t>(bytes),
                                           host_bytes, context_);
    array->pushed += bytes;
    if (writes.empty()) return;  // another device writes them
    Staging* staging = nullptr;
    if (device_ >= 0) {
      staging = TakeStaging(bytes, host_bytes);
      Wait(compute, staging->free);
      Check(GetCalls().copy_device_to_device(staging->memory, reinterpret_cast<DevicePointer>(from), bytes, compute),
            "cuMemcpyDtoDAsync");
      Wait(out_, events_->Record(compute));
    }
    int64_t at = 0;
    for (const StateIoPtr& io : writes) {
      const auto size = static_cast<size_t>(io->bytes);
      if (device_ < 0) {
        std::memcpy(io->buffer->data, static_cast<const char*>(from) + at, size);
      } else {
        Wait(out_, io->buffer->busy);
        Check(GetCalls().copy_device_to_host(io->buffer->data, staging->memory + static_cast<DevicePointer>(at), size,
                                             out_),
              "cuMemcpyDtoHAsync");
        io->after = last_out_ = staging->free = events_->Record(out_);
      }
      at += io->bytes;
      array->disk->Submit(io);
    }
  }

  void Take(const Waiting& piece, void* to, Stream compute) {
    if (device_ < 0) {
      std::memcpy(to, piece.memory.data(), piece.bytes);
      return;
    }
    Wait(compute, piece.ready);
    Check(GetCalls().copy_device_to_device(reinterpret_cast<DevicePointer>(to), piece.staging->memory, piece.bytes,
                                           compute),
          "cuMemcpyDtoDAsync");
    piece.staging->free = events_->Record(compute);
    piece.staging->in_use = false;
  }

  void Push(const void* from, char* to, size_t bytes, int64_t staging_bytes, Stream compute) {
    if (device_ < 0) {
      std::memcpy(to, from, bytes);
      return;
    }
    Staging* staging = TakeStaging(bytes, staging_bytes);
    Wait(compute, staging->free);
    Check(GetCalls().copy_device_to_device(staging->memory, reinterpret_cast<DevicePointer>(from), bytes, compute),
          "cuMemcpyDtoDAsync");
    Wait(out_, events_->Record(compute));
    Check(GetCalls().copy_device_to_host(to, staging->memory, bytes, out_), "cuMemcpyDtoHAsync");
    last_out_ = staging->free = events_->Record(out_);
  }

  // Staging memory that is free now; else new memory, within `staging_bytes`; else the memory that is free soonest.
  Staging* TakeStaging(size_t bytes, int64_t staging_bytes) {
    const auto fits = [&](const Staging& s) {
      return !s.in_use && s.capacity >= bytes && s.capacity <= bytes + bytes / 2 + (1 << 16);
    };
    Staging* oldest = nullptr;
    size_t total = 0;
    for (auto at = staging_.begin(); at != staging_.end(); ++at) {
      total += at->capacity;
      if (!fits(*at)) continue;
      if (!at->free || GetCalls().event_query(at->free.get()) == 0) {
        staging_.splice(staging_.end(), staging_, at);
        return &staging_.back();
      }
      if (oldest == nullptr) oldest = &*at;
    }
    if (oldest == nullptr || total + bytes <= static_cast<size_t>(staging_bytes)) {
      for (auto at = staging_.begin(); at != staging_.end() && total + bytes > static_cast<size_t>(staging_bytes);) {
        if (at->in_use || fits(*at)) {
          ++at;
          continue;
        }
        total -= at->capacity;
        at = FreeStaging(at);  // of another size, perhaps another model's
      }
      Staging made;
      if (GetCalls().mem_alloc(&made.memory, bytes) == 0) {
        made.capacity = bytes;
        staging_.push_back(made);
        return &staging_.back();
      }
      Require(oldest != nullptr, "no device memory is left for staging " + std::to_string(bytes) +
                                     " bytes; leave some to other users than XLA (XLA_PYTHON_CLIENT_MEM_FRACTION), or "
                                     "give optimizer a smaller piece_bytes");
    }
    const auto at = std::find_if(staging_.begin(), staging_.end(), [&](const Staging& s) { return &s == oldest; });
    staging_.splice(staging_.end(), staging_, at);
    return oldest;
  }

  std::list<Staging>::iterator FreeStaging(std::list<Staging>::iterator at) {
    if (at->free) Check(GetCalls().event_synchronize(at->free.get()), "cuEventSynchronize");
    GetCalls().mem_free(at->memory);
    return staging_.erase(at);
  }

  void Forget(const Chain& chain) {
    for (const Waiting& piece : chain.waiting) {
      if (piece.staging != nullptr) piece.staging->in_use = false;
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
  std::list<Staging> staging_;  // least recently used first
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
