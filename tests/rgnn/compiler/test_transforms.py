"""Programs under JAX's transformations, on both backends: the results are those of the plain program."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from jax.test_util import check_grads

from dejax import rgnn
from dejax.rgnn import Options, RelGraph, library
from dejax.rgnn.compiler import execute
from tests.cases import slow_but
from tests.rgnn.cases import Size
from tests.rgnn.contract import make_arrays
from tests.rgnn.references import GRAPHS, LONG_SEGMENT_CHUNK, edge_list, graph_of

BACKENDS = {
    "xla": Options(backend="xla", precision="f32"),
    "pallas": Options(backend="pallas", precision="f32", interpret=True),
}
# What surrounds the kernels is the same code for each model and backend: the model is RGCN, which compiles soonest.
XLA_FIRST = pytest.mark.parametrize("backend", slow_but(["xla"], BACKENDS))
GRAPH = graph_of("typical")
K = 4


@cache
def arrays(seed: int = 0) -> tuple[jax.Array, dict[str, jax.Array]]:
    made = make_arrays("rgcn_mean", GRAPHS["typical"], Size(K, K), "float32", seed)
    found = {key: jnp.asarray(value, jnp.float32) for key, value in made.items()}
    return found.pop("x"), found


@cache
def stacked(count: int) -> tuple[jax.Array, dict[str, jax.Array]]:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *(arrays(seed) for seed in range(count)))


def layer(backend: str) -> Callable[[Any, Any], Any]:
    return lambda x, params: library.rgcn(GRAPH, x, params, options=BACKENDS[backend])


def loss(backend: str) -> Callable[[Any, Any], Any]:
    return lambda x, params: jnp.sum(jnp.sin(layer(backend)(x, params)))


def close(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(g), np.asarray(w), rtol=tolerance, atol=tolerance)


# What tests compare with, compiled once for all of them: the layer by XLA, the loss and its gradients.
plain_layer = jax.jit(layer("xla"))
plain_gradients = jax.jit(jax.value_and_grad(loss("xla"), argnums=(0, 1)))


def each(function: Callable, *batches: Any) -> Any:
    """The function on each element of the batches, without vmap."""
    count = jax.tree.leaves(batches)[0].shape[0]
    found = (function(*jax.tree.map(operator.itemgetter(i), batches)) for i in range(count))
    return jax.tree.map(lambda *y: jnp.stack(y), *found)


@XLA_FIRST
def test_the_graph_as_an_argument_of_jit_and_no_jit(backend: str) -> None:
    x, params = arrays()
    traced = jax.jit(lambda g, x, p: library.rgcn(g, x, p, options=BACKENDS[backend]))
    close(traced(GRAPH, x, params), layer(backend)(x, params), 1e-6)


@pytest.mark.slow
def test_gradients_by_finite_differences() -> None:
    x, params = arrays()
    with jax.enable_x64(True):
        x, params = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), (x, params))
        leaves, tree = jax.tree.flatten((x, params))
        at = lambda *leaves: loss("xla")(*jax.tree.unflatten(tree, leaves))  # noqa: E731
        check_grads(at, leaves, order=1, modes=("rev",), eps=1e-6, rtol=1e-5)


def test_vmap_and_jacobians() -> None:
    """Cotangents are mapped as well: `jacrev` is vmap over the backward pass."""
    x, params = arrays()
    jacobian = jax.jacrev(layer("xla"))(x, params)
    y = layer("xla")(x, params)
    assert jacobian.shape == (*y.shape, *x.shape)
    weights = jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)
    close(jnp.tensordot(weights, jacobian, 2), jax.grad(lambda x: jnp.sum(layer("xla")(x, params) * weights))(x))


@pytest.mark.parametrize(
    ("backend", "axes"),
    slow_but([("xla", (0, 0))], itertools.product(BACKENDS, [(0, None), (None, 0), (0, 0)])),
)
def test_vmap(backend: str, axes: tuple[int | None, int | None]) -> None:
    """Results and gradients where features have a batch axis, where weights do (an ensemble), and where both do."""
    (x, params), (xs, many) = arrays(), stacked(2)
    given = (xs if axes[0] == 0 else x, many if axes[1] == 0 else params)
    both = jax.value_and_grad(loss(backend), argnums=(0, 1))
    fill = (
        xs if axes[0] == 0 else jnp.stack([x, x]),
        many if axes[1] == 0 else jax.tree.map(lambda a: jnp.stack([a, a]), params),
    )
    close(jax.jit(jax.vmap(both, in_axes=axes))(*given), each(plain_gradients, *fill))


@XLA_FIRST
def test_scan_over_layers(backend: str) -> None:
    x, _ = arrays()
    _, weights = stacked(3)

    def scanned(x: Any, weights: Any) -> Any:
        return jax.lax.scan(lambda h, p: (jnp.tanh(layer(backend)(h, p)), None), x, weights)[0]

    def unrolled(x: Any, weights: Any) -> Any:
        for i in range(3):
            x = jnp.tanh(layer("xla")(x, jax.tree.map(operator.itemgetter(i), weights)))
        return x

    close(jax.jit(scanned)(x, weights), unrolled(x, weights))
    grads = [
        jax.jit(jax.grad(lambda x, w, f=f: jnp.sum(f(x, w) ** 2), argnums=(0, 1)))(x, weights)
        for f in (scanned, unrolled)
    ]
    close(*grads)


@XLA_FIRST
def test_checkpoint(backend: str) -> None:
    x, params = arrays()
    _, plain = plain_gradients(x, params)
    again = jax.jit(jax.grad(jax.checkpoint(loss(backend)), argnums=(0, 1)))(x, params)
    close(again, plain)


@pytest.mark.slow
def test_any_order_of_gradients_and_transformations() -> None:
    """JAX keeps one trace of a jitted program: gradients of other arguments must not disturb what follows."""
    x, params = arrays(seed=1)
    every = (0, 1)

    def gradients(of: Callable, argnums: Any) -> Any:
        return jax.jit(lambda x, p: jax.grad(of, argnums=argnums)(x, p))(x, params)

    want = gradients(loss("xla"), every)
    again = jax.checkpoint(loss("xla"))
    for wrapped, argnums in (
        (loss("xla"), 0),
        (again, 1),
        (again, 0),
        (loss("xla"), 1),
        (jax.checkpoint(jax.jit(loss("xla"))), 0),
    ):
        close(gradients(wrapped, argnums), want[argnums])
    for name in ("root", "weight"):
        only = lambda w, name=name: loss("xla")(x, params | {name: w})  # noqa: E731
        close(jax.grad(jax.checkpoint(only))(params[name]), want[1][name])


def test_checkpoint_saves_only_arguments() -> None:
    """Under `jax.checkpoint` the forward pass keeps only the arguments for the backward pass."""
    x, params = arrays()
    kept = lambda f: sum(a.size for a in jax.tree.leaves(jax.vjp(f, x, params)[1]) if hasattr(a, "size"))  # noqa: E731
    # The arrays of the graph are constants of the function and are saved in both cases.
    assert kept(jax.checkpoint(loss("xla"))) < kept(loss("xla"))


@pytest.mark.parametrize(
    ("backend", "sharded"), slow_but([("xla", "weights")], itertools.product(BACKENDS, ("features", "weights")))
)
@pytest.mark.devices(4)
def test_shard_map(backend: str, sharded: str) -> None:
    """A batch of features, or an ensemble of weights, sharded over four devices; the other arguments are replicated."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("batch",))
    (x, params), (xs, many) = arrays(), stacked(4)
    split, whole = PartitionSpec("batch"), PartitionSpec()
    given, specs = ((xs, params), (split, whole)) if sharded == "features" else ((x, many), (whole, split))

    def local(graph: RelGraph, x: Any, params: Any) -> Any:
        one = lambda x, p: library.rgcn(graph, x, p, options=BACKENDS[backend])  # noqa: E731
        if sharded == "features":
            return one(x[0], params)[None]
        return one(x, jax.tree.map(lambda a: a[0], params))[None]

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(whole, *specs), out_specs=split)

    def total(x: Any, params: Any) -> Any:
        y = mapped(GRAPH, x, params)
        return jnp.sum(jnp.sin(y)), y

    grads, y = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(*given)
    fill = (
        (xs, jax.tree.map(lambda a: jnp.stack([a] * 4), params))
        if sharded == "features"
        else (jnp.stack([x] * 4), many)
    )
    close(y, each(plain_layer, *fill))
    _, alone = each(plain_gradients, *fill)
    # A replicated argument gets the sum of the devices' gradients.
    sum_if = lambda tree, shared: jax.tree.map(lambda a: a.sum(0), tree) if shared else tree  # noqa: E731
    close(grads, (sum_if(alone[0], sharded == "weights"), sum_if(alone[1], sharded == "features")))


