// The entry points from XLA of pieces.cc.
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "driver/cuda_calls.h"
#include "driver/ffi_handlers.h"
#include "driver/together.h"
#include "state/pieces.h"

namespace ffi = xla::ffi;

namespace dejax::offload {
namespace {

// The attributes of a call, see pieces.h.
struct Attributes {
  int64_t site, mode, staging_bytes, call, pull_iterations, sharded;
  ffi::Span<const int64_t> marks, arrays, pull_array, pull_offset, pull_stride, pull_bytes, push_array, push_offset,
      push_stride, take_array, take_offset, take_stride;
};

}  // namespace
}  // namespace dejax::offload

using Numbers = ffi::Span<const int64_t>;
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    dejax::offload::Attributes, ffi::StructMember<int64_t>("site"), ffi::StructMember<int64_t>("mode"),
    ffi::StructMember<int64_t>("staging_bytes"),
    ffi::StructMember<int64_t>("call"), ffi::StructMember<int64_t>("pull_iterations"),
    ffi::StructMember<int64_t>("sharded"), ffi::StructMember<Numbers>("marks"), ffi::StructMember<Numbers>("arrays"),
    ffi::StructMember<Numbers>("pull_array"),
    ffi::StructMember<Numbers>("pull_offset"), ffi::StructMember<Numbers>("pull_stride"),
    ffi::StructMember<Numbers>("pull_bytes"), ffi::StructMember<Numbers>("push_array"),
    ffi::StructMember<Numbers>("push_offset"), ffi::StructMember<Numbers>("push_stride"),
    ffi::StructMember<Numbers>("take_array"), ffi::StructMember<Numbers>("take_offset"),
    ffi::StructMember<Numbers>("take_stride"));

