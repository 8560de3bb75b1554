"""What compute-sanitizer watches: every kind of gather and update at the edges of tables, against numpy.

compute-sanitizer --tool memcheck --error-exitcode 9 python tests/gpu/memory_check.py
"""

from __future__ import annotations

import itertools
import os

os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer=")

import jax
import jax.numpy as jnp
import numpy as np

from dejax.host_gather import (
    CachedTable,
    HostTable,
    RowGradient,
    adam,
    gather,
    gather_done,
    gather_start,
    scatter,
    scatter_add,
)

RNG = np.random.default_rng(0)
ROWS = 37


def expected(values: np.ndarray, ids: np.ndarray) -> np.ndarray:
    inside = (ids >= 0) & (ids < ROWS)
    return np.where(inside.reshape(-1, *[1] * (values.ndim - 1)), values[np.clip(ids, 0, ROWS - 1)], 0)


def main() -> int:
    ids = np.concatenate([RNG.integers(-3, ROWS + 3, 90), [0, ROWS - 1, ROWS, -1, 2**31 - 1, -(2**31)]]).astype(
        np.int32
    )
    done = 0
    for width, order in itertools.product((1, 3, 4, 33, 100, 129), ("given", "sorted")):
        for dtype in (np.float32, np.int8):
            values = RNG.integers(0, 100, (ROWS, width)).astype(dtype)
            table = HostTable.from_numpy(values)
            np.testing.assert_array_equal(gather(table, ids, order=order), expected(values, ids))
            done += 1
        values = values.astype(np.float32)
        table = HostTable.from_numpy(values)
        cached = CachedTable.from_ids(table, [0, 5, ROWS - 1])
        np.testing.assert_array_equal(gather(cached, ids, order=order), expected(values, ids))
        half = gather(table, ids, order=order, out_dtype=jnp.bfloat16)
        np.testing.assert_array_equal(half.astype(jnp.float32), expected(values, ids))
        gather(table, ids[:96].reshape(12, 8), reduce="mean").block_until_ready()
        rows = jax.jit(lambda table, ids: gather_done(gather_start(table, ids)))(table, jnp.asarray(ids))
        np.testing.assert_array_equal(rows, expected(values, ids))
        distinct = np.unique(np.concatenate([ids, [0, ROWS - 1]])).astype(np.int32)
        new = RNG.random((len(distinct), width), np.float32)
        for write in (scatter, scatter_add):
            written = write(HostTable.from_numpy(values * 0), distinct, new)
            np.testing.assert_array_equal(written[distinct], expected(written.numpy(), distinct))
        table = HostTable.from_numpy(values)
        optimizer = adam(0.1)
        table, _ = optimizer.update(RowGradient(jnp.asarray(distinct), jnp.asarray(new)), optimizer.init(table), table)
        assert np.isfinite(table.numpy()).all()
        done += 7
    print(f"{done} kinds of gather and update agree with numpy")
    return done


if __name__ == "__main__":
    main()
