"""Dtypes and digits are those of `jax.numpy`: sums of integers, and constants and counts beside floats."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import rgnn
from dejax.rgnn import Options
from tests.cases import slow_but
from tests.rgnn.references import GRAPHS, graph_of

GRAPH, EDGES = graph_of("typical"), GRAPHS["typical"]
NODES = EDGES.num_nodes
WHOLE = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


@rgnn.program
def reductions(g: Any, x: Any) -> list[Any]:
    v, row = g.node(x), g.src(x)
    found = [v.max(), v.min(), g.prod_to_dst(row)]
    for how in ("sum", "mean"):
        found += [getattr(v, how)(), *(getattr(g, f"{how}_to_{to}")(row) for to in ("dst", "src", "edge_type"))]
        found += [getattr(g, f"{how}_to_graph")(v), getattr(g, f"{how}_to_node_type")(v)]
    return found


def wanted(x: np.ndarray) -> list[np.ndarray]:
    """In whole numbers of Python's size, cut to the dtypes of `jax.numpy`."""
    y, row = x.astype(object), x.astype(object)[EDGES.senders]
    total = jax.eval_shape(jnp.sum, x).dtype
    mean = jax.eval_shape(jnp.mean, x).dtype

    def at(ids: np.ndarray, rows: np.ndarray, count: int, how: str) -> np.ndarray:
        of = [rows[ids == i] for i in range(count)]
        if how == "prod":
            return cut(np.stack([r.prod(0) if len(r) else np.ones(3, object) for r in of]))
        if how == "sum":
            return cut(np.stack([r.sum(0) if len(r) else np.zeros(3, object) for r in of]))
        return np.stack([r.sum(0) / max(len(r), 1) if len(r) else np.zeros(3) for r in of]).astype(mean)

    def cut(values: np.ndarray) -> np.ndarray:
        bits = np.iinfo(total).bits
        least = np.iinfo(total).min
        return ((values - least) % 2**bits + least).astype(total)

    found = [x.max(-1), x.min(-1), at(EDGES.receivers, row, NODES, "prod")]
    for how in ("sum", "mean"):
        own = cut(y.sum(-1)) if how == "sum" else (y.sum(-1) / 3).astype(mean)
        ends = (EDGES.receivers, NODES), (EDGES.senders, NODES), (EDGES.edge_type, EDGES.num_edge_types)
        found += [own, *(at(ids, row, count, how) for ids, count in ends)]
        found += [at(np.zeros(NODES, int), y, 1, how)[0], at(EDGES.node_type, y, EDGES.num_node_types, how)]
    return found


@pytest.mark.parametrize(
    "dtype",
    slow_but(["uint8"], WHOLE),
)
def test_reductions_of_integers(dtype: str) -> None:
    """uint8's 255, 255, 255 had the mean 84.33, and sums to the graph wrapped."""
    rng = np.random.default_rng(0)
    with jax.enable_x64(dtype.endswith("64")):
        if dtype == "bool":
            x = rng.random((NODES, 3)) < 0.5
        else:
            top = np.iinfo(dtype).max
            x = rng.integers(top // 2, top, (NODES, 3), dtype=dtype, endpoint=True)
        backend = "pallas" if dtype == "uint16" else "xla"
        got = reductions(GRAPH, jnp.asarray(x), options=Options(backend=backend, interpret=True))
        for n, (found, want) in enumerate(zip(got, wanted(x), strict=True)):
            assert found.dtype == want.dtype, n
            np.testing.assert_allclose(np.asarray(found), want, rtol=2e-6, err_msg=str(n))


FLOATS = ("float16", "bfloat16", "float32", "float64")


def dtypes(function: Any, *given: Any) -> list[str]:
    """The dtypes of a program's results, traced alone."""
    task, _, _ = rgnn.program(function)._prepare(GRAPH, Options(), given, {})
    return [task.program.ops[o].dtype for o in task.program.outputs]


@pytest.mark.parametrize("x64", [False, True])
def test_constants_and_counts_take_the_dtype_that_they_meet(x64: bool) -> None:
    def function(g: Any, x: Any) -> list[Any]:
        row, node = g.src(x), g.node(x)
        share, degree = g.sum_to_dst(0.1), rgnn.log(1.0 + g.sum_to_dst(1.0))
        made = [node * share, node / degree, row * rgnn.sqrt(g.in_degree()), rgnn.where(degree > 0.5, node, share)]
        alone = [share, degree, g.mean_to_dst(g.in_degree()), rgnn.rsqrt(g.out_degree())]
        return [*made, 2.5 * node + 1, rgnn.maximum(node, 0.5), *alone, degree.astype("float32") * 2.0]

    with jax.enable_x64(x64):
        own = "float64" if x64 else "float32"
        for dtype in FLOATS[: 4 if x64 else 3]:
            # 16-bit floats do not hold the counts of large graphs.
            beside = "float32" if dtype in ("float16", "bfloat16") else dtype
            found = dtypes(function, jnp.ones((NODES,), dtype))
            assert found == [beside] * 4 + [dtype] * 2 + [own] * 4 + ["float32"], dtype


@pytest.mark.parametrize("x64", [False, True])
def test_mixed_integers_are_as_in_jax(x64: bool) -> None:
    whole = [d for d in WHOLE[1:] if x64 or "64" not in d]
    pairs = list(itertools.product(whole, whole))

    def function(g: Any, xs: dict[str, Any]) -> list[Any]:
        made = [g.node(xs[a]) + g.node(xs[b]) for a, b in pairs]
        return made + [rgnn.where(g.node(xs[a]) > 0, g.node(xs[a]), g.node(xs[b])) for a, b in pairs]

    with jax.enable_x64(x64):
        xs = {d: jnp.ones((NODES,), d) for d in whole}
        want = [jax.dtypes.canonicalize_dtype(jnp.promote_types(a, b)).name for a, b in pairs]
        assert dtypes(function, xs) == want * 2


def test_constants_and_counts_have_the_digits_of_64_bits() -> None:
    """They were computed in float32 and promoted: errors of 1e-8."""

    @rgnn.program
    def function(g: Any, x: Any) -> list[Any]:
        row = g.src(x)
        return [rgnn.sqrt(g.in_degree()) * row, g.node(x) * g.sum_to_dst(0.1), rgnn.log(1.0 + g.sum_to_dst(1.0)), x2(g)]

    def x2(g: Any) -> Any:
        return rgnn.exp(0.1 * g.sum_to_src(1.0 / 3.0))

    with jax.enable_x64(True):
        got = function(GRAPH, jnp.full((NODES,), 0.3))
        into, out = (np.bincount(ids, minlength=NODES) for ids in (EDGES.receivers, EDGES.senders))
        want = [np.sqrt(into[EDGES.receivers]) * 0.3, 0.3 * 0.1 * into, np.log(1.0 + into), np.exp(0.1 * out / 3)]
        for found, exact in zip(got, want, strict=True):
            assert found.dtype == jnp.float64
            np.testing.assert_allclose(found, exact, rtol=1e-14)
