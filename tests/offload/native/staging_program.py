"""Calls that pull and push many pieces at once, with the driver of fake_cuda.cc: run by test_ring.py.

Rows of odd sizes, from one byte on, and of several dtypes. The driver says how much device memory the calls hold, and
how often they ask it for something.
"""

import ctypes
import itertools
import os
import sys

import numpy as np

from tests.offload.native.ring_program import address, cuda, testing
from tests.offload.native.row_loops import keep, new_stream

DTYPES = [np.uint8, np.uint16, np.float32, np.complex64]
runs = itertools.count(1)
cuda.fake_count.restype = ctypes.c_long
cuda.fake_limit.argtypes = [ctypes.c_long]


def counted(what):
    return cuda.fake_count(what.encode())


def memory():
    """Bytes on the device now, and the most since the last call."""
    now, peak = ctypes.c_long(), ctypes.c_long()
    cuda.fake_memory(ctypes.byref(now), ctypes.byref(peak))
    return now.value, peak.value


def copy(to, from_, stream):
    cuda.cuMemcpyDtoDAsync_v2(address(to), address(from_), from_.nbytes, stream)


def given(rng, widths, dtypes, rows):
    """Arrays [rows, width] with random bytes."""
    return [
        rng.integers(0, 256, size=(rows, int(width) * np.dtype(dtype).itemsize), dtype=np.uint8).view(dtype)
        for width, dtype in zip(widths, dtypes, strict=True)
    ]