@XLA_FIRST
def test_gradients_inside_of_shard_map(backend: str) -> None:
    """Each of two devices has two examples; replicated weights get the sum of the gradients of all four."""
    devices = jax.devices("cpu")[:2]
    if len(devices) < 2:
        pytest.skip("needs two CPU devices, which tests/conftest.py asks XLA for before jax starts")
    split, whole = PartitionSpec("batch"), PartitionSpec()
    (xs, _), (_, params) = stacked(4), arrays()
    one = loss(backend)  # with the graph closed over
    mesh = Mesh(np.array(devices), ("batch",))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(split, whole), out_specs=whole)
    def step(xs: Any, params: Any) -> Any:
        value, gradients = jax.value_and_grad(lambda p: jnp.sum(jax.vmap(one, (0, None))(xs, p)))(params)
        return jax.lax.psum(value, "batch"), gradients

    (values, (_, gradients)) = each(lambda x: plain_gradients(x, params), xs)
    close(step(xs, params), (values.sum(0), jax.tree.map(lambda g: g.sum(0), gradients)))


@pytest.mark.parametrize(
    ("backend", "how"), slow_but([("xla", "vmap")], itertools.product(BACKENDS, ("vmap", "scan", "exact")))
)
def test_stacked_graphs(backend: str, how: str) -> None:
    """Bounded graphs of equal shapes compile once, and vmap and scan go over them: results and gradients."""
    _, params = arrays()
    (xs, _), num_types = stacked(3), GRAPH.num_edge_types
    # The third one has no edge of one type and one long segment.
    lists = [edge_list(seed, 11, 40, num_types, long_segment=20 * (seed == 2), empty=seed - 1) for seed in range(3)]
    graphs = [one.build(bounded=True, long_segment_chunk=LONG_SEGMENT_CHUNK) for one in lists]

    def gradients(graph: RelGraph, x: Any) -> Any:
        total = lambda x, p: jnp.sum(jnp.sin(library.rgcn(graph, x, p, options=BACKENDS[backend])))  # noqa: E731
        return jax.value_and_grad(total, argnums=(0, 1))(x, params)

    one_by_one = jax.jit(gradients)
    want = [one_by_one(graph, x) for graph, x in zip(graphs, xs, strict=True)]
    assert one_by_one._cache_size() == 1  # type: ignore[attr-defined]
    if how == "exact":
        close(want[2], jax.jit(gradients)(lists[2].build(long_segment_chunk=LONG_SEGMENT_CHUNK), xs[2]))
        return
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *graphs), xs
    over = {
        "vmap": jax.vmap(gradients),
        "scan": lambda *batch: jax.lax.scan(lambda _, one: (None, gradients(*one)), None, batch)[1],
    }
    close(jax.jit(over[how])(*batch), jax.tree.map(lambda *leaves: jnp.stack(leaves), *want))


