"""The kernels of every dtype lowered for an H200 on a machine without a GPU."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from dejax.pallas.segments.reduce import KINDS, SegmentBounds, segment_reduce
from dejax.pallas.segments.search import segment_offsets
from dejax.pallas.segments.segment_schedule import chunk_of
from tests.pallas.test_lowering import lower
from tests.segment.references import FLOATS, INTEGERS

SIZES = [(2 * 10**7, 2 * 10**6, 64), (10**6, 24, 3), (10**6, 10, 300)]  # entries, segments, width
EVERY = list(itertools.product((*FLOATS, *INTEGERS), KINDS, SIZES))


@pytest.mark.parametrize(
    ("dtype", "kind", "size"),
    # Each dtype with one kind and size, each kind with each size.
    [pytest.param(*case, marks=() if i % 10 == 0 else pytest.mark.slow) for i, case in enumerate(EVERY)],
)
def test_lowering(dtype, kind, size):
    entries, segments, width = size
    chunks = -(-entries // chunk_of(entries))

    def reduce(data, ids, order, scale, first, last):
        groups = SegmentBounds(segment_offsets(ids, segments, interpret=False), first, last, entries)
        scaled = {} if dtype == "uint64" else {"scale": scale, "edges": order}
        return segment_reduce(kind, data, groups, rows=order, **scaled, interpret=False)

    shape = jax.ShapeDtypeStruct
    with jax.enable_x64(True):
        ids, chunk = shape((entries,), jnp.int32), shape((chunks,), jnp.int32)
        text = lower(reduce, shape((entries, width), dtype), ids, ids, shape((entries, 1), dtype), chunk, chunk)
    assert text.count("custom_call") >= 3  # offsets, segments, long segments
