"""Rows of a stack's state on the CUDA side, with the driver of fake_cuda.cc: run by test_ring.py."""

import sys

import numpy as np

from tests.offload.native.ring_program import address, cuda, testing
from tests.offload.native.row_loops import keep, loop, new_stream, rows_calls


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
    places = [(a.ctypes.data, a.nbytes) for a in arrays]
    call, slots = rows_calls(number, stream, staging), iter(range(100))
    testing.call_chain_on_cuda(number, 1, stream, staging, False, places)
    seen = []

    def between():
        if rng.random() < 0.3:
            assert cuda.cuStreamSynchronize(stream) == 0

    for numbers, reverse, before in loops:
        new = None if numbers == [0] else want if before is given else last
        sized = {"rows": rows, "widths": widths, "ahead": ahead}
        found = loop(call, slots, stream, numbers, reverse, new=new, between=between, **sized)
        seen += [(out, before[i][k]) for i, k, out in found]
    testing.call_chain_on_cuda(number, 1, stream, staging, True, places)
    keep.append((given, arrays, seen, want, last))
    assert cuda.cuStreamSynchronize(stream) == 0
    assert all((out == wanted).all() for out, wanted in seen), number
    assert all((a == w).all() for a, w in zip(arrays, last, strict=True)), number


def wrong_order(stream):
    """A piece that was not pulled for this iteration is refused."""
    array = np.zeros((2, 8), np.uint32)
    out = np.zeros(8, np.uint32)
    testing.call_chain_on_cuda(9999, 1, stream, 1 << 20, False, [(array.ctypes.data, array.nbytes)])
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
    stream = new_stream()
    number = 0
    for ahead in (1, 2, 5):
        for staging in (1, 20000, 1 << 20):
            for _ in range(8):
                number += 1
                run(rng, stream, number, ahead, staging)
    wrong_order(stream)
    print("right", number, "programs")


if __name__ == "__main__":
    main(int(sys.argv[1]))
