"""Operators that cases.py does not have: on XLA and interpreted kernels, with first and second derivatives."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import rgnn
from dejax.rgnn import Options
from tests.cases import slow_but
from tests.rgnn.contract import error, row_counts, waves
from tests.rgnn.lowering.test_h200 import kernel_names, stablehlo
from tests.rgnn.preserved import by_numpy
from tests.rgnn.references import GRAPHS, Arrays, Reference, graph_of
from tests.rgnn.strategies import EdgeList

XLA = Options(backend="xla", precision="f32")
PLAIN = Options(backend="xla", precision="f32", disable=("backward",))
PALLAS = Options(backend="pallas", precision="f32", interpret=True)
H, K, NUM = 2, 5, 4  # heads, width, and rows of tables


@dataclass(frozen=True)
class Operator:
    """A program and its reference in `jax.numpy`, on the arrays below."""

    program: Callable[[Any, Arrays], Any]
    reference: Callable[[Reference, Arrays], Any]


def arrays_of(edges: EdgeList) -> dict[str, np.ndarray]:
    """Random arrays, some rows with ties and zeros. Names of integer arrays begin with i."""
    rng, rows = np.random.default_rng(5), row_counts(edges)
    x = rng.normal(size=(rows["node"], K))
    x[::3, 1] = x[::3, 3] = 1.5  # the maximum twice
    zeros = rng.normal(size=(rows["node"], K)) * (rng.random((rows["node"], K)) > 0.3)
    return {
        "x": x,
        "y": rng.normal(size=(rows["node"], K)) + 0.3,
        "heads": rng.normal(size=(rows["node"], H, K)),
        "zeros": zeros,
        "e": rng.normal(size=(rows["edge"], K)),
        "score": rng.normal(size=(rows["edge"], H)) * 3,
        "table": rng.normal(size=(NUM, K)),
        "by_etype": rng.normal(size=(rows["etype"], NUM, K)),
        "by_ntype": rng.normal(size=(rows["ntype"], NUM, K)),
        "vector": rng.normal(size=K),
        "matrix": rng.normal(size=(3, K)),
        "i_edge": rng.integers(0, NUM, rows["edge"]),
        "i_node": rng.integers(0, NUM, rows["node"]),
        "i_far": rng.integers(-2 * NUM, 2 * NUM, rows["edge"]),
        "i_graph": rng.integers(-1, NUM + 1, rows["node"]),
    }


def segments(how: str, x: Any, rows: Any, num: int) -> Any:
    """Sum, mean, max, min or product of the rows of `x` with equal ids, which JAX differentiates as dejax does."""
    member = (jnp.arange(num)[:, None] == jnp.asarray(rows)).reshape(num, -1, *(1,) * (x.ndim - 1))
    some = member.any(1)
    if how == "sum":
        return jnp.where(member, x, 0).sum(1)
    if how == "mean":
        return jnp.where(member, x, 0).sum(1) / jnp.maximum(member.sum(1), 1)
    if how == "prod":
        return jnp.where(member, x, 1).prod(1)
    if not len(x):
        return jnp.zeros((num, *x.shape[1:]), x.dtype)
    extremum = jnp.max if how == "max" else jnp.min
    # Empty segments hold equal values, which are replaced and get no gradient.
    filled = jnp.where(member, x, jnp.where(some[:, None], -jnp.inf if how == "max" else jnp.inf, 0.0))
    return jnp.where(some, extremum(filled, axis=1), 0.0)


def softmax_within(x: Any, rows: Any, num: int) -> Any:
    member = (jnp.arange(num)[:, None] == jnp.asarray(rows)).reshape(num, -1, *(1,) * (x.ndim - 1))
    return (jnp.where(member, jax.nn.softmax(jnp.where(member, x, -1e30), axis=1), 0)).sum(0)


def reductions(how: str) -> Operator:
    def program(g: Any, a: Arrays) -> Any:
        rows = g.src(a["zeros"]) * g.edge(a["e"])
        return getattr(g, f"{how}_to_dst")(rows), getattr(g, f"{how}_to_src")(g.dst(a["zeros"]))

    def reference(r: Reference, a: Arrays) -> Any:
        return segments(how, a["zeros"][r.s] * a["e"], r.d, r.nodes), segments(how, a["zeros"][r.d], r.s, r.nodes)

    return Operator(program, reference)


def to_types(how: str) -> Operator:
    def program(g: Any, a: Arrays) -> Any:
        node, edge = g.node(a["x"]), g.src(a["x"]) * g.edge(a["e"])
        to = lambda place: getattr(g, f"{how}_to_{place}")  # noqa: E731
        return to("node_type")(node), to("edge_type")(edge), to("graph")(node), to("graph")(edge) * node

    def reference(r: Reference, a: Arrays) -> Any:
        node, edge = a["x"], a["x"][r.s] * a["e"]
        whole = lambda x: segments(how, x, np.zeros(len(x), int), 1)[0]  # noqa: E731
        types = int(r.nt.max()) + 1
        return (
            segments(how, node, r.nt, types),
            segments(how, edge, r.t, r.types),
            whole(node),
            whole(edge) * node,
        )

    return Operator(program, reference)


def by_graph(how: str) -> Operator:
    def program(g: Any, a: Arrays) -> Any:
        pooled = getattr(g, f"{how}_by")(g.node(a["x"]), a["i_graph"], NUM)
        return pooled, pooled[g.node(a["i_node"])] - g.node(a["x"])  # read back, as in graph normalisation

    def reference(r: Reference, a: Arrays) -> Any:
        pooled = segments(how, a["x"], a["i_graph"], NUM)
        return pooled, pooled[a["i_node"]] - a["x"]

    return Operator(program, reference)


OPERATORS: dict[str, Operator] = {
    "feature maximum": Operator(
        lambda g, a: (g.sum_to_dst(g.src(a["x"]).max(keepdims=True) * g.dst(a["y"])), g.node(a["heads"]).max(0)),
        lambda r, a: (r.sum(a["x"][r.s].max(-1, keepdims=True) * a["y"][r.d]), a["heads"].max(1)),
    ),
    "feature minimum": Operator(
        lambda g, a: g.sum_to_dst(rgnn.min(g.src(a["heads"]) * g.dst(a["heads"]), axis=(0, 1))),
        lambda r, a: r.sum((a["heads"][r.s] * a["heads"][r.d]).min((1, 2))),
    ),
    "feature softmax": Operator(
        lambda g, a: g.sum_to_dst(rgnn.softmax(g.src(a["x"]) * 9.0) * g.dst(a["y"]) + g.src(a["heads"]).softmax(0)[1]),
        lambda r, a: r.sum(jax.nn.softmax(a["x"][r.s] * 9.0) * a["y"][r.d] + jax.nn.softmax(a["heads"][r.s], 1)[:, 1]),
    ),
    "feature logsumexp": Operator(
        lambda g, a: (
            g.sum_to_dst(rgnn.logsumexp(g.src(a["heads"]) * 30.0, axis=None)),
            rgnn.log_softmax(g.node(a["heads"]), axis=0),
            g.node(a["heads"]).logsumexp(0, keepdims=True),
        ),
        lambda r, a: (
            r.sum(jax.nn.logsumexp(a["heads"][r.s] * 30.0, axis=(1, 2))),
            jax.nn.log_softmax(a["heads"], axis=1),
            jax.nn.logsumexp(a["heads"], axis=1, keepdims=True),
        ),
    ),
    "sums over several axes": Operator(
        lambda g, a: (
            g.sum_to_dst(g.src(a["heads"]).sum(axis=None)),
            g.node(a["heads"]).mean((0, -1), keepdims=True),
            g.sum_to_dst(rgnn.mean(g.src(a["heads"]) * g.dst(a["heads"]), (-1, 0))),
        ),
        lambda r, a: (
            r.sum(a["heads"][r.s].sum((1, 2))),
            a["heads"].mean((1, 2), keepdims=True),
            r.sum((a["heads"][r.s] * a["heads"][r.d]).mean((1, 2))),
        ),
    ),
    "minima of edges": reductions("min"),
    "products of edges": reductions("prod"),
    "softmax within a source": Operator(
        lambda g, a: g.sum_to_src(rgnn.edge_softmax(g.edge(a["score"]), within="src")[..., None] * g.dst(a["heads"])),
        lambda r, a: r.sum(softmax_within(a["score"], r.s, r.nodes)[..., None] * a["heads"][r.d], r.s),
    ),
    "softmax over all rows": Operator(
        lambda g, a: (
            rgnn.row_softmax(g.node(a["x"])),
            rgnn.row_softmax(g.edge(a["score"]), within="type"),
            rgnn.row_softmax(g.node(a["x"]).sum(), within="type")[None] * g.node(a["y"]),
        ),
        lambda r, a: (
            jax.nn.softmax(a["x"], axis=0),
            softmax_within(a["score"], r.t, r.types),
            softmax_within(a["x"].sum(-1), r.nt, int(r.nt.max()) + 1)[:, None] * a["y"],
        ),
    ),
    "semantic attention": Operator(
        # HAN (arXiv 1903.07293): a weight for each of H views of the nodes, by their mean score over all nodes.
        lambda g, a: (
            rgnn.softmax(g.mean_to_graph(rgnn.tanh(g.node(a["heads"])) @ g.shared(a["vector"])))[:, None]
            * g.node(a["heads"])
        ).sum(0),
        lambda r, a: jnp.einsum("h,nhk->nk", jax.nn.softmax((jnp.tanh(a["heads"]) @ a["vector"]).mean(0)), a["heads"]),
    ),
    "lookup in a shared table": Operator(
        lambda g, a: (
            g.sum_to_dst(g.shared(a["table"])[g.edge(a["i_edge"])] * g.src(a["x"])),
            g.shared(a["table"])[g.node(a["i_node"]), 1:3],
            g.shared(a["table"])[g.edge(a["i_far"])],
        ),
        lambda r, a: (
            r.sum(a["table"][a["i_edge"]] * a["x"][r.s]),
            a["table"][a["i_node"], 1:3],
            a["table"][a["i_far"]],
        ),
    ),
    "lookup in tables by type": Operator(
        lambda g, a: (
            g.sum_to_dst(g.per_edge_type(a["by_etype"])[g.edge(a["i_edge"])] * g.dst(a["y"])),
            g.per_node_type(a["by_ntype"])[g.node(a["i_node"])] * g.node(a["x"]),
        ),
        lambda r, a: (r.sum(a["by_etype"][r.t, a["i_edge"]] * a["y"][r.d]), a["by_ntype"][r.nt, a["i_node"]] * a["x"]),
    ),
    "lookup in a row": Operator(
        lambda g, a: g.sum_to_dst(g.src(a["x"])[g.edge(a["i_edge"])] * g.dst(a["x"])[g.src(a["i_node"])]),
        lambda r, a: r.sum(
            jnp.take_along_axis(a["x"][r.s], a["i_edge"][:, None], 1)[:, 0]
            * jnp.take_along_axis(a["x"][r.d], a["i_node"][r.s][:, None], 1)[:, 0]
        ),
    ),
    "trigonometry": Operator(
        lambda g, a: g.sum_to_dst(
            rgnn.sin(g.src(a["x"])) * rgnn.cos(g.dst(a["y"])) + rgnn.arctan2(g.src(a["x"]), g.dst(a["y"]) + 0.01)
        ),
        lambda r, a: r.sum(jnp.sin(a["x"][r.s]) * jnp.cos(a["y"][r.d]) + jnp.arctan2(a["x"][r.s], a["y"][r.d] + 0.01)),
    ),
    "exponentials": Operator(
        lambda g, a: g.sum_to_dst(
            rgnn.softplus(g.src(a["x"]) * 9)
            + rgnn.expm1(g.dst(a["y"]))
            + rgnn.log1p(rgnn.square(g.src(a["x"])))
            + 2 ** g.dst(a["y"])
        ),
        lambda r, a: r.sum(
            jax.nn.softplus(a["x"][r.s] * 9) + jnp.expm1(a["y"][r.d]) + jnp.log1p(a["x"][r.s] ** 2) + 2 ** a["y"][r.d]
        ),
    ),
    "powers": Operator(
        lambda g, a: g.sum_to_dst((abs(g.src(a["x"])) + 0.5) ** g.dst(a["y"])) + g.shared(a["vector"]) ** 2,
        lambda r, a: r.sum((abs(a["x"][r.s]) + 0.5) ** a["y"][r.d]) + a["vector"] ** 2,
    ),
    "masks": Operator(
        lambda g, a: g.sum_to_dst(
            rgnn.where((g.src(a["x"]) > 0) & (g.dst(a["y"]) >= 0.1) | ~(g.edge(a["e"]) < 0.5), g.src(a["x"]), 0.5)
        ),
        lambda r, a: r.sum(jnp.where((a["x"][r.s] > 0) & (a["y"][r.d] >= 0.1) | ~(a["e"] < 0.5), a["x"][r.s], 0.5)),
    ),
    "stacks": Operator(
        lambda g, a: g.sum_to_dst(
            rgnn.stack([g.src(a["x"]), g.dst(a["y"])]).swapaxes(0, 1).transpose(1, 0).max(0)
            + rgnn.stack((g.src(a["x"]), g.dst(a["x"])), axis=-1).sum(-1)
        ),
        lambda r, a: r.sum(
            jnp.stack([a["x"][r.s], a["y"][r.d]], 1).max(1) + jnp.stack([a["x"][r.s], a["x"][r.d]], 2).sum(2)
        ),
    ),
    "vectors and transposes": Operator(
        lambda g, a: (
            g.sum_to_dst(g.src(a["x"]) @ g.shared(a["vector"])),
            g.node(a["heads"]) @ g.shared(a["vector"]),
            g.sum_to_dst(g.src(a["x"]) @ g.shared(a["matrix"]).T),
            g.sum_to_dst((g.src(a["heads"]) * g.dst(a["heads"])).T[2]),
            rgnn.clip(g.node(a["x"]), -0.5, 0.75),
        ),
        lambda r, a: (
            r.sum(a["x"][r.s] @ a["vector"]),
            a["heads"] @ a["vector"],
            r.sum(a["x"][r.s] @ a["matrix"].T),
            r.sum((a["heads"][r.s] * a["heads"][r.d])[:, :, 2]),
            jnp.clip(a["x"], -0.5, 0.75),
        ),
    ),
    **{f"{how} to types and to all": to_types(how) for how in ("sum", "mean", "max", "min")},
    **{f"{how} by graph": by_graph(how) for how in ("sum", "mean", "max", "min")},
}


def split(arrays: Arrays) -> tuple[Arrays, Arrays]:
    whole = {name: a for name, a in arrays.items() if name.startswith("i_")}
    return {name: a for name, a in arrays.items() if name not in whole}, whole


def evaluate(function: Callable[[Arrays], Any], arrays: Arrays, second: bool) -> Any:
    """Results and gradients of a function of the arrays; with `second`, also the gradient of a norm of gradients."""
    floats, whole = split(arrays)
    flat = lambda a: tuple(jax.tree.leaves(function({**a, **whole})))  # noqa: E731
    loss = lambda a: sum(jnp.sum(jnp.sin(y * 0.7 + 0.3)) for y in flat(a))  # noqa: E731
    penalty = lambda a: sum(jnp.sum(jnp.sin(g)) for g in jax.tree.leaves(jax.grad(loss)(a)))  # noqa: E731
    run = lambda a: (flat(a), jax.grad(loss)(a), jax.grad(penalty)(a) if second else None)  # noqa: E731
    return jax.jit(run)(floats)


@cache
def expected(name: str, graph: str, second: bool = False) -> tuple[Arrays, Any]:
    """Arrays, and results and gradients of the reference; with `second`, those of a norm of gradients, too."""
    edges = GRAPHS[graph]
    arrays = arrays_of(edges)
    floats, whole = split(arrays)
    arrays = {n: a.astype(np.float32).astype(np.float64) for n, a in floats.items()} | whole
    with jax.enable_x64(True):
        found = evaluate(lambda a: OPERATORS[name].reference(Reference(edges), a), arrays, second)
    return arrays, jax.tree.map(np.asarray, found)


def check(name: str, graph: str, options: Options, dtype: str, tolerance: float, second: bool = False) -> None:
    arrays, want = expected(name, graph, second)
    program = rgnn.program(OPERATORS[name].program)
    with jax.enable_x64(dtype == "float64"):
        given = {n: jnp.asarray(a.astype("int32" if n.startswith("i_") else dtype)) for n, a in arrays.items()}
        got = evaluate(lambda a: program(graph_of(graph), a, options=options), given, second)
    for (path, w), y in zip(jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got), strict=True):
        found = error(y, w)
        assert found < tolerance, f"relative error {found:.1e} at {jax.tree_util.keystr(path)}"


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATORS)
def test_on_xla_with_second_derivatives(name: str) -> None:
    check(name, "typical", XLA, "float64", 1e-9, second=True)


def test_all_in_one_program_on_xla() -> None:
    """Results and gradients in float64 against numpy, which test_evaluate.py compares with jax.numpy."""
    arrays = arrays_of(GRAPHS["typical"])

    @rgnn.program
    def program(g: Any, a: Arrays) -> Any:
        return {name: operator.program(g, a) for name, operator in OPERATORS.items()}

    floats, whole = split(arrays)
    with jax.enable_x64(True):
        results, pull = jax.vjp(
            jax.jit(lambda a: program(graph_of("typical"), a | whole, options=XLA)), jax.tree.map(jnp.asarray, floats)
        )
        cotangents = jax.tree.map(waves, results)
        with by_numpy() as programs:
            want, pull_by_numpy = jax.vjp(lambda a: program(graph_of("typical"), a | whole), floats)
            want = want, pull_by_numpy(cotangents)
        found = jax.tree_util.tree_leaves_with_path((results, pull(cotangents)))
    assert len(programs) == 1
    for (path, y), w in zip(found, jax.tree.leaves(want), strict=True):
        assert error(y, np.asarray(w)) < 1e-9, jax.tree_util.keystr(path)


@pytest.mark.parametrize("name", slow_but(["masks"], OPERATORS))
def test_on_kernels(name: str) -> None:
    check(name, "typical", PALLAS, "float32", 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("graph", ["long_segments", "sparse", "one_node", "no_edges", "one_type"])
@pytest.mark.parametrize("backend", ["xla", "plain", "kernels"])
@pytest.mark.parametrize("name", OPERATORS)
def test_on_other_graphs(name: str, backend: str, graph: str) -> None:
    options = {"xla": XLA, "plain": PLAIN, "kernels": PALLAS}[backend]
    check(name, graph, options, "float32", 1e-4, second=backend != "kernels")


def slopes_of_extrema(how: str, options: Options, dtype: str) -> list[float]:
    """Gradients of extrema of computed rows with respect to a bias, summed: each extremum has a slope of 1."""
    edges = [0] * 9, [1, 2, 2, 1, 2, 0, 2, 0, 0], [2, 1, 2, 2, 1, 2, 1, 1, 1]
    graph = rgnn.RelGraph.from_edges(*edges, num_nodes=3, num_edge_types=3)
    x = np.random.default_rng(19).normal(size=(3, 2, 3)).astype(dtype)

    def extrema(g: Any, x: Any, c: Any, b: Any) -> Any:
        rows = g.node(x) + rgnn.tanh(g.min_to_graph(g.node(x)))
        share = rgnn.edge_softmax(rgnn.rsqrt(g.out_degree()) * g.shared(c))
        edge = share * g.dst(rows) * g.src(rows) + g.shared(b)
        node = g.sum_to_dst(share * g.dst(rows)) + g.shared(b)
        to = lambda place, x: getattr(g, f"{how}_to_{place}")(x)  # noqa: E731
        by_one = getattr(g, f"{how}_by")(node, np.zeros(3, np.int32), 1)
        return (
            *(to("graph", node), by_one, getattr(node, how)(1)),
            *(to("dst", edge), to("src", edge), to("edge_type", edge), to("graph", edge)),
        )

    program, c = rgnn.program(extrema), np.full((), 0.3, dtype)
    loss = lambda b: tuple(y.sum() for y in program(graph, x, c, b, options=options))  # noqa: E731
    return [
        float(np.asarray(s).sum()) for s in jax.jit(jax.jacrev(loss))(np.linspace(-1, 1, 6, dtype=dtype).reshape(2, 3))
    ]


# Of 6 numbers a row: one graph, one readout, three nodes of two minima, three destinations, one source, two types.
SLOPES = [6, 6, 6, 18, 6, 12, 6]


@pytest.mark.xfail(
    jax.__version_info__ < (0, 11), reason="XLA of jax 0.10 computes a row twice across the barrier", strict=False
)
@pytest.mark.parametrize(
    ("how", "dtype"), slow_but([("min", "float32")], itertools.product(("min", "max"), ("float32", "float64")))
)
def test_extrema_of_recomputed_rows_get_the_whole_gradient(how: str, dtype: str) -> None:
    """If XLA computed a row twice with different rounding, no row would equal the extremum."""
    with jax.enable_x64(dtype == "float64"):
        np.testing.assert_allclose(slopes_of_extrema(how, XLA, dtype), SLOPES, rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["min", "max"])
def test_extrema_of_recomputed_rows_on_a_gpu(how: str) -> None:
    found = slopes_of_extrema(how, Options(backend="pallas", precision="f32"), "float32")
    np.testing.assert_allclose(found, SLOPES, rtol=1e-6)


LOWERED = ("feature maximum", "feature softmax", "trigonometry", "exponentials", "powers", "masks")


@pytest.mark.parametrize("name", LOWERED)
def test_kernels_are_lowered_for_a_gpu(name: str) -> None:
    """Operators without a Triton lowering would fail only on a GPU."""
    given = {
        n: jnp.asarray(a, "int32" if n.startswith("i_") else "float32") for n, a in arrays_of(GRAPHS["typical"]).items()
    }
    floats, whole = split(given)
    graph, program = graph_of("typical").with_loop_tables(), rgnn.program(OPERATORS[name].program)
    options = Options(backend="pallas", precision="tf32", interpret=False)
    loss = lambda a: sum(jnp.sum(y) for y in jax.tree.leaves(program(graph, {**a, **whole}, options=options)))  # noqa: E731
    assert kernel_names(stablehlo(lambda a: (loss(a), jax.grad(loss)(a)), floats))


@pytest.mark.slow
@pytest.mark.parametrize(("how", "axis"), [("max", 0), ("max", 1), ("min", None)])
def test_the_gradient_of_an_extremum_of_computed_features(how: str, axis: int | None) -> None:
    """XLA may compute the features twice and round them differently: no element then equals the extremum."""

    @rgnn.program
    def layer(g: Any, x: Any, w: Any) -> Any:
        z = rgnn.square(rgnn.tanh(g.node(x) @ g.per_node_type(w))) + np.linspace(-1, 1, 4).reshape((2, 2))
        return getattr(z, how)(axis)

    graph = rgnn.RelGraph.from_edges([0], [0], [0], num_nodes=7, num_edge_types=1)
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(7, 2, 3)), rng.normal(size=(1, 3, 2))

    def reference(x: Any, w: Any) -> Any:
        z = jnp.square(jnp.tanh(jnp.einsum("nhk,kf->nhf", x, w[0]))) + np.linspace(-1, 1, 4).reshape((2, 2))
        z = z.reshape(7, 4) if axis is None else z
        at = 1 if axis is None else axis + 1
        return jnp.take_along_axis(z, jnp.expand_dims(getattr(jnp, f"arg{how}")(z, at), at), at).squeeze(at)

    with jax.enable_x64(True):
        got = jax.jit(jax.grad(lambda x, w: jnp.sin(layer(graph, x, w, options=XLA)).sum(), (0, 1)))(x, w)
        want = jax.grad(lambda x, w: jnp.sin(reference(x, w)).sum(), (0, 1))(x, w)
    for g, e in zip(got, want, strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-9, atol=1e-12)
