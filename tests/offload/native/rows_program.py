"""Rows of a stack's state on the CUDA side, with the driver of fake_cuda.cc: run by test_ring.py."""

import ctypes
import sys

import numpy as np

from tests.offload.native.ring_program import address, cuda, testing

keep = []


def run(rng, stream, number, ahead, staging):
    """Forward reads the first array row by row; backward reads all, the last row first: x := 3 x + 1.

    Another loop, in either direction, then reads what backward wrote, and writes it again in the same way.
    """
    rows = int(rng.integers(1, 7))
    widths = rng.integers(1, 900, size=3)
    given = [rng.integers(0, 2**20, size=(rows, int(n)), dtype=np.uint32) for n in widths]
    want = [3 * a + 1 for a in given]
    last = [3 * a + 1 for a in want]
    loops = [([0], False, given), ([0, 1, 2], True, given), ([0, 1, 2], bool(rng.integers(2)), want)]
    arrays = [np.zeros_like(a) for a in given]
    for a, b in zip(arrays, given, strict=True):  # as XLA copies a state that was not donated
        cuda.cuMemcpyDtoDAsync_v2(address(a), address(b), a.nbytes, stream)
    row = [int(4 * n) for n in widths]
    places = [(a.ctypes.data, a.nbytes) for a in arrays]
    slots = iter(range(100))

    def call(slot, *, takes=(), pulls=(), pushes=(), pushed=(), taken=(), iterations=0):
        testing.call_rows_on_cuda(
            number, 1, stream, slot, staging, iterations, list(takes), list(pulls), list(pushes),
            [address(x) for x in pushed], [(address(x), x.nbytes) for x in taken],
        )  # fmt: skip

    testing.call_pieces_on_cuda(number, 1, stream, 0, staging, False, places, [], [], [], [])
    seen = []
    for numbers, reverse, before in loops:
        first = [(rows - 1) * row[i] if reverse else 0 for i in numbers]
        stride = [-row[i] if reverse else row[i] for i in numbers]
        for t in range(min(ahead, rows)):
            begin = [(i, f + t * s, row[i], 0) for i, f, s in zip(numbers, first, stride, strict=True)]
            call(next(slots), pulls=begin, iterations=1)
        take, put = next(slots), next(slots)
        for t in range(rows):
            k = rows - 1 - t if reverse else t
            scratch = [np.empty(widths[i], np.uint32) for i in numbers]
            outs = [np.empty(widths[i], np.uint32) for i in numbers]
            call(
                take,
                takes=[(i, f, row[i], s) for i, f, s in zip(numbers, first, stride, strict=True)],
                pulls=[(i, f + ahead * s, row[i], s) for i, f, s in zip(numbers, first, stride, strict=True)],
                taken=scratch,
                iterations=max(0, rows - ahead),
            )
            for out, x in zip(outs, scratch, strict=True):
                cuda.cuMemcpyDtoDAsync_v2(address(out), address(x), x.nbytes, stream)
                cuda.cuMemsetD32Async(address(x), 0xDEAD, x.size, stream)
            if rng.random() < 0.3:
                assert cuda.cuStreamSynchronize(stream) == 0
            seen.append((numbers, k, outs, before))
            if numbers == [0]:
                keep.append(scratch)
                continue
            new = [np.ascontiguousarray((want if before is given else last)[i][k]) for i in numbers]
            for x, value in zip(scratch, new, strict=True):  # in place of a kernel
                cuda.cuMemcpyDtoDAsync_v2(address(x), address(value), x.nbytes, stream)
            pushes = [(i, f, row[i], s) for i, f, s in zip(numbers, first, stride, strict=True)]
            call(put, pushes=pushes, pushed=scratch)
            for x in scratch:
                cuda.cuMemsetD32Async(address(x), 0xBEEF, x.size, stream)
            keep.append((scratch, new))
    testing.call_pieces_on_cuda(number, 1, stream, 0, staging, True, places, [], [], [], [])
    keep.append((given, arrays, seen, want, last))
    assert cuda.cuStreamSynchronize(stream) == 0
    for numbers, k, outs, before in seen:
        assert all((out == before[i][k]).all() for i, out in zip(numbers, outs, strict=True)), (number, k)
    assert all((a == w).all() for a, w in zip(arrays, last, strict=True)), number


def wrong_order(stream):
    """A piece that was not pulled for this iteration is refused."""
    array = np.zeros((2, 8), np.uint32)
    out = np.zeros(8, np.uint32)
    testing.call_pieces_on_cuda(9999, 1, stream, 0, 1 << 20, False, [(array.ctypes.data, array.nbytes)], [], [], [], [])
    testing.call_rows_on_cuda(9999, 1, stream, 0, 1 << 20, 1, [], [(0, 0, 32, 0)], [], [], [])
    try:
        testing.call_rows_on_cuda(
            9999, 1, stream, 1, 1 << 20, 0, [(0, 32, 32, 0)], [], [], [], [(address(out), 32)]
        )  # fmt: skip
    except RuntimeError as error:
        assert "in another order" in str(error)
    else:
        raise AssertionError("a wrong row was taken")
    keep.append((array, out))


def main(seed):
    rng = np.random.default_rng(seed)
    stream = ctypes.c_void_p()
    cuda.cuStreamCreate(ctypes.byref(stream), 0)
    number = 0
    for ahead in (1, 2, 5):
        for staging in (1, 20000, 1 << 20):
            for _ in range(8):
                number += 1
                run(rng, stream.value, number, ahead, staging)
    wrong_order(stream.value)
    print("right", number, "programs")


if __name__ == "__main__":
    main(int(sys.argv[1]))
