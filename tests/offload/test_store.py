"""Tiers, caps, files and faults of `ActivationStore`."""

import os
import signal
import threading
import time
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.offload import ActivationStore, default_store
from tests.offload.held import eventually
from tests.offload.layers import (
    LAYERS,
    TENSOR,
    assert_same_bits,
    interceptor,
    loss_of,
    offloaded_inputs,
    operands,
    step,
)
from tests.offload.processes import popen

# No ring: on a GPU it would hold all of these tensors, and the tiers below it none.
NO_RING = {"device_bytes": 0}
SMALL = {**NO_RING, "host_bytes": 3 * TENSOR, "chunk_bytes": 4096, "io_threads": 2}


@pytest.fixture(scope="module")
def want():
    return step("checkpoint")(*operands())


def run():
    return jax.block_until_ready(step("inputs")(*operands()))


def chunk_files(path: Path) -> list[Path]:
    files = [file for folder in path.glob("dejax-offload-*") for file in folder.rglob("*") if file.is_file()]
    return [file for file in files if file.name != "owner" and file.stat().st_size]


@pytest.mark.parametrize("engine", ["direct", "tensorstore"])
def test_disk_tier_over_two_folders(engine, tmp_path, want):
    folders = [tmp_path / str(i) for i in range(2)]
    for folder in folders:
        folder.mkdir()
    with ActivationStore(folders, engine=engine, **SMALL) as store:
        for _ in range(5):
            assert_same_bits(run(), want)
        store.drain()
        stats = store.stats()
        assert stats.read_bytes > 0 and stats.written_bytes >= stats.read_bytes
        assert stats.peak_host_bytes <= 3 * TENSOR
        assert stats.live_count == 0 and stats.disk_bytes == 0
    assert not any(list(folder.iterdir()) for folder in folders)


def test_tensors_that_fit_into_memory_are_not_written(tmp_path, want):
    with ActivationStore(tmp_path, host_bytes=100 * TENSOR, **NO_RING) as store:
        run()  # in the first run the store does not know how much will come
        store.drain()
        written = store.stats().written_bytes
        for _ in range(3):
            assert_same_bits(run(), want)
        store.drain()
        stats = store.stats()
    assert stats.written_bytes == written and stats.read_bytes == 0
    assert stats.forwarded_bytes > 0


def test_a_slow_disk_makes_forward_wait_and_memory_stays_bounded(tmp_path, want):
    with ActivationStore(tmp_path, **SMALL) as store:
        run()
        interceptor(store).slow(0.003)
        assert_same_bits(run(), want)
        stats = store.stats()
    assert stats.peak_host_bytes <= 3 * TENSOR
    assert stats.store_stall_seconds + stats.fetch_stall_seconds > 0


def test_host_memory_too_small_without_a_disk(want):
    with ActivationStore(host_bytes=2 * TENSOR, **NO_RING) as store:
        with pytest.raises(Exception, match="host tier is full: host_bytes=16384.*raise host_bytes"):
            run()
        assert store.stats().live_count == 0  # the failed step left nothing
    with ActivationStore(host_bytes=TENSOR // 2, **NO_RING), pytest.raises(Exception, match="larger than host_bytes"):
        run()
    with ActivationStore(host_bytes=LAYERS * TENSOR, **NO_RING):
        for _ in range(3):
            assert_same_bits(run(), want)


def test_paths_that_cannot_be_used(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist; create it"):
        ActivationStore(tmp_path / "missing")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="must be a folder to write into"):
        ActivationStore(tmp_path / "file")
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    if os.access(locked, os.W_OK):
        pytest.skip("this user may write anywhere")
    with pytest.raises(PermissionError, match="cannot be written to"):
        ActivationStore(locked)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"host_bytes": -1}, "`host_bytes` must be at least 0 or None, got -1"),
        ({"chunk_bytes": 1000}, "must be a positive multiple of 4096, got 1000"),
        ({"engine": "fast"}, "'direct' or 'tensorstore', got 'fast'"),
        ({"io_threads": 0}, "at least 1, got 0"),
    ],
)
def test_bad_sizes(arguments, message):
    with pytest.raises(ValueError, match=message):
        ActivationStore(**arguments)