def test_one_compilation_for_equal_graphs() -> None:
    """Two graphs with equal counts share one trace, under the caller's jit and outside of it."""
    x, params = arrays()
    first, second = (GRAPHS["typical"].build(long_segment_chunk=LONG_SEGMENT_CHUNK) for _ in range(2))
    count = 0

    @rgnn.program
    def counted(g: Any, x: Any) -> Any:
        nonlocal count
        count += 1
        return g.mean_to_dst(g.src(x))

    for graph in (first, second, first):
        counted(graph, x)
    assert count == 1
    before = execute._compiled._cache_size()
    for graph in (first, second):
        counted(graph, x)
    assert execute._compiled._cache_size() == before

    traces = 0

    @jax.jit
    def step(graph: RelGraph, x: Any, params: Any) -> Any:
        nonlocal traces
        traces += 1
        return jax.grad(lambda p: jnp.sum(library.rgcn(graph, x, p)))(params)

    for graph in (first, second):
        step(graph, x, params)
    assert traces == 1
    # Other shapes need another trace; repeated shapes do not.
    counted(first, jnp.ones((first.num_nodes, K + 1)))
    counted(second, jnp.ones((first.num_nodes, K + 1)))
    assert count == 2


@XLA_FIRST
def test_gradients_of_some_arguments(backend: str) -> None:
    """The backward pass computes only the requested gradients."""
    x, params = arrays()
    _, everything = plain_gradients(x, params)
    close(jax.jit(jax.grad(loss(backend)))(x, params), everything[0])
    only = jax.jit(jax.grad(lambda w: loss(backend)(x, params | {"weight": w})))(params["weight"])
    close(only, everything[1]["weight"])


