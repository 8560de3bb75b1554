"""Gradients of weights that all rows share: through programs against float64, and what is left for XLA on a GPU."""

from __future__ import annotations

import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import rgnn
from dejax.pallas.machine import machine
from dejax.rgnn import Options, RelGraph, zoo
from dejax.rgnn.ir.inter import Builder, Space
from dejax.rgnn.ir.row_sums import RowSum, row_sum
from dejax.rgnn.ir.templates import WEIGHT_GRADIENT_SPECS
from tests.cases import slow_but
from tests.rgnn.lowering.test_h200 import check_kernels, stablehlo

TOLERANCES = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}


def ring(nodes: int, padding: int = 0) -> RelGraph:
    """Each node reads the one before; `padding` further nodes are none."""
    ends = np.arange(nodes)
    mask = np.arange(nodes + padding) < nodes if padding else None
    return RelGraph.from_edges(ends, (ends + 1) % max(nodes, 1), num_nodes=nodes + padding, node_mask=mask)


@rgnn.program
def two_weights(g: Any, x: Any, p: Any) -> Any:
    """Two weights and a bias, whose gradients sum over the same rows, and a weight for each head."""
    y = g.node(x) @ g.shared(p["w"]) + g.sum_to_dst(g.src(x)) @ g.shared(p["v"]) + g.shared(p["b"])
    return rgnn.tanh(y)


def parameters(dtype: str, k: int, n: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(1)
    shapes = {"w": (k, n), "v": (k, n), "b": (n,)}
    return {key: jnp.asarray(rng.standard_normal(shape) / 4, dtype) for key, shape in shapes.items()}


def gradients(graph: RelGraph, x: Any, p: Any, options: Options, order: int = 1) -> Any:
    def loss(p: Any) -> Any:
        valid = jnp.ones(graph.num_nodes, bool) if graph.node_mask is None else graph.node_mask
        return jnp.where(valid[:, None], two_weights(graph, x, p, options=options), 0).astype(jnp.float32).sum()

    if order == 1:
        return jax.grad(loss)(p)
    return jax.grad(lambda p: sum((g.astype(jnp.float32) ** 2).sum() for g in jax.tree.leaves(jax.grad(loss)(p))))(p)


def exact(graph: RelGraph, x: Any, p: Any, order: int = 1) -> Any:
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), (x, p))
        return jax.tree.map(np.asarray, gradients(graph, *wide, Options(backend="xla"), order))


@pytest.mark.parametrize(
    ("rows", "dtype"),
    slow_but([(0, "float32"), (1003, "float32")], itertools.product((0, 1, 7, 1003), TOLERANCES)),
)
def test_gradients_of_shared_weights(rows: int, dtype: str) -> None:
    graph, p = ring(rows), parameters(dtype, 5, 17)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((rows, 5)), dtype)
    found = gradients(graph, x, p, Options(backend="pallas", precision="f32", interpret=True))
    for key, expected in exact(graph, x, p).items():
        assert found[key].dtype == dtype and found[key].shape == expected.shape
        largest = np.abs(expected).max(initial=0)
        np.testing.assert_allclose(np.asarray(found[key], float), expected, atol=TOLERANCES[dtype] * largest)


def test_float64_stays_exact() -> None:
    graph, p = ring(50), parameters("float32", 5, 17)
    x = np.random.default_rng(0).standard_normal((50, 5))
    expected = exact(graph, x, p)
    with jax.enable_x64(True):
        found = gradients(graph, jnp.asarray(x), jax.tree.map(lambda a: a.astype(jnp.float64), p), Options())
    for key, each in expected.items():
        assert found[key].dtype == jnp.float64
        np.testing.assert_allclose(found[key], each, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["f32", "tf32"])
def test_gradients_of_gradients(precision: str) -> None:
    graph, p = ring(60), parameters("float32", 5, 8)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((60, 5)), jnp.float32)
    found = gradients(graph, x, p, Options(backend="pallas", precision=precision, interpret=True), order=2)
    for key, expected in exact(graph, x, p, order=2).items():
        atol = (1e-5 if precision == "f32" else 5e-3) * np.abs(expected).max()
        np.testing.assert_allclose(found[key], expected, atol=atol)


@pytest.mark.slow
def test_padding_rows_may_hold_anything() -> None:
    graph, p = ring(40, padding=9), parameters("float32", 5, 8)
    x = np.random.default_rng(0).standard_normal((49, 5)).astype(np.float32)
    expected = exact(ring(40), x[:40], p)
    x[40:] = np.nan
    found = gradients(graph, jnp.asarray(x), p, Options(backend="pallas", precision="f32", interpret=True))
    for key, each in expected.items():
        np.testing.assert_allclose(found[key], each, atol=1e-5 * np.abs(each).max())


@pytest.mark.slow
def test_vmap() -> None:
    graph, p = ring(30), parameters("float32", 5, 8)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 30, 5)), jnp.float32)
    options = Options(backend="pallas", precision="f32", interpret=True)
    found = jax.vmap(lambda x: gradients(graph, x, p, options))(x)
    for i in range(3):
        for key, each in exact(graph, x[i], p).items():
            np.testing.assert_allclose(found[key][i], each, atol=1e-5 * np.abs(each).max())


SIZES = {"k": 6, "n": 5, "h": 3}


