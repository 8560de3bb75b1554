"""Arrays that programs close over, programs in programs, and programs that are copied and pickled."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import rgnn
from dejax.rgnn import Options, library
from tests.cases import slow_but
from tests.rgnn.compiler import programs_to_pickle
from tests.rgnn.references import graph_of

GRAPH = graph_of("typical")
N, E = GRAPH.num_nodes, GRAPH.num_edges
SENDERS, RECEIVERS, KINDS = (np.asarray(a) for a in GRAPH.to_edges())
X = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)
BACKENDS = {"xla": Options(backend="xla"), "pallas": Options(backend="pallas", interpret=True, precision="f32")}


def summed(rows: np.ndarray) -> np.ndarray:
    out = np.zeros((N, *rows.shape[1:]), rows.dtype)
    np.add.at(out, RECEIVERS, rows)
    return out


# --- arrays that a program closes over -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("library", "backend"), slow_but([(np, "xla"), (jnp, "pallas")], itertools.product((np, jnp), BACKENDS))
)
def test_arrays_are_constants(library: Any, backend: str) -> None:
    w, c, e = library.asarray(W), library.asarray([1.0, -2.0, 0.5]), library.asarray(np.arange(E, dtype=np.float32))
    ids = library.asarray(np.arange(N) % 3)

    @rgnn.program
    def layer(g: Any, x: Any) -> Any:
        y = (g.src(x) * c + library.float32(1.0)) @ w
        return g.sum_to_dst(y * g.edge(e)), g.shared(c)[g.node(ids)], g.node(x) @ c, rgnn.where(g.node(x) > 0, c, 0.0)

    got = layer(GRAPH, jnp.asarray(X), options=BACKENDS[backend])
    rows = (X[SENDERS] * np.asarray(c) + 1.0) @ W * np.arange(E, dtype=np.float32)[:, None]
    want = (summed(rows), np.asarray(c)[np.arange(N) % 3], X @ np.asarray(c), np.where(X > 0, np.asarray(c), 0.0))
    for g, w_ in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w_, rtol=2e-5, atol=1e-4)
    # 64-bit arrays are converted as in jax, and an array may be read in two spaces.
    double = rgnn.program(lambda g, x: g.src(X.astype(np.float64)) * g.edge(x))
    assert double(GRAPH, jnp.ones((E, 3))).dtype == jnp.float32
    square = np.ones((N, N), np.float32)
    both = rgnn.program(lambda g, x: g.node(square) @ g.shared(square) + g.node(x)[0] * np.ones(N))
    np.testing.assert_allclose(both(GRAPH, jnp.zeros((N, 1))), np.full((N, N), N))


def test_an_array_that_changes_is_read_again() -> None:
    """Unlike in a function of jax.jit, which keeps the first value."""
    scale = {"by": np.full(3, 2.0, np.float32)}
    program = rgnn.program(lambda g, x: g.node(x) * scale["by"])
    np.testing.assert_allclose(program(GRAPH, X), X * 2)
    scale["by"] = np.full(3, 5.0, np.float32)
    np.testing.assert_allclose(program(GRAPH, X), X * 5)
    scale["by"][:] = 7.0  # in place
    np.testing.assert_allclose(program(GRAPH, X), X * 7)


def test_gradients_of_closed_over_arrays() -> None:
    """Also of a program that was called before with a concrete array."""
    held = {"w": jnp.asarray(W)}
    program = rgnn.program(lambda g, x: g.sum_to_dst(g.src(x) @ g.shared(held["w"])))
    before = program(GRAPH, X)

    def loss(w: Any) -> Any:
        held["w"] = w
        return (program(GRAPH, X) ** 2).sum()

    want = jax.grad(lambda w: ((jnp.zeros((N, 4)).at[RECEIVERS].add(X[SENDERS] @ w)) ** 2).sum())(jnp.asarray(W))
    for grad in (jax.grad(loss), jax.jit(jax.grad(loss))):
        np.testing.assert_allclose(grad(jnp.asarray(W)), want, rtol=1e-4)
    held["w"] = jnp.asarray(W)
    np.testing.assert_allclose(program(GRAPH, X), before)


def test_programs_that_close_over_arrays_compile_once() -> None:
    c = np.ones(3, np.float32)
    program = rgnn.program(lambda g, x: g.node(x) * c)
    first, second = (program._prepare(GRAPH, None, (X,), {})[0] for _ in range(2))
    assert first == second and hash(first) == hash(second)


def test_a_traced_scalar() -> None:
    program = rgnn.program(lambda g, x, alpha: g.node(x) * alpha)
    np.testing.assert_allclose(program(GRAPH, X, 2.0), 2 * X)
    for run in (jax.jit(lambda a: program(GRAPH, X, a)), jax.grad(lambda a: program(GRAPH, X, a).sum())):
        with pytest.raises(rgnn.ProgramError, match=r"argument 'alpha' is a scalar array.*write g\.shared\(x\)"):
            run(2.0)
    shared = rgnn.program(lambda g, x, alpha: g.node(x) * g.shared(alpha))
    np.testing.assert_allclose(jax.jit(lambda a: shared(GRAPH, X, a))(2.0), 2 * X)
    np.testing.assert_allclose(jax.grad(lambda a: shared(GRAPH, X, a).sum())(2.0), X.sum(), rtol=1e-5)


# --- programs in programs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["xla", pytest.param("pallas", marks=pytest.mark.slow)])
def test_programs_call_programs(backend: str) -> None:
    @rgnn.program
    def mean(g: Any, x: Any) -> Any:
        return g.mean_to_dst(g.src(x))

    @rgnn.program(backend="xla")
    def twice(g: Any, x: Any, *, scale: float = 1.0) -> Any:
        return mean(g, mean(g, g.node(x) * scale))  # of a value that is not an argument

    @rgnn.program
    def outer(g: Any, x: Any, params: Any) -> Any:
        return twice(g, x, scale=2.0), library.rgcn(g, x, params), mean(g, x)

    params = {"weight": jnp.ones((GRAPH.num_edge_types, 3, 4)) * 0.1}
    options = BACKENDS[backend]
    run = lambda x: outer(GRAPH, x, params, options=options)  # noqa: E731
    separate = lambda x: (  # noqa: E731
        mean(GRAPH, mean(GRAPH, 2.0 * x)),
        library.rgcn(GRAPH, x, params, options=options),
        mean(GRAPH, x),
    )
    for got, want in zip(run(jnp.asarray(X)), separate(jnp.asarray(X)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)
    loss = lambda f: jax.grad(lambda x: sum((y**2).sum() for y in f(x)))(jnp.asarray(X))  # noqa: E731
    np.testing.assert_allclose(loss(run), loss(separate), rtol=1e-3, atol=1e-4)


def test_an_error_in_an_inner_program_names_its_line() -> None:
    inner = rgnn.program(lambda g, x: g.sum_to_dst(g.node(x)))  # the line at fault
    with pytest.raises(rgnn.ProgramError, match="# the line at fault"):
        rgnn.program(lambda g, x: inner(g, x))(GRAPH, X)


# --- pickling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program",
    [
        programs_to_pickle.decorated,
        programs_to_pickle.decorated.with_options(backend="xla", disable=("fold",)),
        programs_to_pickle.wrapped,
        programs_to_pickle.Holder.method,
        library.rgat,
    ],
)
def test_programs_are_pickled(program: rgnn.Program) -> None:
    if program is not library.rgat:
        program(GRAPH, X)  # fills its caches, which cannot be pickled
    for other in (pickle.loads(pickle.dumps(program)), copy.deepcopy(program), copy.copy(program)):
        assert isinstance(other, rgnn.Program) and other.options == program.options
        assert other.function is program.function and repr(other) == repr(program)
        if program is not library.rgat:
            np.testing.assert_array_equal(other(GRAPH, X), program(GRAPH, X))


@pytest.mark.slow
def test_a_new_process_unpickles_programs() -> None:
    program = programs_to_pickle.decorated.with_options(backend="xla")
    sent = pickle.dumps({"layer": program, "options": program.options, "scale": functools.partial(program, GRAPH)})
    code = (
        "import pickle, sys, jax.numpy as jnp; held = pickle.loads(sys.stdin.buffer.read()); "
        f"print(held['options'].backend, held['scale'](jnp.ones(({N}, 1))).sum())"
    )
    found = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True, timeout=120)
    assert found.stdout.decode().split() == ["xla", str(float(E))]


def test_local_functions_are_copied_and_not_pickled() -> None:
    program = rgnn.program(lambda g, x: g.node(x) * 2.0)
    np.testing.assert_array_equal(copy.deepcopy({"layer": program})["layer"](GRAPH, X), 2 * X)
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(program)


def test_partial_functions() -> None:
    def scaled(factor: float, g: Any, x: Any) -> Any:
        return g.node(x) * factor

    program = rgnn.program(functools.partial(scaled, 3.0))
    np.testing.assert_array_equal(program(GRAPH, X), 3 * X)
    np.testing.assert_array_equal(copy.deepcopy(program)(GRAPH, X), 3 * X)


@pytest.mark.parametrize("name", slow_but(["layer"], ["layer", "with options", "of a program", "linen"]))
def test_modules_are_pickled(name: str) -> None:
    from flax import nnx

    from dejax.rgnn import linen
    from dejax.rgnn import nnx as modules

    types, x, rngs = GRAPH.num_edge_types, jnp.asarray(X), nnx.Rngs(0)
    if name == "linen":
        layer = linen.RGCNConv(4, types, options=Options(backend="xla"))
        params = layer.init(jax.random.key(0), GRAPH, x)
        other, held = pickle.loads(pickle.dumps((layer, params)))
        np.testing.assert_array_equal(other.apply(held, GRAPH, x), layer.apply(params, GRAPH, x))
        return
    if name == "of a program":
        shapes = {"weight": ((types, 3, 4), nnx.initializers.lecun_normal())}
        module: Any = modules.ProgramModule(programs_to_pickle.typed, shapes, rngs=rngs)
    else:
        held = {} if name == "layer" else {"options": Options(backend="xla", disable=("cse",))}
        module = modules.RGATConv(3, 4, types, num_heads=2, rngs=rngs, **held)
    want = module(GRAPH, x)
    for other in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        np.testing.assert_array_equal(other(GRAPH, x), want)
