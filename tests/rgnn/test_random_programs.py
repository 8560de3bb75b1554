"""Random programs: any backend and any set of passes give the results of plain XLA without passes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, note, seed, settings
from hypothesis import strategies as st

from dejax.rgnn import Options, RelGraph
from dejax.rgnn.compiler.execute import counts_of
from dejax.rgnn.passes import PASSES
from tests.rgnn.contract import waves
from tests.rgnn.lowering.test_h200 import stablehlo
from tests.rgnn.preserved import Compiled, grown, trace
from tests.rgnn.random_programs import Input, Recipe, recipes
from tests.rgnn.rounding import DRAWS, as_with_rounded_products, rounded
from tests.rgnn.strategies import CHUNK, EdgeList, edge_lists

PLAIN = Options(backend="xla", disable=PASSES, precision="f32")
PASS_SUBSETS = st.one_of(st.just(()), st.lists(st.sampled_from(PASSES), unique=True).map(lambda p: tuple(sorted(p))))


Results = tuple[tuple, tuple, Any]


def run(program: Any, graph: RelGraph, arrays: list[Any], options: Options, relative: float = 0.0) -> Results:
    """(results without gradients, results with gradients, gradients).

    `relative`: the largest of the random errors in each operation; then these are of `DRAWS` runs, [DRAWS, ...].
    """

    def all_of(graph: RelGraph, arrays: list[Any]) -> Results:
        results, pull = jax.vjp(lambda a: program(graph, a, options=options), arrays)
        return program(graph, arrays, options=options), results, pull(tuple(map(waves, results)))[0]

    if relative:
        return jax.jit(rounded(all_of, relative))(graph, arrays)
    return jax.jit(all_of)(graph, arrays)


def column_norms(x: Any, by_column: bool) -> np.ndarray:
    """The norm of each column (the last axis), or of everything at once."""
    x = np.asarray(x).astype(np.float64)
    return np.linalg.norm(x.reshape(-1, x.shape[-1]) if by_column and x.ndim > 1 else x.reshape(-1, 1), axis=0)


def assert_same(got: Any, want: Any, tolerance: float, others: Sequence[Any] = (), by_column: bool = False) -> None:
    """Compares trees of arrays with those of float64.

    Numbers here are of the order of 1 or more, so what is wanted counts as 0.1 at least: a gradient may cancel to
    nothing. By column what is wanted counts as 0.03 at least, and as a hundredth of the largest column.

    Args:
      got: what is tested.
      want: the same in float64.
      tolerance: relative to the norm of what is wanted.
      others: the program as it is written, in the arithmetic of what is tested: eight times its largest error is
        allowed, so that what no arithmetic of that precision can compute is not counted.
      by_column: columns are compared one by one, because inputs have offsets and scales.
    """
    leaves = jax.tree_util.tree_leaves_with_path(want)
    for (path, w), g, *rest in zip(leaves, jax.tree.leaves(got), *map(jax.tree.leaves, others), strict=True):
        if w.dtype == jax.dtypes.float0 or w.size == 0:
            continue
        w, g, *rest = (np.asarray(a).astype(np.float64) for a in (w, g, *rest))
        assert g.shape == w.shape, f"shape {g.shape}, expected {w.shape} at {jax.tree_util.keystr(path)}"
        norms = column_norms(w, by_column)
        rows = w.size // len(norms)
        least = max(0.01 * norms.max(), 0.03 * np.sqrt(rows)) if by_column else 0.1 * np.sqrt(rows)
        unavoidable = np.max([column_norms(other - w, by_column) for other in rest], axis=0, initial=0)
        wrong = column_norms(g - w, by_column) / (tolerance * (norms + least + 1e-30) + 8 * unavoidable)
        assert np.all(wrong <= 1), f"{np.max(wrong):.1e} times the error allowed at {jax.tree_util.keystr(path)}"


def check(recipe: Recipe, edges: EdgeList, options: Options, dtype: str, tolerance: float) -> None:
    """Checks that results and gradients agree with float64 and have the dtypes of the program without passes."""
    graph, program, arrays = edges.build(long_segment_chunk=CHUNK), recipe.program(), recipe.arrays(edges)
    narrow = any(spec.dtype for spec in recipe.inputs)
    others: list[Results] = []
    with jax.enable_x64(True):
        exact = recipe.cast(arrays, "float64")
        want = run(program, graph, exact, PLAIN)
        if recipe.scaled:
            disturbed = run(program, graph, exact, PLAIN, float(np.finfo(dtype).eps))
            others += [jax.tree.map(lambda x, n=n: x[n], disturbed) for n in range(DRAWS)]
    with jax.enable_x64(dtype == "float64"):
        got = run(program, graph, recipe.cast(arrays, dtype), options)
        if narrow or recipe.scaled:
            others.append(run(program, graph, recipe.cast(arrays, dtype), PLAIN))
            assert [a.dtype for a in jax.tree.leaves(got)] == [a.dtype for a in jax.tree.leaves(others[-1])]
    assert_same(got, want, tolerance, others, recipe.scaled)


def compare(recipe: Recipe, edges: EdgeList, options: Options, dtype: str, tolerance: float) -> None:
    """`check` inside a test of hypothesis."""
    note(f"{options}\n{edges}")
    check(recipe, edges, options, dtype, tolerance)


KERNELS = Options(backend="pallas", precision="f32", interpret=True)
XLA = Options(backend="xla", precision="f32")
# For each kind of run: options, dtype, arguments of the grammar, tolerance.
RUNS: dict[str, tuple[Options, str, dict[str, Any], float]] = {
    "xla": (XLA, "float64", {}, 1e-10),
    "xla_as_kernels": (XLA, "float64", {}, 1e-10),
    "xla_scaled": (XLA, "float64", {"scaled": True}, 1e-8),
    "xla_float32_scaled": (XLA, "float32", {"scaled": True}, 1e-4),
    "xla_float16": (XLA, "float32", {"narrow": "float16", "max_steps": 8}, 3e-2),
    "xla_bfloat16": (XLA, "float32", {"narrow": "bfloat16", "max_steps": 8}, 3e-2),
    "kernels": (KERNELS, "float32", {"max_steps": 8}, 1e-3),
    "kernels_scaled": (KERNELS, "float32", {"scaled": True, "max_steps": 8}, 1e-3),
    "kernels_float16": (KERNELS, "float32", {"narrow": "float16", "max_steps": 8}, 3e-2),
    "kernels_bfloat16": (KERNELS, "float32", {"narrow": "bfloat16", "max_steps": 8}, 3e-2),
}
# Of a hundred programs; interpreted kernels take some seconds each.
SHARES = {
    "xla": 20,
    "xla_as_kernels": 20,
    "xla_scaled": 15,
    "xla_float32_scaled": 15,
    "xla_float16": 10,
    "xla_bfloat16": 10,
}
SHARES |= {"kernels": 4, "kernels_scaled": 2, "kernels_float16": 2, "kernels_bfloat16": 2}
SHARDS = 20  # of a hundred programs each


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("name", RUNS)
def test_on_backends(name: str, shard: int) -> None:
    """2,000 fixed programs, each on a graph and with some passes off; a shard of all kinds takes minutes of a core.

    Quick tests have each operator on XLA in one program (test_operators.py), and random programs by numpy.
    """
    options, dtype, asked, tolerance = RUNS[name]

    @seed(shard)
    @settings(max_examples=SHARES[name])
    @given(recipe=recipes(**asked), edges=edge_lists(), disable=PASS_SUBSETS)
    def test(recipe: Recipe, edges: EdgeList, disable: tuple[str, ...]) -> None:
        compare(recipe, edges, replace(options, disable=disable), dtype, tolerance)

    with as_with_rounded_products() if name == "xla_as_kernels" else nullcontext():
        test()


@pytest.mark.slow
@settings(max_examples=40)
@given(recipe=recipes(max_steps=8), edges=edge_lists(), narrow=st.sampled_from(("", "float16", "bfloat16")))
def test_lowering_for_a_gpu(recipe: Recipe, edges: EdgeList, narrow: str) -> None:
    """Triton lowers every kernel of a program; after tracing no fallback to XLA is possible."""
    graph, program = edges.build(long_segment_chunk=CHUNK).with_loop_tables(), recipe.program()
    options = Options(backend="pallas", interpret=False)
    arrays = recipe.cast(recipe.arrays(edges), narrow or "float32")

    def loss(arrays: list[Any]) -> Any:
        return sum(jnp.sum(jnp.sin(y.astype("float32"))) for y in program(graph, arrays, options=options))

    stablehlo(jax.value_and_grad(loss), arrays)


# Arguments of the grammar, and the tolerance for its programs in float64.
GRAMMARS: dict[str, tuple[dict[str, Any], float]] = {
    "plain": ({}, 1e-9),
    "scaled": ({"scaled": True}, 1e-8),
    "float16": ({"narrow": "float16"}, 1e-9),
    "bfloat16": ({"narrow": "bfloat16"}, 1e-9),
    "integers": ({"whole": True}, 1e-9),
}


@pytest.mark.parametrize(
    ("name", "programs"),
    [*(("plain", 20), ("scaled", 15), ("float16", 10), ("bfloat16", 10), ("integers", 15))]
    + [pytest.param(name, 300, marks=pytest.mark.slow) for name in GRAMMARS],
)
def test_each_pass_preserves_results_and_gradients(name: str, programs: int) -> None:
    """By numpy, after each pass; without scales also gradients of gradients. As for small and for large graphs."""
    asked, tolerance = GRAMMARS[name]

    @settings(max_examples=programs)
    @given(recipe=recipes(**asked), edges=edge_lists(), disable=PASS_SUBSETS, exact=st.booleans(), large=st.booleans())
    def test(recipe: Recipe, edges: EdgeList, disable: tuple[str, ...], exact: bool, large: bool) -> None:
        note(f"{disable} exact={exact} large={large}\n{edges}")
        graph = edges.build(long_segment_chunk=CHUNK)
        program, inputs = trace(recipe.program(), graph, recipe.cast(recipe.arrays(edges), "float32"))
        counts = counts_of(graph)
        compiled = Compiled(
            program, graph, inputs, grown(counts) if large else counts, disable, exact=exact, tolerance=tolerance
        )
        if name == "integers":  # which have wrapped around, some to below the range of a logarithm or a root
            assume(all(np.isfinite(w).all() and (np.abs(w) < 1e6).all() for w in compiled.want))
        compiled.check()
        if name not in ("scaled", "integers"):
            compiled.check_second_derivatives()

    test()


@pytest.mark.slow
def test_backward_rounds_scores_as_forward_did() -> None:
    """Shares did not sum to 1: of a score that is a product, forward's maximum and backward's exponent differed."""
    lines = (
        "v0 = g.node(a[0])",
        "v1 = g.src(v0)",
        "v2 = g.per_edge_type(a[1])",
        "v3 = v2 * g.in_degree()",
        "v4 = g.sum_to_dst(rgnn.edge_softmax(v3, 'relation') * v1)",
        "v5 = g.node(a[2])",
        "v6 = rgnn.edge_softmax(rgnn.where_positive(g.src(v5), v3, -inf), within='dst')",
        "v7 = (0 + v6 * 1.0)",
        "v8 = g.source_pair(a[3])",
        "v9 = g.src(v8)",
        "v10 = g.src(v5)",
        "v11 = g.per_edge_type(a[4])",
        "v12 = g.per_edge_type(a[5])",
        "v13 = ((v9 @ v11 + v12)).reshape(2, 2)",
        "v14 = g.per_edge_type(a[6])",
        "v15 = (v9 @ v14).reshape(2, 2)",
    )
    wide = Input("etype", (3, 4), scale=0.5773502691896257)
    inputs = (
        Input("node", (2, 3), spread=3.0),
        Input("etype", (2, 3), spread=3.0),
        Input("node", (), values="mask"),
        Input("source_pair", (3,)),
        wide,
        Input("etype", (4,)),
        wide,
    )
    receivers = np.array([0, 0, 0, 4, *[0] * 12], np.int32)
    edges = EdgeList(np.zeros(16, np.int32), receivers, np.zeros(16, np.int32), 7, 1, None, 1)
    options, dtype, _, tolerance = RUNS["xla_float32_scaled"]
    check(Recipe(lines, inputs, ("v4", "v7", "v10", "v13", "v15")), edges, options, dtype, tolerance)
