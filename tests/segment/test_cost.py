"""Which reductions are left to a scatter of XLA: never those whose bits it would change."""

import jax.numpy as jnp
import numpy as np
import pytest

from dejax.segment._cost import ReductionSize, scatter_pays
from dejax.segment._grouping import group

NARROW = ReductionSize(20_000_000, 2_000_000, 1, "float32")


def test_unsorted_entries_are_scattered_where_the_order_may_change():
    assert scatter_pays(NARROW, "sum", False, deterministic=False)
    assert scatter_pays(ReductionSize(100_000, 10_000, 64, "float32"), "sum", False, deterministic=False)
    assert not scatter_pays(NARROW, "sum", False, deterministic=True)
    assert not scatter_pays(NARROW, "sum", False, deterministic=False, planned=True)
    assert scatter_pays(ReductionSize(100_000, 10_000, 64, "float32"), "max", False, deterministic=False)
    assert not scatter_pays(NARROW, "max", False, deterministic=True)
    assert not scatter_pays(NARROW, "sum", True, deterministic=False)


@pytest.mark.parametrize("kind", ["sum", "max"])
def test_integers_have_one_result_in_any_order(kind):
    assert scatter_pays(ReductionSize(20_000_000, 2_000_000, 1, "int32"), kind, False, deterministic=True)
    assert not scatter_pays(ReductionSize(20_000_000, 2_000_000, 1, "int8"), kind, False, deterministic=True)


def test_wide_entries_and_few_segments_are_not_scattered():
    assert not scatter_pays(ReductionSize(20_000_000, 2_000_000, 64, "float32"), "sum", False, deterministic=False)
    assert not scatter_pays(ReductionSize(20_000_000, 2, 1, "float32"), "sum", False, deterministic=False)


# As one word of 32 bits, with one bit to spare and with one too many.
@pytest.mark.parametrize("segments", [1, 2**24 - 2, 2**24 - 1, 2**24, 2**31 - 3])
def test_ids_are_sorted_stably_however_many_segments_there_are(segments):
    ids = np.random.default_rng(0).choice([0, 1, segments // 2, segments - 1, segments, -1], 256).astype(np.int32)
    if segments > 2**20:  # offsets of so many segments are not made here
        from dejax.segment._grouping import sorted_ids

        known = np.where((ids >= 0) & (ids < segments), ids, segments)
        found, order = sorted_ids(jnp.asarray(known), segments + 1)
    else:
        g = group(jnp.asarray(ids), segments, False, kernels=False)
        known, order, found = np.asarray(g.ids), g.order, g.ids[g.order]
    want = np.argsort(known, kind="stable")
    np.testing.assert_array_equal(order, want)
    np.testing.assert_array_equal(found, known[want])
