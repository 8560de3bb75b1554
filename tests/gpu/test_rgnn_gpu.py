"""The compiler's contract on a GPU: every operator and model through the Triton kernels, against float64."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, seed, settings

from dejax.rgnn import Options, RelGraph, library, zoo
from tests.rgnn.cases import CASES, MODELS, Size
from tests.rgnn.contract import check, covering, expected, make_arrays
from tests.rgnn.random_programs import Recipe, recipes
from tests.rgnn.references import GRAPHS, graph_of
from tests.rgnn.strategies import EdgeList, edge_lists
from tests.rgnn.test_cases import ORDINARY, PADDED, padded_case
from tests.rgnn.test_random_programs import PASS_SUBSETS, compare
from tests.rgnn.test_random_programs import check as check_program

pytestmark = pytest.mark.gpu

F32 = Options(backend="pallas", precision="f32")
TF32 = Options(backend="pallas", precision="tf32")
BF16 = Options(backend="pallas", precision="bf16")
# TF32 keeps 10 bits of each operand: 1e-3 for one product, more where products feed products.
ONE_PRODUCT, CHAIN, LOW = 1e-3, 3e-3, 2e-2


@pytest.mark.parametrize(("name", "graph", "size"), covering(tuple(CASES), ORDINARY, 3), ids=str)
def test_float32(name: str, graph: str, size: Size) -> None:
    check(name, graph, size, F32, tolerance=1e-5)


@pytest.mark.parametrize("name", ["linear_on_edges", "linear_by_edge_type_and_head", "linear_by_node_type", *MODELS])
def test_tf32(name: str) -> None:
    tolerance = ONE_PRODUCT if name.startswith("linear_on") else CHAIN
    check(name, "typical", Size(100, 17, 3), TF32, tolerance=tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_products(name: str) -> None:
    check(name, "typical", Size(100, 17, 3), BF16, tolerance=LOW)


@pytest.mark.parametrize(("name", "graph", "size"), covering((*MODELS, "reductions"), ORDINARY, 1), ids=str)
def test_bfloat16_arrays(name: str, graph: str, size: Size) -> None:
    check(name, graph, size, Options(backend="pallas"), "bfloat16", tolerance=LOW)


@pytest.mark.parametrize("graph", ["one_node", "no_edges"])
@pytest.mark.parametrize("name", ["rgcn_mean", "rgat", "rgat_relation", "hgt_skip", "reductions", "linear_on_edges"])
def test_small_graphs(name: str, graph: str) -> None:
    check(name, graph, Size(3, 3, 2), F32, tolerance=1e-5)


@pytest.mark.parametrize("size", [Size(32, 8, 4), Size(64, 32, 1), Size(16, 2, 8)], ids=str)
@pytest.mark.parametrize(
    "name", ["rgcn_mean", "rgcn_bases", "rgat", "rgat_relation", "hgt_skip", "largest_computed_message"]
)
def test_many_programs_and_long_segments(name: str, size: Size) -> None:
    check(name, "large", size, F32, tolerance=2e-5)


@pytest.mark.parametrize("name", ["softmax_over_incoming_edges", "softmax_within_relations"])
@pytest.mark.parametrize("graph", ["long_segments", "large"])
def test_softmax_of_large_scores(name: str, graph: str) -> None:
    check(name, graph, Size(), F32, tolerance=1e-5, scores=1e4)


@pytest.mark.parametrize("name", PADDED)
def test_padding_has_no_effect(name: str) -> None:
    from tests.rgnn import test_cases

    test_cases.check_padding(name, F32, padded_case(name, Size(3, 3, 2)))


@pytest.mark.parametrize(("options", "tolerance"), [(F32, 1e-5), (TF32, CHAIN)], ids=["f32", "tf32"])
@pytest.mark.parametrize("name", ["hgt", "hgt_skip"])
def test_typed_sources(name: str, options: Options, tolerance: float) -> None:
    check(name, "typed", Size(32, 32, 2), options, tolerance=tolerance)


@pytest.mark.parametrize(("options", "tolerance"), [(F32, 1e-5), (TF32, CHAIN)], ids=["f32", "tf32"])
@pytest.mark.parametrize("width", [17, 64])
def test_scores_by_the_product(width: int, options: Options, tolerance: float) -> None:
    check("rgat", "large", Size(width, width, 1), options, tolerance=tolerance)


def test_gradients_of_shared_weights_make_no_padded_copies() -> None:
    """GraphSAGE's training step as XLA compiles it: nothing pads an array of all nodes."""
    nodes = 100_003
    rng = np.random.default_rng(0)
    graph = RelGraph.from_edges(rng.integers(0, nodes, nodes), rng.integers(0, nodes, nodes), num_nodes=nodes)
    x = jnp.asarray(rng.standard_normal((nodes, 64)), jnp.float32)
    params = {"neighbour": jnp.ones((64, 64)), "root": jnp.ones((64, 64)), "bias": jnp.ones(64)}

    def training(x: Any, p: Any) -> Any:
        y, pull = jax.vjp(lambda x, p: zoo.graphsage(graph, x, p, options=Options(precision="tf32")), x, p)
        return y, pull(y)

    text = jax.jit(training).lower(x, params).compile().as_text()
    entry = text[text.index("\nENTRY") :]
    copies = [line.strip() for line in entry.splitlines() if re.search(r"= f32\[\d{6,},64\]\S* fusion\(", line)]
    # XLA joins products of the same rows, and cuts the result: slices are its own choice.
    assert copies
    assert not [line for line in copies if "pad" in line.split(" = ")[0]]


