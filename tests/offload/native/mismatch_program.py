"""Mispredicted handles, with the driver of fake_cuda.cc: run by test_ring.py.

The host reads the predicted handle and the found one of the same run, also if other runs fail meanwhile.
"""

import ctypes
import re

import numpy as np

from dejax.offload import ActivationStore
from tests.offload.native.ring_program import address, cuda, testing

SIZE = 4096


def wrong_run(native, stream, run, keep):
    """Fetches two tensors of one site in the order of their stores; returns (first handle, second handle)."""
    scratch, handles, out = np.empty(SIZE // 4, np.uint32), np.zeros((2, 2), np.uint32), np.empty(SIZE // 4, np.uint32)
    keep.append((scratch, handles, out))
    for i in range(2):
        cuda.cuMemsetD32Async(address(scratch), i + 1, SIZE // 4, stream)
        testing.store_on_cuda(native, run, 0, stream, 7, 1 << 16, address(scratch), SIZE, address(handles[i]))
    testing.fetch_on_cuda(native, run, 0, stream, 7, address(handles[0]), address(out), SIZE)
    assert cuda.cuStreamSynchronize(stream) == 0
    assert (out == 0xFFFFFFFF).all()
    return tuple(int(low) | int(high) << 32 for low, high in handles)


def main():
    streams = []
    for _ in range(2):
        stream = ctypes.c_void_p()
        cuda.cuStreamCreate(ctypes.byref(stream), 0)
        streams.append(stream.value)
    keep, run = [], 0
    with ActivationStore(host_bytes=1 << 20) as store:
        native = store._native
        testing.Interceptor(native).set_prediction(2)
        for _ in range(20):
            run += 1
            first, second = wrong_run(native, streams[run % 2], run, keep)
            try:
                store.check()
            except RuntimeError as error:
                assert (second, first) == tuple(map(int, re.findall(r"handle (\d+), found (\d+)", str(error))[0])), (
                    error
                )
            else:
                raise AssertionError("the mismatch was not noticed")
            store.check()  # it is reported once
    print("right", run, "runs")


if __name__ == "__main__":
    main()
