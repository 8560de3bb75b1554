"""The kernels of every dtype lowered for an H200 on a machine without a GPU."""

import jax
import jax.numpy as jnp
import pytest

from dejax.pallas.segments.reduce import KINDS, Segments, segment_reduce
from dejax.pallas.segments.schedule import chunk_of
from dejax.pallas.segments.search import segment_offsets
from tests.pallas.test_lowering import lower
from tests.segment.contract import FLOATS, INTEGERS


@pytest.mark.sample(6, 2)
@pytest.mark.parametrize(
    ("entries", "segments", "width"), [(2 * 10**7, 2 * 10**6, 64), (10**6, 24, 3), (10**6, 10, 300)]
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_lowering(kind, dtype, entries, segments, width):
    chunks = -(-entries // chunk_of(entries))

    def reduce(data, ids, order, scale, first, last):
        groups = Segments(segment_offsets(ids, segments, interpret=False), first, last, entries)
        scaled = {} if dtype == "uint64" else {"scale": scale, "edges": order}
        return segment_reduce(kind, data, groups, rows=order, **scaled, interpret=False)

    shape = jax.ShapeDtypeStruct
    with jax.enable_x64(True):
        ids, chunk = shape((entries,), jnp.int32), shape((chunks,), jnp.int32)
        text = lower(reduce, shape((entries, width), dtype), ids, ids, shape((entries, 1), dtype), chunk, chunk)
    assert text.count("custom_call") >= 3  # offsets, segments, long segments
