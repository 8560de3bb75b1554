"""The plans of kernels: one owner for each stored value, an order for all instances, and what a fault costs."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import rgnn
from dejax.rgnn import Options, Program, RelGraph, passes
from dejax.rgnn.compiler import execute
from dejax.rgnn.ir.inter import Builder
from dejax.rgnn.ir.intra import Kernels, Traversal, in_order
from dejax.rgnn.passes.kernels.fuse_traversal import fuse_traversal
from tests.rgnn.references import GRAPHS, graph_of

PALLAS = Options(backend="pallas", interpret=True, precision="f32")
GRAPH = graph_of("typical")
NODES, TYPES = GRAPHS["typical"].num_nodes, GRAPHS["typical"].num_edge_types


def arrays(width: int = 8) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    shapes = ((NODES, width), (TYPES, width, width), (TYPES, width))
    return tuple(jnp.asarray(rng.normal(size=s) * s[-1] ** -0.5, jnp.float32) for s in shapes)


def plans(program: Program, *given: Any, graph: RelGraph = GRAPH, disable: tuple[str, ...] = ()) -> list[Kernels]:
    """The kernels without gradients, of both halves for all gradients, and of both halves for gradients of those."""
    task, _, _ = program._prepare(graph, replace(PALLAS, disable=disable), given, {})
    found = [task]
    for _ in range(2):
        found += execute.training_tasks(found[-1], execute.differentiable_positions(found[-1]))[1:]
    return [execute.inference_kernels(t) for t in found]


# --- one value of edges in several hops ------------------------------------------------------------------------------

FORMS = list(itertools.product((2, 3), ("dst", "src", "relation"), (False, True), ("dst", "src")))


def diffusion(hops: int, within: str, kept: bool, to: str) -> Program:
    """Sums weighted by one softmax, as in attention diffusion or a PageRank with attention."""

    def function(g: Any, x: Any, w: Any, a: Any) -> Any:
        score = rgnn.leaky_relu(rgnn.dot(g.src(x) @ g.per_edge_type(w), g.per_edge_type(a)))
        share = rgnn.edge_softmax(score, within)
        h = first = g.node(x)
        for _ in range(hops):
            rows = getattr(g, {"dst": "src", "src": "dst"}[to])(h)
            h = getattr(g, f"sum_to_{to}")(share * rows)
            h = 0.9 * h + 0.1 * first if kept else h
        return h

    return rgnn.program(function)


def test_one_softmax_in_several_hops_has_a_plan() -> None:
    """Each hop once stored `exp(score)` for the others, so that an instance read what only a later one wrote."""
    for form in FORMS:
        made = plans(diffusion(*form), *arrays())
        assert all(any(i.template == "traversal" for i in kernels.instances) for kernels in made), form


@pytest.mark.parametrize("backend", ["xla", pytest.param("pallas", marks=pytest.mark.slow)])
def test_one_softmax_in_several_hops(backend: str) -> None:
    program = diffusion(2, "dst", False, "dst")

    def gradients(options: Options) -> Any:
        loss = lambda *a: jnp.sum(jnp.sin(program(GRAPH, *a, options=options)))  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*arrays())

    want = gradients(Options(backend="xla", precision="f32", disable=("backward",)))
    got = gradients(replace(PALLAS, backend=backend))
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5), got, want)


@rgnn.program
def shared_by_a_product(g: Any, x: Any, w: Any, b: Any, mask: Any, scale: Any, factor: Any, some: Any) -> Any:
    """XLA computes the product's gradient of edges. What that gradient reads, and what reads it, share the mask."""
    z = g.src(rgnn.tanh(g.node(x).reshape(6) @ g.per_node_type(w) + g.per_node_type(b))).reshape(2, 3)
    product = g.prod_to_src(rgnn.where(g.edge(mask) > 0, 0.5 + rgnn.sigmoid(z), rgnn.tanh(z)))
    score = g.per_edge_type(scale) * g.in_degree()
    mean = g.mean_to_dst(rgnn.edge_softmax(score, "dst") * z)
    other = rgnn.where(g.src(some) > 0, rgnn.rsqrt(g.out_degree()) * g.shared(factor), -np.inf)
    return product, mean, g.sum_to_dst(rgnn.edge_softmax(other, "dst") * score)


