"""Local numbers of nodes: both algorithms give the same, and known nodes keep theirs."""

import jax
import numpy as np

from dejax.host_gather import _numbering


def test_both_algorithms_agree() -> None:

    rng = np.random.default_rng(0)
    by_table, by_sort = (
        jax.jit(f, static_argnums=(2, 3)) for f in (_numbering.number_by_table, _numbering.number_by_sort)
    )
    for limit in (12, 30, 400):
        known = np.where(rng.random(12) < 0.3, -1, rng.permutation(50)[:12]).astype(np.int32)
        found = rng.integers(-9, 50, 300, np.int32).clip(-1)
        nodes, local, count = by_table(known, found, limit, 50)
        jax.tree.map(np.testing.assert_array_equal, (nodes, local, count), by_sort(known, found, limit, 50))
        fresh = np.setdiff1d(found[found >= 0], known)  # ascending
        assert int(count) == 12 + len(fresh)
        np.testing.assert_array_equal(nodes[: 12 + len(fresh)], np.concatenate([known, fresh])[:limit])
        kept = (found >= 0) & (np.asarray(local) < limit)
        np.testing.assert_array_equal(np.asarray(nodes)[np.asarray(local)[kept]], found[kept])
        assert (np.asarray(local)[found < 0] == -1).all()