@pytest.mark.parametrize(
    ("spec", "width"),
    slow_but(
        [("k,n->kn", 5), ("hk,hn->hkn", 70), ("k,hn->hkn", 5)],
        itertools.product(sorted(WEIGHT_GRADIENT_SPECS), (5, 70)),
    ),
)
def test_every_contraction(spec: str, width: int) -> None:
    """Narrow heads are multiplied together, wide ones one by one."""
    from dejax.rgnn.ir.intra import Kernels
    from dejax.rgnn.lowering.node_rows import ALL_ROWS, RowArrays
    from dejax.rgnn.lowering.pallas import PallasLowering
    from dejax.rgnn.passes.kernels.fuse_row_products import fuse_row_products

    (left, right), sizes = spec.split("->")[0].split(","), SIZES | {"n": width}
    b, graph, rng = Builder("outer"), ring(40), np.random.default_rng(0)
    shapes = [tuple(sizes[c] for c in side) for side in (left, right)]
    args = [
        b.op("input", name=name, position=i, space=str(Space.NODE), shape=shape, dtype="float32")
        for i, (name, shape) in enumerate(zip("xy", shapes, strict=True))
    ]
    program = b.build(
        [b.op("outer", *args, spec=spec, via="all", dtype="float32"), b.op("reduce", args[1], via="all", op="sum")]
    )
    kernels = fuse_row_products(Kernels(program))
    if row_sum(program, program.outputs[0]) is None:  # rows times scalars
        assert not kernels.instances and not all((set(left) - set(right), set(right) - set(left)))
        return
    (instance,) = kernels.instances
    assert instance.writes == program.outputs
    arrays = [rng.standard_normal((40, *shape)).astype(np.float32) for shape in shapes]
    env: dict[int, Any] = dict(zip(args, map(jnp.asarray, arrays), strict=True))
    options = Options(backend="pallas", precision="f32", interpret=True)
    rows = RowArrays(graph, program, ALL_ROWS, env)
    PallasLowering(kernels, graph, options, {}, dict(env), rows).run(instance, env)
    x, y = (a.astype(np.float64) for a in arrays)
    expected = np.einsum(f"r{left},r{right}->{spec.split('->')[1]}", x, y), y.sum(0)
    for value, each in zip(program.outputs, expected, strict=True):
        np.testing.assert_allclose(env[value], each[None], atol=1e-5 * np.abs(each).max())


@pytest.mark.parametrize(
    ("left", "right", "sizes", "by_kernel", "together"),
    [
        ("k", "n", {"k": 64, "n": 64}, True, True),
        ("k", "n", {"k": 1024, "n": 1024}, True, True),
        ("k", "n", {"k": 2048, "n": 2048}, False, True),  # XLA need not cut its rows
        ("hk", "hn", {"h": 4, "k": 16, "n": 16}, True, True),
        ("hk", "hn", {"h": 4, "k": 64, "n": 64}, True, False),
        ("k", "", {"k": 64}, False, True),
        ("hk", "h", {"h": 4, "k": 16}, False, True),
    ],
)
def test_which_sums_a_kernel_computes(left: str, right: str, sizes: Any, by_kernel: bool, together: bool) -> None:
    found = RowSum(left, right, "", sizes)
    assert (found.by_kernel, found.heads_in_one_product) == (by_kernel, together)
    assert by_kernel == (found.tiles < 4 * machine().multiprocessors and all(found.one_head))


@pytest.mark.parametrize("layer", slow_but(["graphsage"], ["graphsage", "gin", "gcn", "gat", "graph_transformer"]))
def test_xla_sums_no_products_over_nodes(layer: str) -> None:
    """A product whose sum is over the nodes is one for which XLA pads copies of both operands."""
    nodes, k, h = 1003, 16, 2
    graph = ring(nodes).with_loop_tables()
    d, square = k // h, (k, k)
    shapes: dict[str, dict[str, tuple[int, ...]]] = {
        "gcn": {"weight": square, "bias": (k,)},
        "graphsage": {"neighbour": square, "root": square, "bias": (k,)},
        "gin": {"weight_1": square, "bias_1": (k,), "weight_2": square, "bias_2": (k,)},
        "gat": {"weight": (h, k, d), "attention_src": (h, d), "attention_dst": (h, d), "bias": (k,)},
        "graph_transformer": dict.fromkeys(("query", "key", "value"), (h, k, d))
        | dict.fromkeys(("query_bias", "key_bias", "value_bias"), (h, d))
        | {"root": square, "root_bias": (k,)},
    }
    params = {key: jnp.zeros(shape) for key, shape in shapes[layer].items()}
    options = Options(backend="pallas", precision="tf32", interpret=False)

    def training(x: Any, p: Any) -> Any:
        y, pull = jax.vjp(lambda x, p: getattr(zoo, layer)(graph, x, p, options=options), x, p)
        return y, pull(y)

    text = stablehlo(training, jnp.zeros((nodes, k)), params)
    check_kernels(text)
    assert "row_products" in text
    summed = [
        line
        for line in text.splitlines()
        if "stablehlo.dot_general" in line
        and (axes := re.search(r"contracting_dims = \[([\d, ]*)\]", line))
        and (operand := re.search(r": \(tensor<([\dx]*)x", line))
        and any(operand[1].split("x")[int(a)] == str(nodes) for a in axes[1].split(",") if a.strip())
    ]
    assert not summed