def damage_between_forward_and_backward(store, damage):
    """Runs forward and backward in two programs, and damages files in between."""
    ws, x = operands()
    _, vjp = forward(ws, x)
    jax.block_until_ready(vjp)
    store.drain()
    damage()
    return jax.block_until_ready(backward(vjp))


forward = jax.jit(lambda ws, x: jax.vjp(loss_of(offloaded_inputs), ws, x))
backward = jax.jit(lambda vjp: vjp(jnp.float32(1)))


ENGINES = ["tensorstore", "direct"]


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_truncated_file_is_an_error(engine, checksum, tmp_path):
    with ActivationStore(tmp_path, engine=engine, checksum=checksum, **SMALL) as store:
        with pytest.raises(Exception, match="truncated"):
            damage_between_forward_and_backward(store, lambda: [os.truncate(f, 0) for f in chunk_files(tmp_path)])


@pytest.mark.parametrize("checksum", [True, False])
def test_a_removed_file_is_an_error(checksum, tmp_path):
    """Only of TensorStore: the direct engine keeps its files open, and removed files stay readable."""
    with ActivationStore(tmp_path, engine="tensorstore", checksum=checksum, **SMALL) as store:
        with pytest.raises(Exception, match="removed"):
            damage_between_forward_and_backward(store, lambda: [f.unlink() for f in chunk_files(tmp_path)])


@pytest.mark.parametrize("engine", ["tensorstore", "direct"])
@pytest.mark.parametrize("kind", ["write", "read", "corrupt", "store", "fetch"])
def test_injected_faults(kind, engine, tmp_path, want):
    with ActivationStore(tmp_path, engine=engine, **SMALL) as store:
        run()
        faults = interceptor(store)
        faults.inject(kind, 2)
        failed = 0
        for _ in range(4):
            try:
                if kind == "corrupt":  # written before it is asked for, so not served from memory
                    gradients = damage_between_forward_and_backward(store, lambda: None)
                else:
                    gradients = run()
                assert_same_bits(gradients, want)  # right, or an exception
            except Exception as error:
                assert "offload" in str(error) and not isinstance(error, AssertionError)
                failed += 1
        assert failed >= (kind != "write")  # a failed write may be served from memory
        faults.inject(kind, 0)
        assert_same_bits(run(), want)
        store.drain()
        stats = store.stats()
        assert stats.live_count == 0 and stats.disk_bytes == 0


@pytest.mark.slow
def test_interrupted_step_then_retry(want):
    """Forward ran without backward: its tensors are dropped at the latest when room is needed."""
    ws, x = operands()
    with ActivationStore(host_bytes=8 * TENSOR, **NO_RING) as store:
        for _ in range(3):
            jax.block_until_ready(forward(ws, x))
        assert store.stats().live_bytes <= 8 * TENSOR
        assert_same_bits(run(), want)
        store.clear()
        assert store.stats().live_count == 0


@pytest.mark.slow
def test_forward_alone_in_a_full_store_waits_once(want):
    """The store waits for the first such run's backward pass only, by its own count; it drops later ones at once."""
    ws, x = operands()
    jax.block_until_ready(forward(ws, x))
    with ActivationStore(host_bytes=LAYERS * TENSOR, **NO_RING) as store:
        stalls = [0.0]
        for _ in range(6):
            jax.block_until_ready(forward(ws, x))
            stalls.append(store.stats().store_stall_seconds)
        assert sum(after - before > 1 for before, after in pairwise(stalls)) <= 1, stalls
        assert store.stats().live_bytes == LAYERS * TENSOR
        _, vjp = forward(ws, x)
        assert_same_bits(backward(vjp), want)  # the last one's tensors are there


def test_closed_too_early(want):
    store = ActivationStore()
    with store:
        run()
    with pytest.raises(RuntimeError, match="closed; make another"), store:
        pass
    assert_same_bits(run(), want)  # the process's own store takes over
    assert default_store().is_open
    body = jax.jit(jax.grad(lambda x: _explicit(x)))
    with pytest.raises(Exception, match="was closed before this step ran"):
        jax.block_until_ready(body(operands()[1]))


