"""The store's mutex is free while a step waits, with the driver of fake_cuda.cc: run by test_ring.py.

The driver stops the step at each wait for the device and at each allocation. Meanwhile another thread asks for the
store's counters, and gets them at once. It also stops two devices' fetches where they submit a copy from the host: both
get there.
"""

import ctypes
import sys
import threading
import time

import numpy as np

from dejax.offload import ActivationStore
from tests.offload.native.ring_program import address, cuda, testing

SIZES = (1 << 12, 1 << 14, 1 << 16)


def steps(native, stream, errors):
    """Covers growing rings, freed slots of other sizes, handles that are read, and tensors larger than the ring."""
    keep = []
    try:
        run = 0
        for ring in (1 << 13, 1 << 17, 1 << 15):
            for size in SIZES:
                run += 1
                count = max(4, (1 << 18) // size)
                scratch, handles = np.empty(size // 4, np.uint32), np.zeros((count, 2), np.uint32)
                keep.append((scratch, handles))
                for i in range(count):
                    cuda.cuMemsetD32Async(address(scratch), run * 100 + i, size // 4, stream)
                    testing.store_on_cuda(
                        native, run, 0, stream, 10 * run, ring, address(scratch), size, address(handles[i])
                    )
                for i in reversed(range(count)):
                    testing.fetch_on_cuda(run, 0, stream, 10 * run, address(handles[i]), address(scratch), size)
                    if i % 16 == 0:
                        assert cuda.cuStreamSynchronize(stream) == 0
                        assert (scratch == run * 100 + i).all()
        assert cuda.cuStreamSynchronize(stream) == 0
    except Exception as error:
        errors.append(error)


def new_stream():
    stream = ctypes.c_void_p()
    cuda.cuStreamCreate(ctypes.byref(stream), 0)
    return stream.value


def fetches_of_two_devices():
    """A fetch submits its copies without the mutex, so that another device's fetch submits some at the same time."""
    size, count, errors = 1 << 12, 12, []
    with ActivationStore(host_bytes=1 << 20, device_bytes=4 * size) as store:
        streams, handles = [new_stream() for _ in range(2)], np.zeros((2, count, 2), np.uint32)
        rows = np.empty((2, count, size // 4), np.uint32)
        for device, stream in enumerate(streams):
            for i in range(count):
                rows[device, i] = 100 * device + i
                where = address(rows[device, i]), size, address(handles[device, i])
                testing.store_on_cuda(store._native, 1, device, stream, 1, 4 * size, *where)
            assert cuda.cuStreamSynchronize(stream) == 0
        want, rows[:] = rows.copy(), 0

        def fetch(device):
            try:
                for i in reversed(range(count)):
                    where = address(handles[device, i]), address(rows[device, i]), size
                    testing.fetch_on_cuda(1, device, streams[device], 1, *where)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=fetch, args=(device,), daemon=True) for device in range(2)]
        cuda.fake_hold_copies(1)
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 20
        while not (both := cuda.fake_waiting() == 2) and time.monotonic() < deadline:
            time.sleep(1e-3)
        cuda.fake_hold_copies(0)
        for thread in threads:
            thread.join()
        assert both, "a fetch waited while one of another device submitted its copies"
        assert not errors, errors
        assert all(cuda.cuStreamSynchronize(stream) == 0 for stream in streams)
        assert (rows == want).all()


def main(path):
    fetches_of_two_devices()
    stream, errors, waits = new_stream(), [], 0
    with ActivationStore(path, host_bytes=1 << 19, chunk_bytes=1 << 14, io_threads=2) as store:
        cuda.fake_hold(1)
        worker = threading.Thread(target=steps, args=(store._native, stream, errors), daemon=True)
        worker.start()
        while worker.is_alive():
            if cuda.fake_waiting() == 0:
                time.sleep(1e-4)
                continue
            waits += 1
            asker = threading.Thread(target=store.stats, daemon=True)
            asker.start()
            asker.join(5)
            assert not asker.is_alive(), f"the store was locked in wait number {waits}"
            cuda.fake_let_go()
        cuda.fake_hold(0)
        worker.join()
        if errors:
            raise errors[0]
    assert waits > 20, waits
    print("right", waits, "waits")


if __name__ == "__main__":
    main(sys.argv[2] if len(sys.argv) > 2 else None)
