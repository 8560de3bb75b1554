"""A loop over the rows of arrays on the CUDA side, as a step makes it: for files_program.py and rows_program.py."""

import ctypes

import numpy as np

from tests.offload.native.ring_program import address, cuda, testing

keep = []


def rows_calls(here, stream, staging):
    """`call(slot, ...)`: a call in a loop of the program `here`."""

    def call(slot, *, takes=(), pulls=(), pushes=(), pushed=(), taken=(), iterations=0):
        testing.call_rows_on_cuda(
            here, 1, stream, slot, staging, iterations, list(takes), list(pulls), list(pushes),
            [address(x) for x in pushed], [(address(x), x.nbytes) for x in taken],
        )  # fmt: skip

    return call


def loop(call, slots, stream, numbers, reverse, *, rows, widths, ahead, new=None, between=lambda: None):
    """Reads each row of the arrays `numbers`, `ahead` rows before its use.

    Args:
        call: see `rows_calls`.
        slots: an iterator of numbers of calls.
        reverse: the last row comes first.
        rows, widths: number of rows, and of elements in a row of each array.
        new: by number, the array whose rows are written in place of those that were read. None: nothing is.
        between: called after each row is taken.

    Returns:
        [(number of the array, row, its elements as they were read once the stream has come so far)].
    """
    row = [int(4 * n) for n in widths]
    first = [(rows - 1) * row[i] if reverse else 0 for i in numbers]
    stride = [-row[i] if reverse else row[i] for i in numbers]
    here = [(i, f, row[i], s) for i, f, s in zip(numbers, first, stride, strict=True)]
    later = [(i, f + ahead * s, size, s) for i, f, size, s in here]
    for t in range(min(ahead, rows)):
        call(next(slots), pulls=[(i, f + t * s, size, 0) for i, f, size, s in here], iterations=1)
    take, put = next(slots), next(slots)
    seen = []
    for t in range(rows):
        k = rows - 1 - t if reverse else t
        scratch = [np.empty(widths[i], np.uint32) for i in numbers]
        outs = [np.empty(widths[i], np.uint32) for i in numbers]
        call(take, takes=here, pulls=later, taken=scratch, iterations=max(0, rows - ahead))
        for out, x in zip(outs, scratch, strict=True):
            cuda.cuMemcpyDtoDAsync_v2(address(out), address(x), x.nbytes, stream)
            cuda.cuMemsetD32Async(address(x), 0xDEAD, x.size, stream)
        between()
        seen += [(i, k, out) for i, out in zip(numbers, outs, strict=True)]
        keep.append((scratch, outs))
        if new is None:
            continue
        updated = [np.ascontiguousarray(new[i][k]) for i in numbers]
        for x, value in zip(scratch, updated, strict=True):  # in place of a kernel
            cuda.cuMemcpyDtoDAsync_v2(address(x), address(value), x.nbytes, stream)
        call(put, pushes=here, pushed=scratch)
        for x in scratch:
            cuda.cuMemsetD32Async(address(x), 0xBEEF, x.size, stream)
        keep.append(updated)
    return seen


def new_stream():
    stream = ctypes.c_void_p()
    cuda.cuStreamCreate(ctypes.byref(stream), 0)
    return stream.value