def _explicit(x):
    from dejax.offload import offload

    with ActivationStore() as store:
        return offload(lambda x: jnp.sin(x) * x, store=store, min_bytes=1)(x).sum()


def test_two_threads_and_many_stores(want, tmp_path):
    _ws, _x = operands()
    errors = []

    def work():
        try:
            with store.use():
                for _ in range(10):
                    assert_same_bits(run(), want)
        except Exception as error:
            errors.append(error)

    with ActivationStore(tmp_path, host_bytes=8 * TENSOR, chunk_bytes=4096, io_threads=2) as store:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert store.stats().live_count == 0
    for _ in range(20):
        with ActivationStore(tmp_path, host_bytes=8 * TENSOR):
            pass
    assert not list(tmp_path.iterdir())


def test_steps_dispatched_ahead(want, tmp_path):
    with ActivationStore(tmp_path, **SMALL):
        for got in [step("inputs")(*operands()) for _ in range(10)]:
            assert_same_bits(got, want)


KILLED = """
import sys, time
import jax
from dejax.offload import ActivationStore
from tests.offload.tensors import Tensors
store = ActivationStore(sys.argv[1], device_bytes=0, host_bytes=1 << 14, chunk_bytes=4096)
store.__enter__()
tensors = Tensors([8192] * 4)
jax.block_until_ready(tensors.put(tensors.xs))
store.drain()
assert store.stats().disk_bytes > 0
print("ready", flush=True)
time.sleep(60)
"""


def test_the_next_run_cleans_up_after_a_dead_owner_and_only_then(tmp_path):
    child = popen(KILLED, str(tmp_path))
    assert child.stdout.readline().strip() == "ready", child.stderr.read()
    (left,) = tmp_path.iterdir()
    with ActivationStore(tmp_path):
        assert left.exists()  # its owner lives
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert left.exists()
    with ActivationStore(tmp_path):
        assert not left.exists()
    assert not list(tmp_path.iterdir())


def test_stats_and_summary(tmp_path):
    with ActivationStore(tmp_path, **SMALL) as store:
        run()
        store.drain()
        text = store.summary(endurance_bytes=1e15)
        stats = store.stats()
    assert "disk:" in text and "rated for 1000 TB lasts" in text
    assert 0 < stats.lifetime_years(1e15) < float("inf")
    assert store.stats() == stats or store.stats().stored_count == stats.stored_count
    assert stats.as_dict()["stored_bytes"] == LAYERS * TENSOR


@pytest.mark.parametrize("engine", ["tensorstore", "direct"])
def test_soak_with_random_faults(engine, tmp_path, want):
    soak(tmp_path, want, int(os.environ.get("DEJAX_SOAK_STEPS", "100")), engine)


def soak(path, want, steps, engine):
    """Each of many steps with random faults gives the right result or raises, and nothing is left in the end."""
    rng = np.random.default_rng(0)
    ws, x = operands()
    descriptors = len(os.listdir("/proc/self/fd"))
    with ActivationStore(path, engine=engine, **SMALL) as store:
        wrong = failed = 0
        faults = interceptor(store)
        begin = time.monotonic()
        for _ in range(steps):
            if rng.random() < 0.2:
                kind = str(rng.choice(["write", "read", "corrupt", "store", "fetch"]))
                faults.inject(kind, int(rng.integers(1, 4)))
            try:
                if rng.random() < 0.05:
                    jax.block_until_ready(forward(ws, x)[0]) if rng.random() < 0.5 else store.clear()
                got = run()
            except Exception as error:
                assert "offload" in str(error)
                failed += 1
                continue
            wrong += not all(bool((a == b).all()) for a, b in zip(got, want, strict=True))
        for kind in ("write", "read", "corrupt", "store", "fetch"):
            faults.inject(kind, 0)
        assert wrong == 0 and failed > 0
        store.clear()
        assert_same_bits(run(), want)
        store.drain()
        stats = store.stats()
        assert stats.live_count == 0 and stats.disk_bytes == 0 and stats.host_bytes <= 3 * TENSOR
        print(f"{steps} steps, {failed} failed, {time.monotonic() - begin:.1f} s")
    assert not list(path.iterdir())
    # Pools and libraries may open a file or two, never one in each step.
    assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= descriptors + 2)
