"""The planted knowledge graph: its counts, and that its structure can be seen."""

import numpy as np
import pytest

from dejax.datasets import synthetic_triples


def test_counts_and_determinism():
    data = synthetic_triples(0.02, seed=3)
    assert data.num_nodes == {"entity": 291} and len(data.target_relations) == 34
    sizes = [len(data.triples(split)) for split in ("train", "valid", "test")]
    assert sizes == [5442, 351, 409]
    every = np.concatenate([data.triples(split) for split in ("train", "valid", "test")])
    assert len(np.unique(every, axis=0)) == len(every)
    again = synthetic_triples(0.02, seed=3)
    np.testing.assert_array_equal(again.triples("test"), data.triples("test"))


def test_a_relation_leads_from_clusters_to_clusters():
    """Without noise heads of a cluster share their tails: few distinct tails per head and relation."""
    data = synthetic_triples(0.02, noise=0.0)
    rows = data.triples("train")
    head, counts = np.unique(rows[:, :2], axis=0, return_counts=True)
    assert counts.max() <= 291 / 3 and counts.mean() > 1.5 and len(head)


@pytest.mark.parametrize("wrong", [{"scale": 0}, {"noise": 2.0}, {"num_relations": 0}])
def test_bad_input(wrong):
    with pytest.raises(ValueError, match="synthetic_triples: `scale` and counts must be positive"):
        synthetic_triples(**wrong)