def test_symbolic_zeros() -> None:
    """Arguments without a tangent leave no operators in the backward program."""
    x, params = arrays()
    grad = lambda argnums: jax.make_jaxpr(jax.grad(loss("xla"), argnums=argnums))(x, params)  # noqa: E731
    assert len(str(grad(0))) < len(str(grad((0, 1))))
    # A constant feature array, as in every first layer: its gradient is not computed.
    outers = str(jax.make_jaxpr(jax.grad(lambda b: loss("xla")(x, params | {"bias": b})))(params["bias"]))
    assert len(outers) < len(str(grad((0, 1))))


def test_results_without_a_cotangent() -> None:
    @rgnn.program
    def two(g: Any, x: Any) -> Any:
        return g.sum_to_dst(g.src(x)), g.max_to_dst(g.src(x) * g.dst(x)), g.in_degree()

    x, _ = arrays()
    got = jax.grad(lambda x: jnp.sum(two(GRAPH, x)[0] ** 2))(x)
    want = jax.grad(lambda x: jnp.sum(rgnn.program(lambda g, x: g.sum_to_dst(g.src(x)))(GRAPH, x) ** 2))(x)
    close(got, want)


def test_integer_arguments_and_results() -> None:
    @rgnn.program
    def mixed(g: Any, x: Any, n: Any) -> Any:
        return g.sum_to_dst(g.src(x) * g.src(n)), g.sum_to_dst(g.src(n))

    x, _ = arrays()
    n = jnp.arange(x.shape[0], dtype=jnp.int32)
    grads, counts = jax.grad(lambda x: (lambda y, c: (jnp.sum(y**2), c))(*mixed(GRAPH, x[:, 0], n)), has_aux=True)(x)
    assert counts.dtype == jnp.int32 and grads.shape == x.shape
    floats = jax.grad(lambda x: jnp.sum(mixed(GRAPH, x[:, 0], n.astype(jnp.float32))[0] ** 2))(x)
    close(grads, floats)


@XLA_FIRST
def test_second_derivatives(backend: str) -> None:
    """The gradient of a gradient's squared norm, as in a gradient penalty, is that of JAX's own autodiff.

    Also on each of two devices, in a `shard_map` that checks types: zeros did not vary there as their gradients do.
    """
    x, params = arrays()

    def penalty(x: Any, params: Any, options: Options) -> Any:
        inner = jax.grad(lambda x: jnp.sum(jnp.sin(library.rgcn(GRAPH, x, params, options=options))))(x)
        return jnp.sum(inner**2)

    plain = Options(backend="xla", precision="f32", disable=("backward",))
    want = jax.jit(jax.grad(penalty, argnums=(0, 1)), static_argnums=2)(x, params, plain)
    got = jax.jit(jax.grad(penalty, argnums=(0, 1)), static_argnums=2)(x, params, BACKENDS[backend])
    close(got, want, 2e-4)
    if len(devices := jax.devices("cpu")[:2]) < 2:
        return
    split, whole = PartitionSpec("batch"), PartitionSpec()
    on_each = jax.shard_map(
        lambda x, params: penalty(x[0], params, BACKENDS[backend])[None],
        mesh=Mesh(np.array(devices), ("batch",)),
        in_specs=(split, whole),
        out_specs=split,
    )
    twice = jax.jit(jax.grad(lambda x, params: on_each(x, params).sum(), (0, 1)))(jnp.stack([x, x]), params)
    close(twice, (jnp.stack([want[0]] * 2), jax.tree.map(lambda g: 2 * g, want[1])), 2e-4)


def test_forward_mode_is_refused() -> None:
    x, params = arrays()
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: layer("xla")(x, params), (x,), (x,))
