"""Inference over all nodes against dense float64 layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import segment
from dejax.host_gather import HostTable
from dejax.minibatch import (
    Decoder,
    FeatureStore,
    HeteroTopology,
    InferenceBatch,
    InferenceEdges,
    infer_layers,
    link_ranks,
)
from dejax.minibatch.steps import _programs
from tests.host_gather.rows import on_drive

NODES = {"a": 50, "b": 13, "alone": 6, "none": 0}
RELATIONS = {("b", "to", "a"): 160, ("a", "in", "a"): 300, ("a", "of", "b"): 70, ("none", "x", "b"): 0}
WIDTH = 8


def graph(seed: int = 0):
    rng = np.random.default_rng(seed)
    lists, dense = {}, {}
    for relation, count in RELATIONS.items():
        n, m = NODES[relation[0]], NODES[relation[2]]
        receivers = np.sort((m * rng.random(count) ** 3).astype(int))  # a few long segments
        senders = rng.integers(0, max(n, 1), count)
        lists[relation] = (np.searchsorted(receivers, np.arange(m + 1)), senders)
        matrix = np.zeros((m, n))
        np.add.at(matrix, (receivers, senders), 1)
        dense[relation] = matrix
    return lists, dense


def layer(params, batch):
    """W_type x + sum over relations of W_r mean of the neighbours; types without input get zeros of their own."""
    size = batch.nodes.shape[0]
    out = jnp.zeros((size, WIDTH))
    if batch.own is not None:
        out = out + batch.own @ params[batch.node_type]
    for relation, edges in batch.edges.items():
        if relation[0] in batch.sources:
            rows = jnp.where(edges.mask[:, None], batch.sources[relation[0]][edges.senders], 0)
            total = segment.segment_sum(rows, edges.receivers, size)  # the same bits in every run
            count = jax.ops.segment_sum(edges.mask.astype(rows.dtype), edges.receivers, size)
            out = out + total / jnp.maximum(count, 1)[:, None] @ params[relation[1]]
    return jnp.tanh(out)


def dense_layer(params, dense, x):
    out = {}
    for kind, count in NODES.items():
        y = np.zeros((count, WIDTH))
        if kind in x:
            y = y + x[kind] @ params[kind]
        for relation, matrix in dense.items():
            if relation[2] == kind and relation[0] in x:
                y = y + (matrix @ x[relation[0]]) / np.maximum(matrix.sum(1, keepdims=True), 1) @ params[relation[1]]
        out[kind] = np.tanh(y)
    return out


def weights(seed: int):
    rng = np.random.default_rng(seed)
    names = [*NODES, *(relation[1] for relation in RELATIONS)]
    return {name: (rng.standard_normal((WIDTH, WIDTH)) / 3).astype(np.float32) for name in names}


def features():
    rng = np.random.default_rng(7)
    return {kind: rng.standard_normal((NODES[kind], WIDTH)).astype(np.float32) for kind in ("a", "alone", "none")}


@pytest.mark.parametrize("batch_size", [17, 1000])
@pytest.mark.slow
def test_all_nodes(batch_size: int, tmp_path) -> None:
    lists, dense = graph()
    x, params = features(), [weights(1), weights(2)]
    store = FeatureStore.from_arrays(x, on_device={"alone": True}).with_table("a", on_drive(x["a"], 20))
    want = dict(x)
    for of_layer in params:
        want = dense_layer(of_layer, dense, want)
    found = infer_layers([layer] * 2, params, lists, NODES, store, batch_size=batch_size)
    saved = infer_layers(
        [layer] * 2,
        params,
        lists,
        NODES,
        store,
        batch_size=batch_size,
        folder=tmp_path / "out",
        node_types=["a", "none"],
    )
    topology = HeteroTopology.from_csc(lists, NODES)
    same = infer_layers([layer] * 2, params, topology, topology.num_nodes, store, batch_size=batch_size)
    np.testing.assert_array_equal(same["a"].numpy(), found["a"].numpy())
    assert list(found) == list(NODES) and list(saved) == ["a", "none"]
    for kind, count in NODES.items():
        assert isinstance(found[kind], HostTable) and found[kind].shape == (count, WIDTH)
        np.testing.assert_allclose(found[kind].numpy(), want[kind], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "a.npy"), found["a"].numpy())
    assert saved["none"].shape == (0, WIDTH)


def test_a_file_of_outputs_is_there_when_it_is_whole(tmp_path) -> None:
    """Not after half of the batches, and a map of the former file keeps its rows."""
    lists = {("a", "in", "a"): (np.zeros(41, np.int64), np.zeros(0, np.int64))}
    inputs = FeatureStore.from_arrays({"a": np.ones((40, 2), np.float32)})

    def run(factor, stop_at=None):
        def layer(params, batch):
            rows = jnp.where(batch.nodes[:, None] == stop_at, jnp.nan, params * batch.own)
            return jax.pure_callback(checked, rows, rows)

        def checked(rows):
            if np.isnan(rows).any():
                raise KeyboardInterrupt("stopped")
            return rows

        return infer_layers([layer], [factor], lists, {"a": 40}, inputs, batch_size=10, folder=tmp_path)["a"]

    with pytest.raises(Exception, match="stopped"):
        run(2.0, stop_at=25)
    assert not list(tmp_path.iterdir())
    former = run(2.0)
    with pytest.raises(Exception, match="stopped"):
        run(3.0, stop_at=25)
    (path,) = tmp_path.iterdir()
    assert (np.load(path) == 2).all()
    assert (run(4.0) == 4).all() and (np.load(path) == 4).all() and (former == 2).all()


def test_a_bound_of_neighbours() -> None:
    lists, _ = graph()
    relation = ("a", "in", "a")
    offsets, senders = lists[relation]

    def count(params, batch):
        edges = batch.edges[relation]
        rows = jnp.where(edges.mask[:, None], batch.sources["a"][edges.senders], 0)
        return jax.ops.segment_sum(jnp.concatenate([rows, edges.mask[:, None]], axis=1), edges.receivers, 10)

    numbers = FeatureStore.from_arrays({"a": np.arange(50, dtype=np.float32)[:, None]})
    found = infer_layers(
        [count], [None], {relation: lists[relation]}, {"a": 50}, numbers, batch_size=10, max_neighbors=3
    )["a"].numpy()
    for v in range(50):
        own = senders[offsets[v] : offsets[v + 1]]
        taken = own if len(own) <= 3 else own[[0, len(own) // 3, 2 * len(own) // 3]]
        assert found[v].tolist() == [taken.sum(), len(taken)]


def test_a_function_that_changed_is_traced_anew() -> None:
    """A layer or decoder that is equal to that of the call before may close over other weights, or be other code.

    Other weights are arguments of the program that is there.
    """

    class Model:
        scale = jnp.float32(2)

        def layer(self, params, batch):
            return self.scale * batch.sources["a"][:10]

        def query(self, rows, relation):
            return self.scale * rows

    model, numbers = Model(), FeatureStore.from_arrays({"a": np.ones((20, 1), np.float32)})
    edges = {("a", "x", "a"): (np.arange(21), np.arange(20))}
    decoder = Decoder("own", model.query, model.query, relation_width=lambda width: 0)
    entities = jnp.array([[1.0], [2.0], [3.0]])
    _programs._programs.clear()
    for scale, rank in (2.0, 1), (-3.0, 3), (0.0, 2):
        model.scale = jnp.float32(scale)
        found = infer_layers([model.layer], [None], edges, {"a": 20}, numbers, batch_size=10)["a"].numpy()
        np.testing.assert_array_equal(found, np.full((20, 1), scale))
        ranks = link_ranks(decoder, entities, None, entities, [[0, 0, 2]], sides=["tail"])
        assert ranks.tail.tolist() == [rank]
        assert len(_programs._programs) == 1
    model.scale = 2.0  # a number in the program's text
    found = infer_layers([model.layer], [None], edges, {"a": 20}, numbers, batch_size=10)["a"].numpy()
    np.testing.assert_array_equal(found, np.full((20, 1), 2.0))
    assert len(_programs._programs) == 2


def test_bad_input(tmp_path) -> None:
    lists, _ = graph()
    store, relation = FeatureStore.from_arrays(features()), ("b", "to", "a")

    def call(edges=lists, layers=(layer,), params=None, nodes=NODES, inputs=store, **options):
        params = (weights(1),) if params is None else params
        return infer_layers(layers, params, edges, nodes, inputs, **options)

    offsets, senders = lists[relation]
    for message, options in {
        "`params` must have one entry": {"params": ()},
        "must be at least 1": {"batch_size": 0},
        "`node_types` must be of": {"node_types": ["x"]},
        "must have a row for each of 51 nodes": {"nodes": {**NODES, "a": 51}},
        "`num_nodes` must have the types of all relations, got none for 'y'": {
            "edges": {("y", "to", "a"): (offsets, senders)}
        },
        "must ascend from 0 to 160": {"edges": {relation: (offsets[:-1], senders)}},
        "senders of .* must be from 0 to 12": {"edges": {relation: (offsets, senders + 1)}},
        "a layer must return .50, width.": {"layers": [lambda p, b: jnp.zeros((3, 2))]},
        "must be of a dtype of numpy": {
            "layers": [lambda p, b: layer(p, b).astype(jnp.bfloat16)],
            "folder": tmp_path,
        },
    }.items():
        with pytest.raises(ValueError, match=message):
            call(**options)


@pytest.mark.slow
def test_progress(capsys) -> None:
    lists, _ = graph()
    infer_layers([layer], [weights(1)], lists, NODES, FeatureStore.from_arrays(features()), progress=True)
    assert "layer 1 of 1" in capsys.readouterr().err


def test_ids_that_are_no_integers() -> None:
    relation, store = ("a", "to", "b"), FeatureStore.from_arrays({"a": np.eye(2, dtype=np.float32)})
    for pair, what in ((([0, 1], [0.6]), "senders"), (([0.0, 1.5], [0]), "offsets")):
        with pytest.raises(TypeError, match=f"{what} of .* must be integers, got float64"):
            infer_layers([lambda p, b: b.sources["a"]], [None], {relation: pair}, {"a": 2, "b": 1}, store)


def batch_of(**changes):
    edges = InferenceEdges(jnp.array([1, 0, 0]), jnp.array([0, 1, 4]), jnp.array([True, True, False]))
    fields = {
        "own": jnp.ones((4, 2)),
        "sources": {"b": jnp.arange(6.0).reshape(3, 2)},
        "edges": {("b", "to", "a"): edges},
        "nodes": jnp.arange(4),
        "node_type": "a",
    }
    return InferenceBatch(**{**fields, **changes})


ORDER = {"edge_types": [("a", "of", "b"), ("b", "to", "a")], "node_types": ["b", "a"]}


def test_a_batch_as_a_graph() -> None:
    graph, x = batch_of().graph(**ORDER)
    assert graph.num_edge_types == 2 and graph.num_node_types == 2 and x.shape == (7, 2)
    assert graph.node_type.tolist() == [1, 1, 1, 1, 0, 0, 0]
    mask = np.asarray(graph.edge_mask)
    rows = [np.asarray(values)[mask].tolist() for values in (graph.senders, graph.receivers, graph.edge_type)]
    assert sorted(zip(*rows, strict=True)) == [(4, 1, 1), (5, 0, 1)]


@pytest.mark.parametrize(
    ("changes", "order", "message"),
    [
        ({"own": None}, {}, "`own` must be .batch, d., got None: the type 'a' has no input"),
        ({"sources": {"b": jnp.ones((3, 5))}}, {}, "values of 'b' must be .n, 2., as those of 'a', got .3, 5."),
        ({"sources": {}}, {}, "`sources` must have the source type of each relation, got none for 'b'"),
        ({}, {"node_types": ["b"]}, "`node_types` must have 'a'"),
        ({}, {"edge_types": [("a", "of", "b")]}, "`edge_types` must have"),
    ],
)
def test_a_batch_that_makes_no_graph(changes, order, message) -> None:
    with pytest.raises(ValueError, match=message):
        batch_of(**changes).graph(**{**ORDER, **order})


def test_a_topology_with_times_is_refused_and_edges_of_weight_0_are_left_out() -> None:
    to = ("a", "to", "a")
    lists = {to: ([0, 1, 1], [1, 1, 0])}
    inputs = FeatureStore.from_arrays({"a": np.array([[1.0], [10.0]], np.float32)})

    def layer(params, batch):
        (edges,) = batch.edges.values()
        rows = batch.sources["a"][edges.senders] * edges.mask[:, None]
        return jnp.zeros_like(batch.own).at[edges.receivers].add(rows, mode="drop")

    timed = HeteroTopology.from_edges(lists, {"a": 2}, times={to: [1, 2, 3]})
    with pytest.raises(ValueError, match="`edges` must have no times"):
        infer_layers([layer], [None], timed, {"a": 2}, inputs)
    weighted = HeteroTopology.from_edges(lists, {"a": 2}, weights={to: [0.5, 0.0, 2.0]})
    found = infer_layers([layer], [None], weighted, {"a": 2}, inputs)["a"]
    np.testing.assert_array_equal(found.numpy(), [[10.0], [1.0]])