def whole(row_bytes, ahead):
    """The cap of a step's staging memory."""
    return 2 * (ahead + 1) * sum(-(-n // 256) * 256 for n in row_bytes)


class Program:
    """One execution of the calls of a step on some arrays."""

    def __init__(self, arrays, stream, staging):
        self.arrays, self.stream, self.staging = arrays, stream, staging
        self.number, self.slots = next(runs), itertools.count()
        self.places = [(a.ctypes.data, a.nbytes) for a in arrays]
        self.ends(finish=False)

    def ends(self, finish):
        testing.call_chain_on_cuda(self.number, 1, self.stream, self.staging, finish, self.places)

    def call(self, slot, takes=(), pulls=(), pushes=(), pushed=(), taken=(), iterations=0):
        testing.call_rows_on_cuda(
            self.number, 1, self.stream, slot, self.staging, iterations, list(takes), list(pulls), list(pushes),
            [address(x) for x in pushed], [(address(x), x.nbytes) for x in taken],
        )  # fmt: skip

    def loop(self, numbers, ahead, reverse, new=None, each=lambda: None):
        """Rows of some arrays, each `ahead` rows before its use; their values as they were read, row by row."""
        rows, size = len(self.arrays[0]), [a[0].nbytes for a in self.arrays]
        stride = [-n if reverse else n for n in size]
        first = [(rows - 1) * n if reverse else 0 for n in size]
        here = [(i, first[i], size[i], stride[i]) for i in numbers]
        later = [(i, at + ahead * s, n, s) for i, at, n, s in here]
        for t in range(min(ahead, rows)):
            self.call(next(self.slots), pulls=[(i, at + t * s, n, 0) for i, at, n, s in here], iterations=1)
        take, put = next(self.slots), next(self.slots)
        seen = []
        for t in range(rows):
            k = rows - 1 - t if reverse else t
            scratch = [np.empty_like(self.arrays[i][0]) for i in numbers]
            outs = [np.empty_like(x) for x in scratch]
            self.call(take, here, later, taken=scratch, iterations=max(0, rows - ahead))
            for out, x in zip(outs, scratch, strict=True):
                copy(out, x, self.stream)
                cuda.cuMemsetD32Async(address(x), 0xDEAD, x.nbytes // 4, self.stream)
            seen += [(i, k, out) for i, out in zip(numbers, outs, strict=True)]
            keep.append((scratch, outs))
            if new is not None:
                for i, x in zip(numbers, scratch, strict=True):  # in place of a kernel
                    copy(x, new[i][k], self.stream)
                self.call(put, pushes=here, pushed=scratch)
                for x in scratch:
                    cuda.cuMemsetD32Async(address(x), 0xBEEF, x.nbytes // 4, self.stream)
            each()
        return seen


def run(rng, stream, *, ahead, share, count=12):
    """Forward reads some arrays; backward reads all, the last row first, and writes others; a third loop reads them."""
    rows = int(rng.integers(1, 7))
    dtypes = [DTYPES[k] for k in rng.integers(0, len(DTYPES), count)]
    widths = [1, *rng.integers(1, 700, size=count - 1)]
    dtypes[0] = np.uint8  # a row of one byte
    before, after = (given(rng, widths, dtypes, rows) for _ in range(2))
    arrays = [np.zeros_like(a) for a in before]
    for a, b in zip(arrays, before, strict=True):
        copy(a, b, stream)
    cap = max(1, int(share * whole([a[0].nbytes for a in arrays], ahead)))
    program = Program(arrays, stream, cap)

    def each():
        if rng.random() < 0.3:
            assert cuda.cuStreamSynchronize(stream) == 0

    everything = range(count)
    seen = [(before, *x) for x in program.loop(range(0, count, 5), ahead, False, each=each)]
    seen += [(before, *x) for x in program.loop(everything, ahead, True, new=after, each=each)]
    seen += [(after, *x) for x in program.loop(everything, ahead, bool(rng.integers(2)), each=each)]
    program.ends(finish=True)
    keep.append((before, after, arrays))
    assert cuda.cuStreamSynchronize(stream) == 0
    for wanted, i, k, out in seen:
        assert out.tobytes() == wanted[i][k].tobytes(), (program.number, i, k)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(arrays, after, strict=True)), program.number


def a_call_is_cheap(stream, together):
    """Whatever the number of arrays: a few waits and records, and no question which memory is free."""
    rng = np.random.default_rng(0)
    asked = {}
    for count in (3, 40):
        arrays = given(rng, [100] * count, [np.float32] * count, 8)
        cap = whole([a[0].nbytes for a in arrays], 1)
        for _ in range(10):  # the first ones also wait for what was before
            program = Program(arrays, stream, cap)
            before = {what: counted(what) for what in ("wait", "record", "query", "batch", "to device", "to host")}
            program.loop(range(count), 1, True, new=[a.copy() for a in arrays])
            asked[count] = {what: counted(what) - n for what, n in before.items()}
            program.ends(finish=True)
            assert cuda.cuStreamSynchronize(stream) == 0
        keep.append(arrays)
    few, many = asked[3], asked[40]
    assert max(few["wait"], many["wait"]) <= 8 * 6, asked
    assert few["record"] == many["record"] <= 8 * 4, asked
    assert few["query"] == many["query"] == 0, asked
    if together:
        assert many["batch"] == 2 * 8 and many["to device"] == many["to host"] == 0, asked
    else:
        assert many["batch"] <= 1 and many["to device"] == many["to host"] == 8 * 40, asked


def memory_is_bounded(rng, stream):
    """A larger model, then small ones: the ring has the size of the cap, and at last it becomes small again."""
    arrays = given(rng, [1000, 3000], [np.float32] * 2, 6)
    cap = whole([4000, 12000], 1)
    for k in range(3):
        program = Program(arrays, stream, cap)
        program.loop([0], 1, False)
        program.loop([0, 1], 1, True, new=[a.copy() for a in arrays])
        program.ends(finish=True)
        assert cuda.cuStreamSynchronize(stream) == 0
        now, peak = memory()
        assert now == cap and (k == 0 or peak == cap), (k, now, peak, cap)
    small = given(rng, [25], [np.float32], 100)
    for _ in range(30):
        program = Program(small, stream, whole([100], 1))
        program.loop([0], 1, False, new=[a.copy() for a in small])
        program.ends(finish=True)
        assert cuda.cuStreamSynchronize(stream) == 0
    assert memory()[0] == whole([100], 1)
    keep.append((arrays, small))


def little_memory_is_enough(rng, stream):
    """The device has less than the cap: the calls wait for one another."""
    arrays = given(rng, [2500], [np.float32], 9)
    after = given(rng, [2500], [np.float32], 9)
    before = [a.copy() for a in arrays]
    keep.append((arrays, after))
    cuda.fake_limit(25000)
    program = Program(arrays, stream, whole([10000], 1))
    seen = program.loop([0], 1, False, new=after)
    program.ends(finish=True)
    assert cuda.cuStreamSynchronize(stream) == 0
    assert all(out.tobytes() == before[i][k].tobytes() for i, k, out in seen)
    assert arrays[0].tobytes() == after[0].tobytes()
    assert 0 < memory()[0] <= 25000
    huge = given(rng, [100000], [np.float32], 1)
    program = Program(huge, stream, 1)
    try:
        program.loop([0], 1, False)
    except RuntimeError as error:
        assert "no device memory is left" in str(error)
    else:
        raise AssertionError("memory that the device does not have")
    cuda.fake_limit(0)
    keep.append(huge)


def main(seed, batch):
    rng = np.random.default_rng(seed)
    stream = new_stream()
    little_memory_is_enough(rng, stream)
    memory_is_bounded(rng, stream)
    for ahead in (1, 2, 5):
        for share in (0.0, 0.1, 0.6, 1.0, 3.0):
            for _ in range(4):
                run(rng, stream, ahead=ahead, share=share)
    a_call_is_cheap(stream, together=batch != "refused")
    print("right")


if __name__ == "__main__":
    main(int(sys.argv[1]), os.environ.get("FAKE_CUDA_BATCH", ""))
