"""Random programs on the CUDA side of the store, with the driver of fake_cuda.cc: run by test_ring.py."""

import ctypes
import sys
import threading

import numpy as np

from dejax import _native
from dejax.offload import ActivationStore

cuda = ctypes.CDLL("libcuda.so.1")
for name in ("cuMemsetD32Async", "cuMemcpyDtoDAsync_v2"):
    getattr(cuda, name).argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
cuda.cuMemsetD32Async.argtypes = [ctypes.c_uint64, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p]
cuda.cuStreamSynchronize.argtypes = [ctypes.c_void_p]


testing = _native.extension("tests").offload_testing


def address(array):
    return array.ctypes.data


def program(rng, store, stream, run, order):
    """One step: random stores, then fetches in an order; XLA's buffers are reused as soon as the stream allows."""
    sizes = rng.choice([1024, 4096, 5000 * 4, 2048, 65536], size=int(rng.integers(1, 30)))
    scratch = np.empty(65536 // 4, np.uint32)  # "XLA's buffer", used for every tensor
    handles = np.zeros((len(sizes), 2), np.uint32)
    outs = [np.empty(size // 4, np.uint32) for size in sizes]
    values = rng.integers(1, 2**31, size=len(sizes), dtype=np.uint32)
    native = store._native
    sites = [i % 3 for i in range(len(sizes))]

    def put(i):
        cuda.cuMemsetD32Async(address(scratch), int(values[i]), len(outs[i]), stream)
        testing.store_on_cuda(
            native, run, 0, stream, sites[i], 1 << 17, address(scratch), outs[i].nbytes, address(handles[i])
        )
        cuda.cuMemsetD32Async(address(scratch), 0xDEAD, len(outs[i]), stream)

    def get(i):
        testing.fetch_on_cuda(run, 0, stream, sites[i], address(handles[i]), address(scratch), outs[i].nbytes)
        cuda.cuMemcpyDtoDAsync_v2(address(outs[i]), address(scratch), outs[i].nbytes, stream)
        cuda.cuMemsetD32Async(address(scratch), 0xBEEF, len(outs[i]), stream)

    if order == "twice":  # unknown sites: their tensors stay for a second fetch
        sites = [10**6 + 100 * run + i for i in range(len(sizes))]
    half = len(sizes) // 2
    for i in range(half):
        put(i)
    if order in ("nested", "twice"):  # some are fetched, then more are stored, as in gradient accumulation
        back = list(range(half // 2, half))[::-1]
        for i in back:
            get(i)
    for i in range(half, len(sizes)):
        put(i)
    left = [i for i in range(len(sizes)) if not (order == "nested" and half // 2 <= i < half)][::-1]
    if order == "random":
        left = list(rng.permutation(left))
    for i in left:
        get(i)
    if order == "twice":
        put_more = rng.integers(0, len(sizes))
        for i in [*left, *left[:put_more]]:
            get(i)
    keep.append((scratch, handles, outs))
    return outs, values


keep = []  # queued work uses these buffers


def main(seed: int, path: str | None) -> None:
    assert _native.unavailable_reason() is None
    rng = np.random.default_rng(seed)
    stream = ctypes.c_void_p()
    cuda.cuStreamCreate(ctypes.byref(stream), 0)
    stream = stream.value
    run = 0
    for ring in (0, 1024, 70000, 1 << 17, 1 << 20):
        with ActivationStore(
            path, device_bytes=ring, host_bytes=(1 << 18) if path else (1 << 24), chunk_bytes=1 << 14, io_threads=2
        ) as store:
            for order in ("reverse", "nested", "random", *(() if path else ("twice",))):
                results = []
                for _ in range(12):
                    run += 1
                    results.append(program(rng, store, stream, run, order))
                    if rng.random() < 0.3:
                        assert cuda.cuStreamSynchronize(stream) == 0
                assert cuda.cuStreamSynchronize(stream) == 0
                for outs, values in results:
                    for out, value in zip(outs, values, strict=True):
                        assert (out == value).all(), (ring, order, out[:4], value)
            store.drain()
            stats = store.stats()
            assert stats.live_count == 0 and stats.disk_bytes == 0, stats
            assert stats.stored_count <= stats.fetched_count
    if path:
        disk_in_time(stream, path, run)
        run += 10
        two_threads(rng, stream, path, run)
        shared_in_a_loop(stream, path, run + 10000)
    else:
        a_run_keeps_its_store(stream, run + 1)
    print("right", run, "programs")


def disk_in_time(stream, path, run):
    """Tensors that stay in the ring are not copied, those that fit into memory are not written.

    Tensors that were read go on to the ring before their fetch. On a busy machine slow I/O threads can make the store
    write more: one of several runs must do no more than needed.
    """
    size, count, ring, host = 4096, 20, 4, 8
    scratch, out = np.empty(size // 4, np.uint32), np.empty((count, size // 4), np.uint32)
    handles = np.zeros((count, 2), np.uint32)
    keep.append((scratch, out, handles))
    options = {"device_bytes": ring * size, "host_bytes": host * size, "chunk_bytes": size, "io_threads": 2}
    with ActivationStore(path, **options) as store:
        for number in range(run + 1, run + 11):
            before = store.stats()
            for i in range(count):
                cuda.cuMemsetD32Async(address(scratch), i + 1, size // 4, stream)
                testing.store_on_cuda(
                    store._native, number, 0, stream, 1, 0, address(scratch), size, address(handles[i])
                )
            for i in reversed(range(count)):
                testing.fetch_on_cuda(number, 0, stream, 1, address(handles[i]), address(scratch), size)
                cuda.cuMemcpyDtoDAsync_v2(address(out[i]), address(scratch), size, stream)
            assert cuda.cuStreamSynchronize(stream) == 0
            assert (out == np.arange(1, count + 1)[:, None]).all()
            bytes_done = {key: value for key, value in store.stats().as_dict().items() if key.endswith("_bytes")}
            done = {key: (value - getattr(before, key)) // size for key, value in bytes_done.items()}
            in_order = done["ring_hit_bytes"] == ring and done["copied_out_bytes"] == count - ring
            # An eighth of host memory is kept free: one more may be written, and then perhaps read.
            least, most = count - ring - host, count - ring - host + host // 8
            in_time = least <= done["read_bytes"] <= done["written_bytes"] <= most and done["demand_bytes"] == 0
            if number >= run + 4 and in_order and in_time:  # by the fourth run the store knows the program
                return
        raise AssertionError(done)


def shared_in_a_loop(stream, path, run):
    """A tensor that was stored before a loop is fetched in each turn, also in a first run that is short of memory.

    When it is fetched first it lies in the ring, and its memory on the host holds another tensor.
    """
    size, turns = 4096, 12
    scratch, outs = np.empty(size // 4, np.uint32), np.zeros((2, turns, size // 4), np.uint32)
    handles = np.zeros((turns + 1, 2), np.uint32)
    keep.append((scratch, outs, handles))
    options = {"device_bytes": 32 * size, "host_bytes": 4 * size, "chunk_bytes": size, "io_threads": 2}
    with ActivationStore(path, **options) as store:
        for number in range(run, run + 4):
            for i in range(turns + 1):
                cuda.cuMemsetD32Async(address(scratch), i + 1, size // 4, stream)
                testing.store_on_cuda(
                    store._native, number, 0, stream, min(i, 1), 0, address(scratch), size, address(handles[i])
                )
            for turn in reversed(range(turns)):
                for out, i in ((outs[0, turn], turn + 1), (outs[1, turn], 0)):
                    testing.fetch_on_cuda(number, 0, stream, min(i, 1), address(handles[i]), address(scratch), size)
                    cuda.cuMemcpyDtoDAsync_v2(address(out), address(scratch), size, stream)
            assert cuda.cuStreamSynchronize(stream) == 0
            assert (outs[0] == np.arange(2, turns + 2)[:, None]).all() and (outs[1] == 1).all()


def a_run_keeps_its_store(stream, run):
    """The store of a binding changes: a run keeps its store, and fetches use the store in their handle."""
    from dejax import _dejax_native as native

    size, binding = 4096, 7
    scratch, outs, handles = np.empty(size // 4, np.uint32), np.zeros((6, size // 4), np.uint32), np.zeros((6, 2), "u4")
    keep.append((scratch, outs, handles))

    def put(run, i):
        cuda.cuMemsetD32Async(address(scratch), i + 1, size // 4, stream)
        testing.store_by_binding_on_cuda(
            binding, run, 0, stream, 1, 1 << 16, address(scratch), size, address(handles[i])
        )

    def get(run, i):
        testing.fetch_on_cuda(run, 0, stream, 1, address(handles[i]), address(scratch), size)
        cuda.cuMemcpyDtoDAsync_v2(address(outs[i]), address(scratch), size, stream)

    with ActivationStore(device_bytes=2 * size) as one, ActivationStore(device_bytes=2 * size) as two:
        native.bind_offload_store(binding, one.id)
        put(run, 0), put(run, 1)
        native.bind_offload_store(binding, two.id)
        put(run, 2)
        for i in (2, 1, 0):
            get(run, i)
        put(run + 1, 3)  # a new run
        native.bind_offload_store(binding, one.id)
        put(run + 2, 4)
        native.bind_offload_store(binding, two.id)
        put(run + 3, 5)
        get(run + 2, 4)
        get(run + 4, 3)  # backward in a program of its own, which has stored nothing
        native.bind_offload_store(binding, 0)
        get(run + 5, 5)
        assert cuda.cuStreamSynchronize(stream) == 0
        assert (outs == np.arange(1, 7)[:, None]).all(), outs[:, 0]
        stats = one.stats(), two.stats()
        assert [s.stored_count for s in stats] == [s.fetched_count for s in stats] == [4, 2], stats
        put_by_a_closed_store(native, binding, lambda: put(run + 6, 0), two)


def put_by_a_closed_store(native, binding, put, store):
    native.bind_offload_store(binding, store.id)
    store.close()
    try:
        put()  # falls back to the default store, but there is none
    except RuntimeError as error:
        assert "no store is current" in str(error), error
    else:
        raise AssertionError("a store without an open store did not fail")


def two_threads(rng, stream, path, run):
    """Steps of two threads take the ring from each other while either waits for room."""
    errors = []

    def work(first, rng):
        try:
            for number in range(first, first + 40):
                outs, values = program(rng, store, stream, number, "reverse")
                assert cuda.cuStreamSynchronize(stream) == 0
                assert all((out == value).all() for out, value in zip(outs, values, strict=True)), number
        except Exception as error:
            errors.append(error)

    for ring in (70000, 1 << 17):
        with ActivationStore(path, device_bytes=ring, host_bytes=1 << 19, chunk_bytes=1 << 14, io_threads=2) as store:
            threads = [
                threading.Thread(target=work, args=(run + 1 + 1000 * k, np.random.default_rng(k))) for k in range(2)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if errors:
                raise errors[0]
            assert store.stats().live_count == 0


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
