"""Synthetic graphs: the published counts, the documented distributions, the seed."""

import numpy as np
import pytest

from dejax.datasets import COUNTS, NAMES, load, synthetic

SMALL = ("aifb", "mutag", "bgs", "fb15k")


@pytest.mark.parametrize("name", SMALL)
def test_counts(name):
    data, counts = synthetic(name), COUNTS[name]
    assert (data.num_nodes, data.num_node_types, data.num_edges, data.num_edge_types) == (
        counts.nodes,
        counts.node_types,
        counts.edges,
        counts.edge_types,
    )
    assert data.features is None and data.num_classes == 0
    assert (np.bincount(data.edge_type, minlength=data.num_edge_types) >= 1).all()
    assert (np.bincount(data.node_type, minlength=data.num_node_types) >= 8).all()
    assert (np.diff(data.edge_type) >= 0).all() and (np.diff(data.node_type) >= 0).all()


def test_published_counts_of_all_eight():
    assert {name: (c.nodes, c.node_types, c.edges, c.edge_types) for name, c in COUNTS.items()} == {
        "aifb": (7262, 7, 48810, 104),
        "mutag": (27163, 5, 148100, 50),
        "bgs": (94806, 27, 672884, 122),
        "biokg": (93773, 5, 4762678, 51),
        "am": (1885136, 7, 5668682, 108),
        "mag": (1939743, 4, 21111007, 4),
        "wikikg2": (2500604, 1, 16109182, 535),
        "fb15k": (14541, 1, 620232, 474),
    }


def test_sizes_fall_as_powers_of_the_rank():
    data = synthetic("bgs", seed=3)
    for ids, power, tolerance in ((data.edge_type, 1.1, 0.03), (data.node_type, 0.7, 0.03)):
        sizes = np.bincount(ids)
        weights = 1.0 / np.arange(1, len(sizes) + 1) ** power
        np.testing.assert_allclose(sizes[:10] / sizes.sum(), (weights / weights.sum())[:10], rtol=tolerance)


def test_each_relation_joins_two_node_types_with_skewed_ends():
    data = synthetic("biokg", seed=1)
    types = set()
    for relation in range(data.num_edge_types):
        edges = data.edge_type == relation
        (source,), (destination,) = (np.unique(data.node_type[ends[edges]]) for ends in (data.senders, data.receivers))
        types |= {int(source), int(destination)}
    assert len(types) == data.num_node_types  # 51 relations of 5 types: one is never drawn with probability 1e-9
    # An end point is floor(m u^2.5): the k most frequent of m nodes are drawn with probability (k / m)^0.4.
    largest = data.edge_type == 0
    for ends in (data.senders[largest], data.receivers[largest]):
        members = np.flatnonzero(data.node_type == data.node_type[ends[0]])
        counts = np.sort(np.bincount(ends - members[0], minlength=len(members)))[::-1]
        for share in (0.001, 0.01, 0.1, 0.5):
            k = int(share * len(members))
            assert counts[:k].sum() / counts.sum() == pytest.approx((k / len(members)) ** 0.4, rel=0.02)


def test_long_segments_are_those_of_the_same_nodes_in_every_relation():
    data = synthetic("fb15k", seed=2)
    busiest = [int(np.bincount(data.senders[data.edge_type == relation]).argmax()) for relation in range(5)]
    assert len(set(busiest)) == 1
    assert busiest[0] != 0  # the order is permuted (seed 2)


def test_seed():
    one, same, other = synthetic("aifb", seed=1), synthetic("aifb", seed=1), synthetic("aifb", seed=2)
    np.testing.assert_array_equal(one.senders, same.senders)
    assert (one.senders != other.senders).mean() > 0.5
    more = synthetic("aifb", seed=1, feature_width=3, num_classes=5)
    np.testing.assert_array_equal(one.senders, more.senders)
    np.testing.assert_array_equal(one.receivers, more.receivers)


def test_features_and_labels():
    data = synthetic("aifb", feature_width=16, num_classes=4, labelled_share=0.5)
    assert data.features.shape == (7262, 16) and data.features.dtype == np.float32
    assert abs(data.features.mean()) < 0.02 and data.features.std() == pytest.approx(1.0, abs=0.02)
    sizes = len(data.train_nodes), len(data.valid_nodes), len(data.test_nodes)
    assert sum(sizes) == 3631 and sizes == (2179, 726, 726)
    assert (np.bincount(data.labels[data.labels >= 0]) > 800).all()


@pytest.mark.slow
def test_mag_with_its_21_million_edges():
    data = synthetic("mag")
    assert data.num_edges == 21_111_007
    assert data.senders.dtype == np.int32


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"name": "cora"}, "name must be one of aifb, .* got 'cora'"),
        ({"name": "aifb", "feature_width": 0}, "feature_width must be at least 1"),
        ({"name": "aifb", "num_classes": -1}, "num_classes must be at least 0"),
        ({"name": "aifb", "num_classes": 2, "labelled_share": 1.5}, "labelled_share in"),
    ],
)
def test_arguments(arguments, text):
    with pytest.raises(ValueError, match=text):
        synthetic(**arguments)


def test_load_by_name(tmp_path):
    assert load("synthetic-aifb", seed=4).name == "synthetic-aifb"
    np.testing.assert_array_equal(load("Synthetic-AIFB", seed=4).senders, synthetic("aifb", 4).senders)
    with pytest.raises(ValueError, match="reads no folder"):
        load("synthetic-aifb", tmp_path)
    with pytest.raises(ValueError, match="name must be one of stdlib, aifb, mutag, bgs, am, ogbn-mag, synthetic-aifb"):
        load("synthetic-cora")
    with pytest.raises(ValueError, match="got 'cora'"):
        load("cora")
    assert len(set(NAMES)) == 1 + 4 + 1 + 8
