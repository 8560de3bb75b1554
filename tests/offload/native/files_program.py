"""State in files on the CUDA side, with the driver of fake_cuda.cc: run by test_ring.py."""

import sys

import numpy as np

from dejax.offload import StateStore
from tests.offload.native.ring_program import address, cuda, testing
from tests.offload.native.row_loops import keep, loop, new_stream, rows_calls


def run(rng, store, stream, number, ahead, staging):
    """Three steps of x := 3 x + 1, row by row from the last one, on arrays in files; forward reads the first array."""
    rows = int(rng.integers(1, 7))
    widths = rng.integers(1, 9000, size=3)
    values = [rng.integers(0, 2**20, size=(rows, int(n)), dtype=np.uint32) for n in widths]
    row = [int(4 * n) for n in widths]
    state = [store.put(a, size) for a, size in zip(values, row, strict=True)]
    everything = []
    for step in range(3):
        here = 100 * number + step
        tickets = np.stack([np.asarray(x.ticket) + np.array([0, 0, step, 0], np.uint32) for x in state])
        scratch_tickets = np.zeros_like(tickets)  # written by earlier work of the stream
        cuda.cuMemcpyDtoDAsync_v2(address(scratch_tickets), address(tickets), tickets.nbytes, stream)
        new = [3 * a + 1 for a in values]
        call, slots = rows_calls(here, stream, staging), iter(range(100))
        sizes = [a.nbytes for a in values]
        testing.call_files_on_cuda(here, 1, stream, staging, [0, 1, 2], sizes, address(scratch_tickets))
        seen = []
        for numbers, reverse, written in (([0], False, None), ([0, 1, 2], True, new)):
            sized = {"rows": rows, "widths": widths, "ahead": ahead}
            seen += loop(call, slots, stream, numbers, reverse, new=written, **sized)
        testing.call_files_on_cuda(here, 1, stream, staging, [0, 1, 2], [], 0)
        testing.call_chain_on_cuda(here, 1, stream, staging, True, [])
        keep.append((tickets, scratch_tickets))
        if rng.random() < 0.3:
            assert cuda.cuStreamSynchronize(stream) == 0
        everything += [(out, values[i][k]) for i, k, out in seen]
        values = new
    assert cuda.cuStreamSynchronize(stream) == 0
    assert all((out == want).all() for out, want in everything), number
    for x, want in zip(state, values, strict=True):
        ticket = np.asarray(x.ticket) + np.array([0, 0, 3, 0], np.uint32)
        x = type(x)(ticket, x.shape, x.dtype, x.unit_bytes, store)
        assert (np.asarray(x) == want).all(), number
    store.remove(state)


def main(seed, path):
    rng = np.random.default_rng(seed)
    stream = new_stream()
    number = 0
    for threads, chunk in ((1, 4096), (2, 8192), (6, 1 << 20)):
        for host in (None, 0):
            with StateStore(path, io_threads=threads, chunk_bytes=chunk, host_bytes=host) as store:
                for ahead in (1, 2, 5):
                    for staging in (1, 60000, 1 << 20):
                        number += 1
                        run(rng, store, stream, number, ahead, staging)
    print("right", number, "programs")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