# Programs differ by the passes that are off, and by what the graph's numbers of nodes, edges and types let pay.
@pytest.mark.parametrize("disable", [(), ("combine_products", "compact", "cse", "gemm", "hoist", "unit_axes")], ids=len)
@pytest.mark.parametrize(("nodes", "edges", "types"), [(1, 0, 1), (4, 9, 2), (2, 6, 4)])
def test_a_traversal_stores_what_another_would_store_too_late(
    nodes: int, edges: int, types: int, disable: tuple[str, ...]
) -> None:
    rng = np.random.default_rng(0)
    ends = rng.integers(0, nodes, (2, edges))
    graph = RelGraph.from_edges(*ends, rng.integers(0, types, edges), num_nodes=nodes, num_edge_types=types)
    shapes = ((nodes, 2, 3), (1, 6, 1), (1, 6), (edges,), (types,), (), (nodes,))
    given = [jnp.zeros(shape) for shape in shapes]
    assert all(kernels.instances for kernels in plans(shared_by_a_product, *given, graph=graph, disable=disable))


def test_rows_that_are_read_twice_at_each_step() -> None:
    """With every step the time to count the operators behind a value once doubled."""

    @rgnn.program
    def doubled(g: Any, x: Any) -> Any:
        h = g.node(x)
        for _ in range(40):
            h = h * rgnn.tanh(h)
        return g.sum_to_dst(g.src(h)) + g.sum_to_dst(g.src(rgnn.tanh(h)))

    assert len(plans(doubled, arrays()[0])) == 5


# --- faults ----------------------------------------------------------------------------------------------------------


def raises(*args: Any, **keywords: Any) -> Any:
    raise KeyError(17)


def unverified(kernels: Kernels, *args: Any, **keywords: Any) -> Kernels:
    """A plan whose traversals do not load what they compute with."""
    made = fuse_traversal(kernels, *args, **keywords)
    return replace(
        made, instances=tuple(replace(i, operands=()) if isinstance(i, Traversal) else i for i in made.instances)
    )


FAULTS: dict[str, tuple[str, Any, str]] = {
    "the planner raises": ("fuse_traversal", raises, "plan of the kernels"),
    "its plan is wrong": ("fuse_traversal", unverified, "plan of the kernels"),
    "the plan of products": ("fuse_gemm", raises, "plan of the kernels"),
    "storage": ("storage", raises, "plan of the kernels"),
    "a pass raises": ("AFTER_BACKWARD", (("compact", raises), *passes.AFTER_BACKWARD), "pass 'compact'"),
    "its program is wrong": (
        "AFTER_BACKWARD",
        (("compact", lambda p, c: replace(p, outputs=(999,))), *passes.AFTER_BACKWARD),
        "'compact'",
    ),
}


NO_STORAGE = pytest.param(
    "storage",
    "xla",
    marks=[
        pytest.mark.slow,
        pytest.mark.cpu_only("products on a GPU have all digits in these tests, so no row is encoded"),
    ],
)


@pytest.mark.parametrize(
    ("fault", "backend"),
    [
        *((fault, "xla") for fault in ("its plan is wrong", "its program is wrong")),
        *(
            pytest.param(fault, "xla", marks=pytest.mark.slow)
            for fault in ("the planner raises", "the plan of products", "a pass raises")
        ),
        NO_STORAGE,
        pytest.param("its plan is wrong", "pallas", marks=pytest.mark.slow),
    ],
)
def test_a_fault_of_the_compiler_costs_no_result(fault: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user gets one warning at the line of the program, and the right gradients."""
    name, what, told = FAULTS[fault]

    def function(g: Any, x: Any, w: Any) -> Any:
        return g.sum_to_dst(rgnn.tanh(g.src(x) @ g.per_edge_type(w)))

    function.__name__ = f"layer_{list(FAULTS).index(fault)}_{backend}"  # equal programs are compiled once
    x, w, _ = arrays(4)

    def gradients(options: Options, program: Program) -> Any:
        return jax.grad(lambda x, w: jnp.sum(program(GRAPH, x, w, options=options) ** 2), (0, 1))(x, w)

    options = Options(backend=backend, interpret=True, precision="f32" if backend == "pallas" else None)
    want = gradients(Options(backend="xla", disable=("backward",)), rgnn.program(function))
    monkeypatch.setattr(passes, name, what)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", rgnn.KernelFallbackWarning)
        got = gradients(options, rgnn.program(function))
    ours = [w for w in found if issubclass(w.category, rgnn.KernelFallbackWarning)]
    assert len(ours) == 1 and told in str(ours[0].message) and "g.sum_to_dst" in str(ours[0].message)
    assert ours[0].filename == __file__
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5), got, want)


def test_instances_that_wait_for_each_other_have_no_order() -> None:
    b = Builder("waiting")
    x = b.op("input", name="x", position=0, space="node", shape=(), dtype="float32")
    y = b.op("tanh", x)
    z = b.op("tanh", y)
    program = b.build([z])
    assert in_order(program, [([z], [y])]) is None and in_order(program, [([x], [y]), ([x], [y])]) is None
    assert in_order(program, [([y], [z]), ([x], [y])], [z]) == [x, ~1, ~0]