def test_the_same_bits_again() -> None:
    arrays = {
        k: jnp.asarray(v, jnp.float32)
        for k, v in make_arrays("rgat", GRAPHS["large"], Size(32, 8, 4), "float32").items()
    }
    x = arrays.pop("x")
    loss = lambda x, p: jnp.sum(jnp.sin(library.rgat(graph_of("large"), x, p, options=TF32)))  # noqa: E731
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    first = jax.tree.map(np.asarray, step(x, arrays))
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, step(x, arrays)), first)


def test_auto_is_the_kernels_here() -> None:
    """`backend="auto"` gives bit for bit what the kernels give, and XLA does not."""
    want = expected("rgat", "long_segments", Size(17, 17, 2), "float32")
    arrays = {k: jnp.asarray(v, jnp.float32) for k, v in want.arrays.items()}
    x = arrays.pop("x")
    results = {
        backend: np.asarray(
            library.rgat(graph_of("long_segments"), x, arrays, options=Options(backend=backend, precision="tf32"))
        )
        for backend in ("auto", "pallas", "xla")
    }
    np.testing.assert_array_equal(results["auto"], results["pallas"])
    assert (results["auto"] != results["xla"]).any()


@settings(max_examples=40)
@given(recipe=recipes(), edges=edge_lists(), disable=PASS_SUBSETS)
def test_random_programs(recipe: Recipe, edges: EdgeList, disable: tuple[str, ...]) -> None:
    compare(recipe, edges, Options(backend="pallas", disable=disable, precision="f32"), "float32", 1e-3)


@pytest.mark.parametrize("transform", ["vmap", "scan", "checkpoint", "stacked"])
def test_transformations(transform: str) -> None:
    from tests.rgnn.compiler import test_transforms

    arrays: Any = {"vmap": ((0, 0),), "scan": (), "checkpoint": (), "stacked": ("vmap",)}[transform]
    options = test_transforms.BACKENDS | {"pallas": F32}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_transforms, "BACKENDS", options)
        {
            "vmap": test_transforms.test_vmap,
            "scan": test_transforms.test_scan_over_layers,
            "checkpoint": test_transforms.test_checkpoint,
            "stacked": test_transforms.test_stacked_graphs,
        }[transform]("pallas", *arrays)


# So many of each kind, small: compiling is most of the time, and is done by many threads.
_KINDS: dict[str, tuple[dict[str, Any], float, int]] = {
    "plain": ({}, 1e-3, 140),
    "scaled": ({"scaled": True}, 1e-3, 60),
    "float16": ({"narrow": "float16"}, 3e-2, 50),
    "bfloat16": ({"narrow": "bfloat16"}, 3e-2, 50),
}


@pytest.mark.parametrize("kind", _KINDS)
def test_random_programs_by_the_hundred(kind: str) -> None:
    """300 programs in all, the same each time, against float64: results and gradients."""
    asked, tolerance, programs = _KINDS[kind]
    drawn: list[tuple[Recipe, EdgeList, tuple[str, ...]]] = []

    @seed(7)
    @settings(max_examples=programs, phases=[Phase.generate], database=None)
    @given(recipe=recipes(max_steps=6, **asked), edges=edge_lists(), disable=PASS_SUBSETS)
    def draw(recipe: Recipe, edges: EdgeList, disable: tuple[str, ...]) -> None:
        drawn.append((recipe, edges, disable))

    draw()

    def failure(case: tuple[Recipe, EdgeList, tuple[str, ...]]) -> str | None:
        recipe, edges, disable = case
        options = Options(backend="pallas", disable=disable, precision="f32")
        try:
            check_program(recipe, edges, options, "float32", tolerance)
        except Exception as error:
            return f"{type(error).__name__}: {error}\n{recipe!r}\n{options}\n{edges}"
        return None

    with ThreadPoolExecutor(16) as pool:
        failures = [f for f in pool.map(failure, drawn) if f is not None]
    assert not failures, f"{len(failures)} of {len(drawn)} programs fail\n" + "\n".join(failures[:5])
