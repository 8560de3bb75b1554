"""Every operator and model of the library: float64 references, forward and gradients, by numpy and on backends."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import rgnn
from dejax.rgnn import Options, RelGraph
from dejax.rgnn.compiler import execute
from dejax.rgnn.compiler.execute import counts_of
from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import OpProgram, Space
from dejax.rgnn.ir.intra import Traversal
from dejax.rgnn.lowering.pallas import PallasLowering
from dejax.rgnn.lowering.running import SharedColumns
from dejax.rgnn.passes.gradients import save
from tests.cases import slow_but
from tests.rgnn.cases import CASES, MODELS, Size
from tests.rgnn.contract import Expected, assert_agrees, check, covering, expected, row_counts, run_case
from tests.rgnn.preserved import by_numpy
from tests.rgnn.references import GRAPHS, LONG_SEGMENT_CHUNK, graph_of

XLA = Options(backend="xla", precision="f32")
PALLAS = Options(backend="pallas", precision="f32", interpret=True)
BACKENDS = {"xla": XLA, "pallas": PALLAS}
ORDINARY = ("typical", "long_segments", "fan_in", "sparse", "one_type")
F32, TF32, BF16 = 1e-5, 3e-3, 2e-2  # TF32 rounds operands to 10 bits, and here products feed products
SLOW = pytest.mark.slow  # interpreted kernels take seconds a case; all cases run on a GPU, too


@pytest.mark.parametrize("name", CASES)
def test_by_numpy_with_all_passes(name: str) -> None:
    """Results and gradients in float64 of each case, as it is compiled for small and for large graphs."""
    graph = (*ORDINARY, "typed")[tuple(CASES).index(name) % 6]
    want = expected(name, graph, Size(), "float64")
    with jax.enable_x64(True), by_numpy() as programs:
        got = run_case(name, graph_of(graph), jax.tree.map(jnp.asarray, want.arrays), want.cotangents, XLA, jit=False)
    assert programs
    assert_agrees(got, want, 1e-10, "float64")


@SLOW
@pytest.mark.parametrize(("name", "graph", "size"), covering(tuple(CASES), ORDINARY, 2), ids=str)
def test_xla_float32(name: str, graph: str, size: Size) -> None:
    check(name, graph, size, XLA, tolerance=F32)


@SLOW
@pytest.mark.parametrize(("name", "graph", "size"), covering(tuple(CASES), ORDINARY, 1), ids=str)
def test_kernels_float32(name: str, graph: str, size: Size) -> None:
    check(name, graph, size, PALLAS, tolerance=F32)


@SLOW
@pytest.mark.parametrize(
    ("name", "graph", "size"), covering((*MODELS, "reductions", "elementwise"), ORDINARY, 1), ids=str
)
def test_xla_bfloat16(name: str, graph: str, size: Size) -> None:
    check(name, graph, size, XLA, "bfloat16", tolerance=BF16)


@SLOW
@pytest.mark.parametrize("name", ["rgcn_mean", "rgat", "hgt"])
def test_kernels_bfloat16(name: str) -> None:
    check(name, "typical", Size(17, 3, 2), PALLAS, "bfloat16", tolerance=BF16)


@pytest.mark.parametrize("graph", ["one_node", "no_edges"])
@pytest.mark.parametrize("name", ["rgat_relation", "hgt_skip", "reductions"])
def test_small_graphs(name: str, graph: str) -> None:
    want = expected(name, graph, Size(3, 3, 2), "float64")
    with jax.enable_x64(True), by_numpy():
        got = run_case(name, graph_of(graph), jax.tree.map(jnp.asarray, want.arrays), want.cotangents, XLA, jit=False)
    assert_agrees(got, want, 1e-10, "float64")


@pytest.mark.parametrize(
    ("name", "graph", "backend"),
    [
        ("rgat", "no_edges", "xla"),
        ("reductions", "one_node", "xla"),
        pytest.param("reductions", "no_edges", "pallas", marks=SLOW),
        pytest.param("rgat", "one_node", "pallas", marks=SLOW),
        pytest.param("rgat", "no_edges", "pallas", marks=SLOW),
    ],
)
def test_small_graphs_on_backends(name: str, graph: str, backend: str) -> None:
    check(name, graph, Size(3, 3, 2), BACKENDS[backend], tolerance=F32)


@pytest.mark.parametrize(
    ("name", "backend"),
    slow_but(
        [("softmax_within_relations", "xla")],
        itertools.product(("softmax_over_incoming_edges", "softmax_within_relations"), BACKENDS),
    ),
)
def test_softmax_of_large_scores(name: str, backend: str) -> None:
    """Scores of plus and minus 1e4, whose exp would overflow or vanish without subtracting the maximum."""
    want = expected(name, "long_segments", Size(), "float32", 1e4)
    assert np.abs(want.arrays["s"]).max() > 1e4
    check(name, "long_segments", Size(), BACKENDS[backend], tolerance=F32, scores=1e4)


@pytest.mark.parametrize("backend", slow_but(["xla"], BACKENDS))
def test_products_of_rounded_operands(backend: str) -> None:
    """`precision="bf16"` rounds the operands of products, and nothing else."""
    options = Options(backend=backend, precision="bf16", interpret=True)
    check("linear_on_edges", "typical", Size(17, 17), options, tolerance=BF16)
    if backend == "xla":
        with pytest.raises(AssertionError, match="relative errors above 0.0001"):
            check("linear_on_edges", "typical", Size(17, 17), options, tolerance=1e-4)


# --- padding ---------------------------------------------------------------------------------------------------------

PADDED = (
    "rgcn_mean",
    "rgat_relation",
    "hgt_skip",
    "reductions",
    "softmax_over_incoming_edges",
    "source_pairs",
    "constants",
    "degrees",
    "dot_of_both_ends",
)
PADDED_KERNELS = ("rgat_relation", "reductions", "source_pairs")


def padded_case(name: str, size: Size, seed: int = 0) -> tuple[tuple, dict[str, np.ndarray], tuple, Expected, dict]:
    """A case on a padded graph: NaN in every row of features and cotangents that is padding."""
    want, edges = expected(name, "typical", size, "float32"), GRAPHS["typical"]
    padded = edges.padded(edges.senders.shape[0] + 9, edges.num_nodes + 4, np.random.default_rng(seed))
    assert padded.edge_mask is not None and padded.node_mask is not None
    pairs = np.arange(padded.senders.shape[0]) < row_counts(edges)["source_pair"]
    masks = {"node": padded.node_mask, "edge": padded.edge_mask, "source_pair": pairs}

    def pad(x: np.ndarray, kind: str) -> np.ndarray:
        if kind not in masks:
            return x.astype(np.float32)
        result = np.full((len(masks[kind]), *x.shape[1:]), np.nan, np.float32)
        result[masks[kind]] = x
        return result

    kinds = {key: kind for key, (kind, _, _) in CASES[name].arrays(size).items()}
    arrays = {key: pad(x, kinds[key]) for key, x in want.arrays.items()}
    by_rows = {edges.num_nodes: "node", len(edges.senders): "edge"}
    cotangents = tuple(pad(c, by_rows[len(c)]) for c in want.cotangents)
    rows = {len(mask): mask for kind, mask in masks.items() if kind != "source_pair"}
    gradient_masks = {key: masks.get(kind) for key, kind in kinds.items()}
    arguments = (
        padded.senders,
        padded.receivers,
        padded.edge_type,
        padded.node_type,
        padded.edge_mask,
        padded.node_mask,
    )
    return arguments, arrays, cotangents, want, {"rows": rows, "gradients": gradient_masks}


def unpad(x: Any, mask: np.ndarray | None) -> np.ndarray:
    x = np.asarray(x)
    if mask is None:
        return x
    np.testing.assert_array_equal(x[~mask], 0, err_msg="a row of padding")
    return x[mask]


def check_padding(name: str, options: Options, case: tuple) -> None:
    """The contract on a padded graph that is made inside jit."""
    edges = GRAPHS["typical"]
    arguments, arrays, cotangents, want, masks = case

    @jax.jit
    def run(arguments: tuple, arrays: Any, cotangents: tuple) -> Any:
        senders, receivers, edge_type, node_type, edge_mask, node_mask = arguments
        graph = RelGraph.build_traced(
            senders,
            receivers,
            edge_type,
            num_nodes=node_mask.shape[0],
            num_edge_types=edges.num_edge_types,
            node_type=node_type,
            num_node_types=edges.num_node_types,
            edge_mask=edge_mask,
            node_mask=node_mask,
            long_segment_chunk=LONG_SEGMENT_CHUNK,
        )
        return run_case(name, graph, arrays, cotangents, options, jit=False)

    assert_padding_is_gone(run(arguments, arrays, cotangents), want, masks)


def assert_padding_is_gone(got: tuple, want: Expected, masks: dict) -> None:
    plain, results, gradients = got
    plain, results = (tuple(unpad(y, masks["rows"][len(y)]) for y in found) for found in (plain, results))
    gradients = {key: unpad(g, masks["gradients"][key]) for key, g in gradients.items()}
    assert_agrees((plain, results, gradients), want, F32)


@SLOW  # test_contract.py has RGAT on a padded graph
@pytest.mark.parametrize(
    ("name", "backend"),
    # The kernels read the same tables as XLA, and more.
    [*((n, "xla") for n in PADDED if n not in PADDED_KERNELS), *((n, "pallas") for n in PADDED_KERNELS)],
)
def test_padding_has_no_effect(name: str, backend: str) -> None:
    check_padding(name, BACKENDS[backend], padded_case(name, Size(3, 3, 2)))


def test_masks_of_a_concrete_graph() -> None:
    """`RelGraph.from_edges` takes masks, too; its pairs are those of valid edges."""
    name, size = "softmax_over_incoming_edges", Size(3, 3, 2)
    arguments, arrays, cotangents, want, masks = padded_case(name, size, seed=1)
    senders, receivers, edge_type, node_type, edge_mask, node_mask = arguments
    edges = GRAPHS["typical"]
    senders, receivers = (np.where(edge_mask, ends, 0) for ends in (senders, receivers))
    graph = RelGraph.from_edges(
        senders,
        receivers,
        edge_type,
        num_nodes=len(node_mask),
        num_edge_types=edges.num_edge_types,
        node_type=node_type,
        num_node_types=edges.num_node_types,
        edge_mask=edge_mask,
        node_mask=node_mask,
    )
    got = run_case(name, graph, jax.tree.map(jnp.asarray, arrays), cotangents, XLA)
    assert_padding_is_gone(got, want, masks)


@pytest.fixture
def fresh_plans() -> Iterator[None]:
    """Clears compiled programs before and after the test."""

    def forget() -> None:
        for cache in (execute.inference_kernels, execute.training_cut):
            cache.cache_clear()
        execute.forget_compiled()

    forget()
    yield
    forget()


@pytest.fixture
def rows_in_16_bits(monkeypatch: pytest.MonkeyPatch, fresh_plans: None) -> None:
    """Rows that are read often are stored as row-scaled float16 on small graphs, too, where it does not pay."""
    monkeypatch.setattr(
        importlib.import_module("dejax.rgnn.passes.kernels.storage"), "_pays", lambda _, rows, __: rows > 0
    )


@pytest.fixture
def scores_made_again(monkeypatch: pytest.MonkeyPatch, fresh_plans: None) -> None:
    """The forward pass keeps no score for the backward pass, as on a graph with many edges."""
    monkeypatch.setattr(save, "_ARRAYS_IN_CACHE", 10**12)


def test_what_the_graphs_cover() -> None:
    """The graphs of the cases have the structures that cause errors."""
    typical, long_segments = GRAPHS["typical"], GRAPHS["long_segments"]
    rows = np.stack([typical.senders, typical.receivers, typical.edge_type])
    assert np.unique(rows, axis=1).shape[1] < rows.shape[1], "no duplicate edge"
    assert (typical.senders == typical.receivers).any(), "no self loop"
    assert (np.bincount(typical.edge_type, minlength=typical.num_edge_types) == 0).any(), "no empty type"
    assert (np.bincount(typical.receivers, minlength=typical.num_nodes) == 0).any(), "no node without incoming edges"
    assert np.bincount(long_segments.receivers).max() > 2 * LONG_SEGMENT_CHUNK, "no long segment of three chunks"
    chosen = covering(tuple(CASES), ORDINARY, 2)
    assert {c[0] for c in chosen} == set(CASES) and {c[1] for c in chosen} == set(ORDINARY)
    assert {c[2].k for c in chosen} == {c[2].n for c in chosen} == {1, 3, 17, 100}
    assert {c[2].h for c in chosen} >= {1, 2, 8}


@pytest.fixture
def as_on_a_large_graph(monkeypatch: pytest.MonkeyPatch, fresh_plans: None) -> None:
    """The compiler sees 100,000 times the nodes, edges and pairs."""

    def task(program: OpProgram, counts: Counts, *rest: Any, **named: Any) -> execute.CompileTask:
        grown = ("nodes", "edges", "source_pairs", "destination_pairs")
        counts = dataclasses.replace(counts, **{name: 10**5 * getattr(counts, name) for name in grown})
        return execute.CompileTask(program, counts, *rest, **named)

    monkeypatch.setattr(importlib.import_module("dejax.rgnn.compiler.program"), "CompileTask", task)


@pytest.fixture
def side_by_side(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many per-edge scalars each array holds that one reduction stores for others."""
    found: list[int] = []
    original = PallasLowering.side_by_side

    def together(self: PallasLowering, t: Traversal) -> list[tuple[int, ...]]:
        values = original(self, t)
        found.extend(map(len, values))
        return values

    monkeypatch.setattr(PallasLowering, "side_by_side", together)
    return found


