"""Faults of the files of a `StateStore`."""

import contextlib

import jax

from dejax import _native
from dejax.offload import StateStore


def interceptor(store):
    return _native.extension("tests").offload_testing.Interceptor.of_state(store._native)


@contextlib.contextmanager
def store_of_shards(folder):
    """A store whose calls may fail on one device; at its end no failure is left that nobody has raised."""
    with StateStore(folder, chunk_bytes=4096) as store:
        yield store
    with contextlib.suppress(Exception):
        jax.effects_barrier()
    assert not _native.extension("tests").take_failure_of_shards()
