// Arrays in host memory that travel through the device piece by piece: the state of an optimizer.
//
// A program works on the pieces one after the other. The calls of one program form a chain, each passing the host arrays
// on, so their order is XLA's data flow. A piece is copied to the device's staging memory while earlier ones are worked
// on, and what comes out of it is copied back from staging memory while later ones are: one side stream for each
// direction, both busy at once. XLA's buffers are touched on the compute stream alone, so their lifetime is XLA's affair.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "../cuda_driver.h"
#include "xla/ffi/api/api.h"

namespace dejax::offload {

struct Transfer {
  int64_t array, offset, bytes;  // `array` is a position in the call's arrays
};

// What one call of the chain asks for.
struct PiecesRequest {
  int64_t run = 0, site = 0, first_tag = 0, staging_bytes = 0;
  bool finish = false;
  std::vector<int64_t> arrays;  // numbers of the host arrays that the call has
  std::vector<char*> addresses;
  std::vector<size_t> sizes;
  std::vector<Transfer> pulls;                  // to begin
  std::vector<Transfer> pushes;                 // to begin
  std::vector<const void*> pushed;              // whose bytes
  std::vector<std::pair<void*, size_t>> taken;  // where the pieces go that were begun first
};

// device: -1 is the CPU. Throws std::runtime_error.
void CallPieces(int device, const PiecesRequest& request, cuda::Stream compute);

// A call of the chain. `mode`:
//   0, between: host arrays are arguments only, although the call writes to them: a result in host memory beside one on the
//      device makes XLA take both for host memory. The first and the last call see to it that nobody else has them.
//        arguments:  ticket; host arrays; pieces to take back; anything, to come after it
//        results:    ticket; pieces
//   1, begin: makes the host arrays the program's own (XLA copies what was not donated), and does nothing.
//   2, finish: waits for everything.
//        arguments:  host arrays; of finish: ticket, pieces to take back, anything
//        results:    the host arrays, whose memory is the arguments'
// Other attributes: site: of the program; arrays: numbers of the host arrays; pull_array (a position in `arrays`),
// pull_offset, pull_bytes: pieces to begin to bring; push_array, push_offset: where to take pieces back; first_tag: how
// many pieces the earlier calls have given; staging_bytes: of the device, if it can be.
XLA_FFI_DECLARE_HANDLER_SYMBOL(PiecesCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(PiecesCuda);

}  // namespace dejax::offload
