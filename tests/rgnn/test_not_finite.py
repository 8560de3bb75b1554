"""NaN and infinities in each operand: kernels give what XLA gives in float64 on a CPU, results and gradients.

Interpreted here; on a GPU the same tests run the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import rgnn
from dejax.rgnn import Options
from tests.cases import slow_but
from tests.rgnn.cases import CASES, Size
from tests.rgnn.contract import error, make_arrays
from tests.rgnn.references import GRAPHS, Arrays, graph_of
from tests.rgnn.test_operators import OPERATORS, XLA, arrays_of, split

VALUES = (np.nan, np.inf, -np.inf)


def with_values(arrays: Arrays) -> Iterator[tuple[str, float, Arrays]]:
    """The arrays with one element of one of them replaced: a name, the value, and the arrays."""
    for number, (name, x) in enumerate(arrays.items()):
        for turn, value in enumerate(VALUES):
            changed = x.copy()
            changed.flat[(7 * number + 5 * turn + x.size // 3) % x.size] = value
            yield name, value, arrays | {name: changed}


def compiled(run: Callable[[Arrays], Any], arrays: Arrays) -> Callable[[Arrays], Any]:
    """(arrays) -> results, and the gradients of their sum with random factors."""
    rng = np.random.default_rng(3)
    factors = [rng.normal(size=s.shape) for s in jax.tree.leaves(jax.eval_shape(run, arrays))]

    def both(a: Arrays) -> Any:
        results, pull = jax.vjp(lambda a: tuple(jax.tree.leaves(run(a))), a)
        return results, pull(tuple(jnp.asarray(f, y.dtype) for f, y in zip(factors, results, strict=True)))[0]

    return jax.jit(both)


def difference(got: Any, want: np.ndarray, tolerance: float, any_infinity: bool) -> str:
    """What differs: which elements are NaN, which are infinite, or the others; "" where nothing does.

    With `any_infinity`, infinities and NaN are one: NaN is what a sum of both infinities gives, in one of two orders.
    """
    got = np.asarray(got).astype(np.float64)
    if any_infinity:
        got, want = (np.where(np.isfinite(x), x, np.nan) for x in (got, want))
    lost, new = np.isnan(want) & ~np.isnan(got), np.isnan(got) & ~np.isnan(want)
    if lost.any() or new.any():
        return f"of {np.isnan(want).sum()} NaN {lost.sum()} lost and {new.sum()} new"
    infinite = np.isinf(want) | np.isinf(got)
    if not np.array_equal(got[infinite], want[infinite]):
        return f"{got[infinite][:4]} in place of {want[infinite][:4]}"
    finite = np.isfinite(want)
    found = error(got[finite], want[finite])
    return "" if found < tolerance else f"relative error {found:.1e} of what is finite"


def check(
    run: Callable[[Any, Arrays, Options], Any],
    arrays: Arrays,
    precision: str = "f32",
    tolerance: float = 1e-5,
    infinities: bool = True,
) -> None:
    """The contract, for each array and value; without `infinities` these may be NaN."""
    arrays = {name: x.astype(np.float32).astype(np.float64) for name, x in arrays.items()}
    graph = graph_of("typical")
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        there = jax.device_put(graph, jax.devices("cpu")[0])
        exact = compiled(lambda a: run(there, a, XLA), arrays)
        wanted = [jax.tree.map(np.asarray, exact(a)) for *_, a in with_values(arrays)]
    single = {name: x.astype(np.float32) for name, x in arrays.items()}
    kernels = compiled(lambda a: run(graph, a, Options(backend="pallas", precision=precision)), single)
    wrong = []
    for (name, value, a), want in zip(with_values(single), wanted, strict=True):
        leaves = zip(jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(kernels(a)), strict=True)
        for (path, w), y in leaves:
            if what := difference(y, w, tolerance, not infinities and not np.isnan(value)):
                wrong.append(f"{value} in {name}: {jax.tree_util.keystr(path)}: {what}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", slow_but(["feature minimum", "minima of edges"], OPERATORS))
def test_operators(name: str) -> None:
    floats, whole = split(arrays_of(GRAPHS["typical"]))
    program = rgnn.program(OPERATORS[name].program)
    check(lambda graph, a, options: program(graph, a | whole, options=options), floats)


ALIKE = tuple(n for n in CASES if not n.startswith(("linear", "rgcn", "rgat", "hgt")))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALIKE)
def test_cases_without_products(name: str) -> None:
    check(CASES[name].run, make_arrays(name, GRAPHS["typical"], Size(), "float32"))


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("f32", 1e-5), ("tf32", 3e-3), ("bf16", 3e-2)])
@pytest.mark.parametrize(
    "name", ["linear_on_edges", "linear_by_node_type", "linear_chain", "rgcn_mean", "rgcn_bases", "rgat_one_head"]
)
def test_products(name: str, precision: str, tolerance: float) -> None:
    """One head: a product of several narrow heads at once has NaN in all of them (docs/precision.md)."""
    arrays = make_arrays(name, GRAPHS["typical"], Size(5, 4, 1), "float32")
    check(CASES[name].run, arrays, precision, tolerance, infinities=False)


FUNCTIONS = {
    "elu": jax.nn.elu,
    "relu": jax.nn.relu,
    "sign": jnp.sign,
    "softplus": jax.nn.softplus,
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
}


@pytest.mark.parametrize("backend", ["xla", "pallas"])
def test_functions(backend: str) -> None:
    """Activations are those of `jax.nn`, on nodes and in kernels."""
    x = jnp.array([np.nan, np.inf, -np.inf, 0.0, 2.0, -1.0], jnp.float32)

    @rgnn.program(backend=backend)
    def layer(g: Any, x: Any) -> Any:
        found = [getattr(rgnn, name)(g.src(x)) for name in FUNCTIONS]
        return g.sum_to_dst(rgnn.stack(found)), rgnn.stack([getattr(rgnn, name)(g.node(x)) for name in FUNCTIONS])

    graph = rgnn.RelGraph.from_edges(range(6), range(6), [0] * 6, num_nodes=6, num_edge_types=1)
    for found in jax.jit(layer)(graph, x):
        for name, got in zip(FUNCTIONS, found.T, strict=True):
            np.testing.assert_allclose(got, FUNCTIONS[name](x), rtol=1e-5, err_msg=name)


def test_large_reductions_on_a_cpu() -> None:
    """XLA leaves reductions of 4,096 float32 elements or more to a library that drops NaN."""
    graph = rgnn.RelGraph.from_edges([0], [0], [0], num_nodes=600, num_edge_types=1)
    x = np.zeros((600, 8), np.float32)
    x[5, 3], x[7, 2] = np.nan, -np.nan
    layer = rgnn.program(lambda g, x: (g.node(x).max(), g.node(x).min(), g.max_to_graph(g.node(x))))
    for backend in ("xla", "pallas"):
        largest, smallest, whole = jax.jit(lambda x, b=backend: layer(graph, x, options=Options(backend=b)))(x)
        assert np.flatnonzero(np.isnan(largest)).tolist() == np.flatnonzero(np.isnan(smallest)).tolist() == [5, 7]
        assert np.flatnonzero(np.isnan(whole)).tolist() == [2, 3]


@pytest.mark.parametrize("backend", ["xla", "pallas"])
def test_zeros_of_both_signs_are_different_constants(backend: str) -> None:
    """In one program, and in two that differ in nothing else, which the caches must tell apart."""
    graph, x = rgnn.RelGraph.from_edges([0], [0], num_nodes=1), np.ones((1, 4), np.float32)
    for zero in (0.0, -0.0):
        layer = rgnn.program(lambda g, x, zero=zero: (1 / (g.node(x) * zero), 1 / (g.node(x) * -zero)))
        same, other = layer(graph, x, options=Options(backend=backend))
        assert (same == math.copysign(math.inf, zero)).all() and (other == math.copysign(math.inf, -zero)).all()
