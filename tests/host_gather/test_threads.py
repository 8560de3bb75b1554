"""Threads gather, write, update and close one table at once: they get rows or `TableClosedError`, never a crash."""

import random
import threading
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.host_gather import CachedTable, HostTable, TableClosedError, scatter_add, shardings

ROWS, WIDTH = 4096, 64
IDS = jnp.asarray(np.random.default_rng(0).integers(-5, ROWS + 5, 2048, np.int32))
read = jax.jit(lambda table, ids: table[ids].sum(axis=1))


def until(is_over: Callable[[], bool], act: Callable[[], None], failed: list[BaseException]) -> threading.Thread:
    """A thread that repeats `act` until `is_over()`, and may find the table closed."""

    def run() -> None:
        while not is_over() and not failed:
            try:
                act()
            except TableClosedError:
                pass
            except (RuntimeError, ValueError) as error:
                # jax's own error, if the table was closed between jit's check of its arguments and the call.
                if "deleted" not in str(error):
                    failed.append(error)
            except BaseException as error:
                failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("own", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_close_during_a_write(own: bool) -> None:
    """`write` must keep the memory alive while it copies rows into it."""
    block = np.ones((ROWS, WIDTH), np.float32)
    for _ in range(40):
        table = HostTable.zeros((ROWS, WIDTH)) if own else HostTable.from_numpy(block)
        started = threading.Barrier(3)
        failed: list[BaseException] = []

        def write(table: HostTable = table, started: threading.Barrier = started, failed: list = failed) -> None:
            started.wait()
            try:
                for _ in range(20):
                    table.write(0, block)
            except TableClosedError:
                pass
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=write) for _ in range(2)]
        for thread in threads:
            thread.start()
        started.wait()
        time.sleep(random.random() * 2e-3)
        table.close()
        # These arrays get the memory if it was released too early.
        others = [np.full((ROWS, WIDTH), -1, np.float32) for _ in range(2)]
        for thread in threads:
            thread.join()
        assert not failed, failed
        assert all((other == -1).all() for other in others)


@pytest.mark.parametrize("cached", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_everything_at_once(cached: bool) -> None:
    current: list[HostTable | CachedTable] = []
    lock = threading.Lock()  # of the list, not of the tables

    def fresh() -> HostTable | CachedTable:
        made = HostTable.from_numpy(np.ones((ROWS, WIDTH), np.float32))
        return CachedTable.from_ids(made, np.arange(0, ROWS, 9)) if cached else made

    current.append(fresh())
    add = jax.jit(
        lambda t, ids: scatter_add(t, ids, jnp.ones((*ids.shape, WIDTH))),
        donate_argnums=0, out_shardings=shardings(current[0]),
    )  # fmt: skip
    counts = dict.fromkeys(("gather", "eager", "numpy", "write", "update", "close"), 0)

    def done(name: str) -> None:
        counts[name] += 1

    def gathers() -> None:
        got = np.asarray(read(current[0], IDS))
        # A row that is being written may be half old, half new.
        assert (got == np.rint(got)).all() and got.min() >= 0, got
        done("gather")

    def eager() -> None:
        assert np.asarray(current[0][IDS]).shape == (2048, WIDTH)
        done("eager")

    def views() -> None:
        assert np.isfinite(current[0].numpy()[::7]).all()
        done("numpy")

    def writes() -> None:
        table = current[0]
        host = table.table if isinstance(table, CachedTable) else table
        host.write(0, np.ones((ROWS, WIDTH), np.float32))
        done("write")

    def updates() -> None:
        with lock:
            current[0] = add(current[0], IDS)
        done("update")
        time.sleep(1e-3)

    def closes() -> None:
        time.sleep(random.random() * 0.05)
        with lock:
            old, current[0] = current[0], fresh()
        old.close()
        done("close")

    failed: list[BaseException] = []
    begin = time.monotonic()

    def is_over() -> bool:
        """After 1.5 seconds, once everything has happened; on a machine that is slow or busy, later."""
        passed = time.monotonic() - begin
        return passed > 1.5 and (min(counts.values()) > 0 or passed > 60)

    threads = [until(is_over, act, failed) for act in (gathers, gathers, eager, views, writes, updates, closes)]
    for thread in threads:
        thread.join()
    assert not failed, failed
    assert min(counts.values()) > 0, counts
