"""Pieces of an optimizer's state on the CUDA side, with the driver of fake_cuda.cc: run by test_ring.py."""

import itertools
import sys

import numpy as np

from tests.offload.native.ring_program import address, cuda, testing
from tests.offload.native.row_loops import keep, new_stream, rows_calls


def run(rng, stream, number, ahead, staging):
    """state := 3 * state + 1 in pieces; XLA's buffers are reused as soon as the stream allows."""
    given = [rng.integers(0, 2**20, size=int(n), dtype=np.uint32) for n in rng.integers(1, 4000, size=3)]
    want = [3 * a + 1 for a in given]
    arrays = [np.zeros_like(a) for a in given]
    for a, b in zip(arrays, given, strict=True):  # as XLA copies a state that was not donated
        cuda.cuMemcpyDtoDAsync_v2(address(a), address(b), a.nbytes, stream)
    step = int(rng.integers(100, 1500))
    pieces = [(i, at, min(step, a.size - at)) for i, a in enumerate(arrays) for at in range(0, a.size, step)]
    places = [(a.ctypes.data, a.nbytes) for a in arrays]
    outs = [np.empty(step, np.uint32) for _ in pieces]
    results = [np.empty(step, np.uint32) for _ in pieces]
    scratch = np.empty(step, np.uint32)

    call, slots = rows_calls(number, stream, staging), itertools.count()

    def place(k):
        i, at, count = pieces[k]
        return (i, 4 * at, 4 * count, 0)

    testing.call_chain_on_cuda(number, 1, stream, staging, False, places)
    call(next(slots), pulls=[place(k) for k in range(min(ahead, len(pieces)))], iterations=1)
    for k, (i, at, count) in enumerate(pieces):
        later = [place(k + ahead)] if k + ahead < len(pieces) else []
        call(next(slots), takes=[place(k)], pulls=later, taken=[scratch[:count]], iterations=1)
        cuda.cuMemcpyDtoDAsync_v2(address(outs[k]), address(scratch), 4 * count, stream)
        cuda.cuMemsetD32Async(address(scratch), 0xDEAD, step, stream)
        # In place of a kernel: its known results are copied.
        if rng.random() < 0.3:
            assert cuda.cuStreamSynchronize(stream) == 0
        results[k][:count] = want[i][at : at + count]
        cuda.cuMemcpyDtoDAsync_v2(address(scratch), address(results[k]), 4 * count, stream)
        call(next(slots), pushes=[place(k)], pushed=[scratch[:count]])
        cuda.cuMemsetD32Async(address(scratch), 0xBEEF, step, stream)
    testing.call_chain_on_cuda(number, 1, stream, staging, True, places)
    keep.append((given, arrays, outs, results, scratch))
    assert cuda.cuStreamSynchronize(stream) == 0
    for (i, at, count), out in zip(pieces, outs, strict=True):
        assert (3 * out[:count] + 1 == want[i][at : at + count]).all(), (i, at)
    assert all((a == w).all() for a, w in zip(arrays, want, strict=True))


def main(seed):
    rng = np.random.default_rng(seed)
    stream = new_stream()
    number = 0
    for ahead in (1, 2, 4):
        for staging in (1, 20000, 1 << 20):
            for _ in range(8):
                number += 1
                run(rng, stream, number, ahead, staging)
    print("right", number, "programs")


if __name__ == "__main__":
    main(int(sys.argv[1]))