@SLOW
@pytest.mark.parametrize(
    ("size", "dtype", "precision", "tolerance"),
    [(Size(16, 16, 1), "float32", "tf32", TF32), (Size(20, 17, 2), "float32", "f32", F32),
     (Size(8, 8, 2), "bfloat16", None, BF16)],
    ids=str,
)  # fmt: skip
@pytest.mark.usefixtures("rows_in_16_bits", "as_on_a_large_graph")
def test_scalars_that_one_traversal_stores_for_others(
    size: Size, dtype: str, precision: str | None, tolerance: float, side_by_side: list[int]
) -> None:
    """One traversal stores two numbers for each edge and head in one array, in float32 whatever dtype they have.

    With `f32` the traversals keep the digits of differences (`CompileTask.exact`), and store no such pair.
    """
    options = dataclasses.replace(PALLAS, precision=precision)
    check("hgt", "typed", size, options, dtype, tolerance=tolerance, loop_tables=True)
    assert (2 in side_by_side) == (precision != "f32")


# What kernels do on a GPU or a large graph, on small ones: what is forced, cases with their graphs, sizes, precisions.
FORCED: dict[str, tuple[tuple[str, ...], bool, list[tuple[str, str, Size]], tuple[str, ...]]] = {
    "row-scaled float16 between kernels": (
        ("rows_in_16_bits",),
        True,
        [(name, "long_segments", Size(20, 17, 2)) for name in ("rgcn_mean", "rgat", "hgt_skip")],
        ("tf32", "f32"),
    ),
    "keys and messages in one array": (
        ("rows_in_16_bits",),
        True,
        [("hgt_skip", "typed", size) for size in (Size(16, 16, 1), Size(20, 18, 2), Size(17, 20, 1))],
        ("tf32",),
    ),
    "scores by the product": ((), False, [("rgat", "typical", Size(16, 16, 1))], ("f32", "tf32")),
    "one product of keys and messages by type": (
        (),
        False,
        [("hgt", "typed", Size(8, 4, 2)), ("hgt_skip", "typed", Size(8, 4, 2))],
        ("f32",),
    ),
    "scores that backward computes again": (
        ("scores_made_again",),
        True,
        [("hgt", "long_segments", Size(8, 4, 2))],
        ("f32",),
    ),
    "scores by products with narrow matrices": (
        ("as_on_a_large_graph",),
        False,
        [(n, "typical", z) for n, z in (("rgat_one_head", Size(16, 16, 1)), ("rgat", Size(20, 17, 2)))]
        + [("rgat", "typical", Size(8, 3, 5))],
        ("f32", "tf32"),
    ),
}
FORCED_CASES = [(what, *case, p) for what, (_, _, cases, ps) in FORCED.items() for case in cases for p in ps]


