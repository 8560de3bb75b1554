"""Static arrays that are linear in pieces are the same when they are made on the device."""

import jax
import numpy as np

from dejax.rgnn.graphs.building import static_tables


def test_arrays_made_on_the_device(monkeypatch):
    monkeypatch.setattr(static_tables, "_SHORT", 3)
    rng = np.random.default_rng(0)
    for _ in range(5):
        sizes = rng.integers(1, 50, 6)
        lines = [rng.integers(0, 100) + rng.integers(-2, 4) * np.arange(size) for size in sizes]
        given = np.concatenate(lines).astype(np.int32), np.repeat(np.arange(6, dtype=np.int32), sizes)
        got = jax.jit(lambda given=given: static_tables.on_device(*given))()
        for a, b in zip(got, given, strict=True):
            np.testing.assert_array_equal(a, b)


def test_short_arrays_and_those_of_many_pieces_stay_constants(monkeypatch):
    short = np.arange(10, dtype=np.int32)
    assert static_tables.on_device(short)[0] is short
    monkeypatch.setattr(static_tables, "_SHORT", 3)
    monkeypatch.setattr(static_tables, "_MOST_COMPARISONS", 20)
    wild = np.random.default_rng(0).permutation(10).astype(np.int32)
    assert static_tables.on_device(wild)[0] is wild
    assert static_tables.on_device(short)[0] is not short