namespace dejax::offload {
namespace {

void Require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("offload.optimizer: " + what);
}

constexpr int64_t kRegister = 0, kBegin = 1, kFinish = 2, kLoop = 3, kOpen = 4, kCommit = 5;

// The CPU's backend may give a result memory of its own.
void CopyArrays(const PiecesRequest& request, const ffi::RemainingRets& rets) {
  for (size_t i = 0; i < request.arrays.size(); ++i) {
    auto out = rets.get<ffi::AnyBuffer>(i);
    void* const to = (*out)->untyped_data();
    if (to != request.addresses[i]) std::memcpy(to, request.addresses[i], request.sizes[i]);
  }
}

void AddArrays(PiecesRequest* request, int device, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
               const Attributes& attributes) {
  const bool between = attributes.mode == kRegister || attributes.mode == kLoop;
  for (size_t i = 0; i < attributes.arrays.size(); ++i) {
    const auto in = args.get<ffi::AnyBuffer>((between ? 1 : 0) + i);
    Require(in.has_value(), "an operand is no array");
    void* const from = in->untyped_data();
    request->arrays.push_back(attributes.arrays[i]);
    request->addresses.push_back(static_cast<char*>(from));
    request->sizes.push_back(in->size_bytes());
    if (between) continue;
    auto out = rets.get<ffi::AnyBuffer>(i);
    Require(out.has_value(), "a result is no array");
    Require((*out)->untyped_data() == from || device < 0,
            "XLA did not update the state in place; use optimizer(tx, streams=False)");
  }
}

void AddPieces(PiecesRequest* request, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
               const Attributes& attributes) {
  for (size_t i = 0; i < attributes.push_array.size(); ++i) {
    const auto in = args.get<ffi::AnyBuffer>(1 + i);
    Require(in.has_value(), "an operand is no array");
    const int64_t bytes = in->size_bytes();
    request->pushes.push_back({attributes.push_array[i], attributes.push_offset[i], bytes, attributes.push_stride[i]});
    request->pushed.push_back(in->untyped_data());
  }
  for (size_t i = 0; i < attributes.pull_array.size(); ++i) {
    request->pulls.push_back(
        {attributes.pull_array[i], attributes.pull_offset[i], attributes.pull_bytes[i], attributes.pull_stride[i]});
  }
  for (size_t i = 0; i < attributes.take_array.size(); ++i) {
    auto out = rets.get<ffi::AnyBuffer>(1 + i);
    Require(out.has_value(), "a result is no array");
    const int64_t bytes = (*out)->size_bytes();
    request->taken.push_back({(*out)->untyped_data(), (*out)->size_bytes()});
    request->takes.push_back({attributes.take_array[i], attributes.take_offset[i], bytes, attributes.take_stride[i]});
  }
}

void CallDisk(int device, Stream compute, PiecesRequest* request, const ffi::RemainingArgs& args,
              const Attributes& attributes) {
  for (size_t i = 0; i < attributes.arrays.size(); ++i) {
    if (attributes.mode == kCommit) {
      request->committed.push_back(attributes.arrays[i]);
      continue;
    }
    request->opened.push_back(attributes.arrays[i]);
    request->opened_bytes.push_back(attributes.pull_bytes[i]);
  }
  if (attributes.mode == kOpen) {
    const auto tickets = args.get<ffi::AnyBuffer>(1);
    const size_t count = attributes.arrays.size(), words = attributes.marks.size() == 0 ? 4 : 6;
    Require(tickets.has_value() && tickets->size_bytes() == 4 * words * count && attributes.pull_bytes.size() == count &&
                (attributes.marks.size() == 0 || attributes.marks.size() == count),
            "a call has too few operands");
    request->tickets = tickets->untyped_data();
    request->marks.assign(attributes.marks.begin(), attributes.marks.end());
  }
  CallPieces(device, *request, compute);
}

void Do(int device, Stream compute, int64_t run, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
        const Attributes& attributes) {
  PiecesRequest request;
  request.run = run;
  request.site = attributes.site;
  request.staging_bytes = attributes.staging_bytes;
  request.finish = attributes.mode == kFinish;
  request.call = attributes.mode == kLoop ? attributes.call : -1;
  request.pull_iterations = attributes.pull_iterations;
  if (attributes.mode == kOpen || attributes.mode == kCommit) {
    CallDisk(device, compute, &request, args, attributes);
    return;
  }
  const bool between = attributes.mode == kRegister || attributes.mode == kLoop;
  const size_t count = attributes.arrays.size(), tickets = attributes.mode == kBegin ? 0 : 1;
  Require(args.size() >= count + tickets + attributes.push_array.size() && rets.size() >= (between ? 1 : count) &&
              (attributes.mode != kLoop || attributes.take_array.size() + 1 == rets.size()),
          "a call has too few operands");
  AddArrays(&request, device, args, rets, attributes);
  if (attributes.mode == kLoop) AddPieces(&request, args, rets, attributes);
  if (attributes.mode != kBegin) CallPieces(device, request, compute);
  if (!between) CopyArrays(request, rets);
}

// The pieces, and the host arrays, of a step that failed: NaN.
void FillResults(int device, Stream compute, const ffi::RemainingRets& rets, const Attributes& attributes) {
  const bool arrays = attributes.mode == kBegin || (attributes.mode == kFinish && attributes.arrays.size() > 0);
  for (size_t i = arrays ? 0 : 1; i < rets.size(); ++i) {
    auto out = rets.get<ffi::AnyBuffer>(i);
    if (!out.has_value()) continue;
    const auto bytes = static_cast<int64_t>((*out)->size_bytes());
    if (device < 0) {
      std::memset((*out)->untyped_data(), 0xff, bytes);
    } else {
      FillWithOnes(reinterpret_cast<DevicePointer>((*out)->untyped_data()), bytes, compute);
    }
  }
}

// A call of one device's chain, which fails together with those of the other devices: see together.h. A state that no
// device can go on from is refused at once, or with the last call (pieces.h): all devices make it at the same place of
// the program.
void DoOnShard(int device, Stream compute, int64_t run, const ffi::RemainingArgs& args,
               const ffi::RemainingRets& rets, const Attributes& attributes) {
  const bool late = attributes.sharded == 2 && device < 0 && attributes.mode != kFinish;
  try {
    BeginTogether(run);
    if (!HasFailedTogether(run)) {
      try {
        Do(device, compute, run, args, rets, attributes);
        return;
      } catch (const FailsEverywhere& error) {
        BeginTogether(run);  // as this step began, the one before failed on another device: that is the cause
        if (!late) throw;
        RefuseTogether(run, error.what());
      } catch (const std::exception& error) {
        FailTogether(run, error.what(), /*of_state=*/true);
      }
    }
  } catch (const std::exception&) {
    if (!late) throw;
  }
  AbandonPieces(device, run, attributes.site);
  FillResults(device, compute, rets, attributes);
}

ffi::Error CallOfChain(Where where, ffi::RemainingArgs args, ffi::RemainingRets rets, Attributes attributes) {
  return Reported("", ffi::ErrorCode::kFailedPrecondition, [&] {
    const int device = where.on_gpu ? where.device : -1 - where.device;
    (attributes.sharded != 0 ? DoOnShard : Do)(device, where.stream, where.run, args, rets, attributes);
  });
}

DEJAX_FFI_HANDLERS("dejax_offload_pieces", CallOfChain, .RemainingArgs().RemainingRets().Attrs<Attributes>());

}  // namespace
}  // namespace dejax::offload
