// Arrays in host memory that travel through the device piece by piece: the state of an optimizer.
//
// A program works on the pieces one after the other. Its calls form a chain: each passes a ticket on, so XLA's data flow
// orders them. One side stream copies later pieces to staging memory on the device while the program works on
// earlier ones; another copies results from staging memory back to the host. So both directions of the bus are busy at
// once. Only the compute stream touches XLA's buffers: their lifetime is XLA's affair.
//
// What one call moves in one direction lies together in staging memory (staging.h). Each stream waits for it once, and the
// driver gets all copies over the bus in one call where it can: a layer may have dozens of small arrays.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "driver/cuda_driver.h"

namespace dejax::offload {

struct Transfer {
  int64_t array, offset, bytes;  // `array` is an array's number
  int64_t stride = 0;            // added to `offset` in each iteration of a loop
};

struct PiecesRequest {
  int64_t run = 0, site = 0, staging_bytes = 0;
  bool finish = false;
  int64_t call = -1, pull_iterations = 0;
  std::vector<int64_t> arrays;  // numbers of the host arrays of the call
  std::vector<char*> addresses;
  std::vector<size_t> sizes;
  std::vector<Transfer> pulls;                  // copies to the device to begin
  std::vector<Transfer> pushes;                 // copies to the host to begin
  std::vector<const void*> pushed;              // their sources
  std::vector<std::pair<void*, size_t>> taken;  // destinations of the pieces that were pulled first
  std::vector<Transfer> takes;                  // which pieces they are
  const void* tickets = nullptr;                // uint32[opened, 4 or, with marks, 6], of arrays in files
  std::vector<int64_t> opened, opened_bytes;    // their numbers and sizes
  std::vector<int64_t> marks;                   // of their divisions among devices; empty: whole arrays
  std::vector<int64_t> committed;               // numbers of those whose new version was pushed whole
};

// device: of a GPU; -1 - number of a device of the CPU. Throws std::runtime_error.
void CallPieces(int device, const PiecesRequest& request, cuda::Stream compute);

// The run has failed on another device: forgets its chain, which makes no more calls.
void AbandonPieces(int device, int64_t run, int64_t site);

// The handler of a call of the chain is in pieces_calls.cc. Its attribute `mode`:
//   0, register: tells the chain where the host arrays lie. Later calls name them by their numbers, and write to them,
//      although they are no operands: with a result in host memory beside one on the device, XLA would take both for host
//      memory. The first and the last call make sure that nobody else has them.
//        arguments:  ticket; host arrays
//        results:    ticket
//   1, begin: makes the host arrays the program's own (XLA copies those that were not donated).
//   2, finish: waits for everything.
//        arguments:  host arrays; of finish: ticket, further ones to wait for
//        results:    the host arrays, in the memory of the arguments; without host arrays the ticket
//   3, loop: copies pieces. The call may be in the body of a loop.
//        arguments:  ticket; pieces to push; further arguments only make the call wait for them
//        results:    ticket; pieces
//      call: number of the call in its program; its n-th execution in a run is iteration n. pull_iterations: in later
//      ones nothing is pulled. *_array: numbers of arrays. *_offset: where pieces begin, in bytes; *_stride: by which an
//      offset advances in each iteration. pull_bytes: sizes of the pieces to pull. The pieces to take must be those that
//      come next.
//   4, open: arrays in files (state_disk.h). Later calls of mode `loop` name them by their numbers. What is pushed is
//      their next version.
//        arguments:  ticket; uint32[arrays, 4], for each array: store, array, version, mark
//        results:    ticket
//      marks: of a sharded chain: for each array, which part of it each device holds, as a hash. Its rows go on with two
//      words: the place in the mesh of the device whose shard it is, and that of the device that makes the call.
//   5, commit: the next version of these arrays was pushed whole.
//        arguments, results: ticket
// Other attributes: site: of the program; arrays: numbers of the call's arrays; staging_bytes: cap of staging memory on
// the device, exceeded if need be; sharded: 1 or 2 for the chain of one device of several (inside of a shard_map), whose
// failures together.h raises on all of them; 2: on a CPU by `finish`, which waits for the step's results: the CPU's devices
// run a program in different orders, and one that raised early could leave others waiting in a collective operation.
}  // namespace dejax::offload