@pytest.mark.parametrize(
    ("what", "name", "graph", "size", "precision"),
    slow_but(
        [("row-scaled float16 between kernels", "rgcn_mean", "long_segments", Size(20, 17, 2), "tf32")], FORCED_CASES
    ),
    ids=str,
)
def test_kernels_as_on_a_gpu(
    what: str, name: str, graph: str, size: Size, precision: str, request: pytest.FixtureRequest
) -> None:
    fixtures, loop_tables, *_ = FORCED[what]
    for fixture in fixtures:
        request.getfixturevalue(fixture)
    options = dataclasses.replace(PALLAS, precision=precision)
    check(name, graph, size, options, tolerance=F32 if precision == "f32" else TF32, loop_tables=loop_tables)


def test_where_keys_and_messages_take_one_product() -> None:
    """The compiler sees whether all edges of each type come from nodes of one type."""
    assert counts_of(graph_of("typed")).typed_sources and not counts_of(graph_of("typical")).typed_sources


@SLOW
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("rgat", Size(16, 16, 1)),
        ("hgt", Size(16, 16, 1)),
        ("rgat", Size(20, 32, 2)),
        ("hgt", Size(20, 32, 2)),
    ],
    ids=str,
)
@pytest.mark.usefixtures("as_on_a_large_graph")
def test_gradients_of_nodes_are_stored_as_float16(name: str, size: Size, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows of nodes exceed the cache and are read often, RGAT's gradients are copied as row-scaled float16."""
    run, found = PallasLowering.traversal, []

    def traversal(self: PallasLowering, t: Traversal, env: dict[int, Any]) -> None:
        found.append((t, self.kernels))
        run(self, t, env)

    monkeypatch.setattr(PallasLowering, "traversal", traversal)
    monkeypatch.setattr(importlib.import_module("dejax.rgnn.passes.kernels._node_maps"), "_READS_OF_COPY", 0)
    graph = "typed" if name == "hgt" else "typical"
    check(name, graph, size, dataclasses.replace(PALLAS, precision="tf32"), tolerance=TF32, loop_tables=True)
    ((made, kernels),) = {t: k for t, k in found if t.via is None and t.space == Space.NODE}.items()
    assert kernels.row_scaled.intersection(made.entry_outputs)


@SLOW
@pytest.mark.usefixtures("as_on_a_large_graph")
def test_scalars_of_others_in_xla(side_by_side: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA evaluates the reduction that reads numbers which another traversal stored."""
    original = PallasLowering.traversal

    def traversal(self: PallasLowering, t: Traversal, env: dict[int, Any]) -> None:
        if any(isinstance(env[v], SharedColumns) for v in t.reads):
            raise NotImplementedError("as if it were too wide")
        original(self, t, env)

    monkeypatch.setattr(PallasLowering, "traversal", traversal)
    with pytest.warns(rgnn.KernelFallbackWarning, match="as if it were too wide"):
        check("hgt", "typed", Size(8, 8, 2), dataclasses.replace(PALLAS, precision="tf32"), tolerance=TF32)
    assert 2 in side_by_side


def test_the_references_can_be_missed() -> None:
    """The contract fails for a wrong graph and for a wrong gradient."""
    want = expected("rgat", "typical", Size(), "float32")
    arrays = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), want.arrays)
    swapped = RelGraph.from_edges(
        GRAPHS["typical"].receivers,
        GRAPHS["typical"].senders,
        GRAPHS["typical"].edge_type,
        num_nodes=GRAPHS["typical"].num_nodes,
        num_edge_types=GRAPHS["typical"].num_edge_types,
    )
    with by_numpy(), pytest.raises(AssertionError, match="relative errors above 0.01"):
        assert_agrees(run_case("rgat", swapped, arrays, want.cotangents, XLA, jit=False), want, 1e-2)
