"""Stacked layers in one jit, training with optax, and the bytes of the compiled program."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dejax import rgnn
from dejax.distributed.full_graph import CannotDistribute, ShardedGraph, over_mesh
from dejax.distributed.partition import partition
from dejax.rgnn import RelGraph, library, zoo
from tests.distributed.full_graphs import mesh_of, owners

pytestmark = pytest.mark.devices(4)

N, R, T, K, CLASSES = 200, 3, 2, 12, 5


def graph_of(seed: int = 0) -> RelGraph:
    rng = np.random.default_rng(seed)
    node_type = np.sort(rng.integers(0, T, N))
    ends = rng.integers(0, N, (2, 900))
    return RelGraph.from_edges(
        *ends, rng.integers(0, R, 900), num_nodes=N, num_edge_types=R, node_type=node_type, num_node_types=T
    )


def normal(rng: np.random.Generator, *shape: int) -> jnp.ndarray:
    return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2] if len(shape) > 1 else 1), jnp.float32)


def rgcn_params(rng: np.random.Generator, k: int, n: int) -> dict[str, Any]:
    return {"weight": normal(rng, R, k, n), "root": normal(rng, k, n), "bias": jnp.zeros(n)}


def rgat_params(rng: np.random.Generator, k: int, n: int) -> dict[str, Any]:
    d = n // 2
    return {
        "weight": normal(rng, R, 2, k, d),
        "attention_src": normal(rng, R, 2, d),
        "attention_dst": normal(rng, R, 2, d),
    }


def hgt_params(rng: np.random.Generator, k: int, n: int) -> dict[str, Any]:
    d = n // 2
    found = {name: normal(rng, T, 2, k, d) for name in ("key", "query", "value")}
    found |= {name: normal(rng, R, 2, d, d) for name in ("relation_attention", "relation_message")}
    return found | {"prior": jnp.ones((R, 2)), "out": normal(rng, T, n, n)}


LAYERS: dict[str, tuple[Any, Callable[..., dict[str, Any]]]] = {
    "rgcn": (library.rgcn, rgcn_params),
    "rgat": (library.rgat, rgat_params),
    "hgt": (library.hgt, hgt_params),
    "gcn": (zoo.gcn, lambda rng, k, n: {"weight": normal(rng, k, n), "bias": jnp.zeros(n)}),
    "gatv2": (
        zoo.gatv2,
        lambda rng, k, n: {
            "weight_src": normal(rng, 2, k, n // 2),
            "weight_dst": normal(rng, 2, k, n // 2),
            "attention": normal(rng, 2, n // 2),
        },
    ),
}


def model_params(name: str) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    return [LAYERS[name][1](rng, K, 8), LAYERS[name][1](rng, 8, 6)]


def stacked(layer: Callable[..., Any]) -> Callable[..., Any]:
    def model(graph: Any, x: Any, params: list[Any]) -> Any:
        return layer(graph, jnp.tanh(layer(graph, x, params[0])), params[1])

    return model


def trained(model: Callable[..., Any], graph: Any, x: Any, labels: Any, mask: Any, params: Any) -> list[float]:
    """Losses of five steps of Adam."""
    optimizer = optax.adam(0.03)

    def loss(params: Any, graph: Any) -> Any:
        logits = model(graph, x, params)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.where(mask, losses, 0.0).sum() / N

    @jax.jit
    def step(params: Any, state: Any, graph: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, graph)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    losses, state = [], optimizer.init(params)
    for _ in range(5):
        params, state, value = step(params, state, graph)
        losses.append(float(value))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parts"), [("rgcn", 2), ("hgt", 4), ("rgat", 2), ("gcn", 4), ("gatv2", 2)])
def test_two_layers_train_as_on_one_device(name: str, parts: int) -> None:
    graph = graph_of()
    rng = np.random.default_rng(2)
    x, labels = rng.normal(size=(N, K)).astype(np.float32), rng.integers(0, CLASSES, N)
    alone = trained(
        stacked(LAYERS[name][0]), graph, jnp.asarray(x), jnp.asarray(labels), np.ones(N, bool), model_params(name)
    )
    split = ShardedGraph.from_graph(graph, partition(graph, parts, method="stream").owner(), mesh_of(parts))
    model = stacked(over_mesh(LAYERS[name][0]))
    found = trained(model, split, split.shard_nodes(x), split.shard_nodes(labels), split.node_mask, model_params(name))
    np.testing.assert_allclose(found, alone, rtol=1e-5)
    assert alone[-1] < alone[0]


def permuted_bytes(text: str) -> list[int]:
    """Bytes that each `collective-permute` of a compiled program moves over links."""
    found = []
    for line in text.splitlines():
        # For a GPU a tuple: the operand (of several exchanges in one a tuple, too), the results, words of the call.
        match = re.search(r"= (\(*)(.*?) collective-permute(?:-start)?\(", line)
        if match:
            operands = re.findall(r"(f32|f64|bf16|s32)\[([\d,]*)\]", match[2].partition(")")[0])
            pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", line)[1].count("{")  # type: ignore[index]
            for dtype, shape in operands if len(match[1]) > 1 else operands[:1]:
                size = {"f32": 4, "f64": 8, "bf16": 2, "s32": 4}[dtype]
                found.append(size * int(np.prod([int(n) for n in shape.split(",") if n])) * pairs)
    return found


@pytest.mark.parametrize("name", ["rgcn", pytest.param("hgt", marks=pytest.mark.slow)])
def test_bytes_are_within_a_twentieth_of_the_cuts_least(name: str) -> None:
    """Forward and backward, of the compiled program: one exchange each of the narrowest rows."""
    rng = np.random.default_rng(0)
    graph = RelGraph.from_edges(
        *rng.integers(0, 2000, (2, 9000)),
        rng.integers(0, R, 9000),
        num_nodes=2000,
        num_edge_types=R,
        node_type=np.arange(2000) % T,
        num_node_types=T,
    )
    found = partition(graph, 4, method="stream")
    split = ShardedGraph.from_graph(graph, found.owner(), mesh_of(4))
    layer = over_mesh(LAYERS[name][0])
    params = LAYERS[name][1](np.random.default_rng(0), K, 8)
    x = split.shard_nodes(np.zeros((2000, K), np.float32))

    def loss(x: Any, params: Any) -> Any:
        return layer(split, x, params).sum()

    assert split.layout.halo_rows == found.report.halo_rows
    least = found.report.halo_bytes(4 * K)
    assert layer.bytes_sent(split, x, params) <= 1.05 * least
    forward = permuted_bytes(jax.jit(loss).lower(x, params).compile().as_text())
    assert sum(forward) == layer.bytes_sent(split, x, params)
    both = permuted_bytes(jax.jit(jax.grad(loss, (0, 1))).lower(x, params).compile().as_text())
    assert sum(both) <= 1.05 * 2 * least
    assert len(forward) == len(split.layout.rounds) and len(both) <= 2 * len(split.layout.rounds)


def test_the_narrower_side_of_a_product_crosses() -> None:
    graph = graph_of()
    split = ShardedGraph.from_graph(graph, owners(N, 2), mesh_of(2))

    @rgnn.program
    def layer(g: Any, x: Any, w: Any) -> Any:
        return g.sum_to_dst(g.src(x) @ g.shared(w))

    for k, n in ((16, 4), (4, 16)):
        plan = over_mesh(layer).plan(
            split, jax.ShapeDtypeStruct((split.num_rows, k), "float32"), jax.ShapeDtypeStruct((k, n), "float32")
        )
        assert plan.exchanged_bytes == 4 * min(k, n)


def test_what_is_not_supported_names_the_line_and_the_remedy() -> None:
    graph = graph_of()
    split = ShardedGraph.from_graph(graph, owners(N, 2), mesh_of(2))

    @rgnn.program
    def by_pair(g: Any, w: Any) -> Any:
        return g.sum_to_dst(g.src(g.source_pair(w)))

    rows = split.parts * split.local.num_source_pairs
    with pytest.raises(CannotDistribute, match=r"test_mesh_training.py:\d+: values of source pairs"):
        over_mesh(by_pair)(split, np.zeros((rows, 3), np.float32))

    @rgnn.program
    def product(g: Any, x: Any) -> Any:
        return g.prod_to_src(g.dst(x))

    with pytest.raises(CannotDistribute, match="sum of logarithms"):
        over_mesh(product)(split, split.shard_nodes(np.zeros((N, 3), np.float32)))
    with pytest.raises(TypeError, match="must be a ShardedGraph, got RelGraph"):
        over_mesh(product)(graph, np.zeros((N, 3), np.float32))
    with pytest.raises(TypeError, match="made by @rgnn.program, got function"):
        over_mesh(lambda g: g)  # type: ignore[arg-type]


def test_bad_arguments_of_a_sharded_graph_have_clear_errors() -> None:
    graph, mesh = graph_of(), mesh_of(2)
    with pytest.raises(ValueError, match="from 0 to 1, one part for each device"):
        ShardedGraph.from_graph(graph, np.full(N, 2), mesh)
    with pytest.raises(ValueError, match=f"one entry for each of the graph's {N} nodes"):
        ShardedGraph.from_graph(graph, np.zeros(3, int), mesh)
    with pytest.raises(TypeError, match="must hold integers, got dtype float64"):
        ShardedGraph.from_graph(graph, np.zeros(N), mesh)
    with pytest.raises(ValueError, match="one of the mesh's axes"):
        ShardedGraph.from_graph(graph, np.zeros(N, int), mesh, "rows")
    with pytest.raises(TypeError, match="must be a RelGraph"):
        ShardedGraph.from_graph(3, np.zeros(N, int), mesh)  # type: ignore[arg-type]
    split = ShardedGraph.from_graph(graph, np.zeros(N, int), mesh)
    with pytest.raises(ValueError, match=f"one row for each node of the whole graph \\({N}\\)"):
        split.shard_nodes(np.zeros((3, 2)))
    np.testing.assert_array_equal(split.unshard_edges(split.shard_edges(np.arange(900))), np.arange(900))


def test_a_mesh_of_one_device_runs_the_program_as_it_is() -> None:
    graph, rng = graph_of(), np.random.default_rng(0)
    split = ShardedGraph.from_graph(graph, np.zeros(N, int), mesh_of(1))
    layer, params = over_mesh(library.rgcn), rgcn_params(rng, K, 8)
    x = rng.normal(size=(N, K)).astype(np.float32)
    assert len(layer.plan(split, split.shard_nodes(x), params).steps) == 1 and split.local.edge_mask is None
    found = split.unshard_nodes(layer(split, split.shard_nodes(x), params))
    np.testing.assert_allclose(found, library.rgcn(graph, jnp.asarray(x), params), rtol=1e-6, atol=1e-6)
    text = jax.jit(lambda s, x: layer(s, x, params)).lower(split, split.shard_nodes(x)).compile().as_text()
    assert "collective" not in text and "all-reduce" not in text
