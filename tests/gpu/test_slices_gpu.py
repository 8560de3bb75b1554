"""Calls between slices on a GPU: XLA folds slices into calls, and may forget that their results are aliased."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import rgnn, segment
from dejax.host_gather import DeviceTable, HostTable, gather_done, gather_start, scatter
from dejax.pallas.padding import clear_rows
from tests.minibatch import test_pipeline as pipelines

pytestmark = pytest.mark.gpu

RNG = np.random.default_rng(0)
STEPS, ROWS, WIDTH = 3, 4096, 32
XS = RNG.standard_normal((STEPS, ROWS, WIDTH)).astype(np.float32)  # a slice begins at a multiple of 128 bytes
# Half of all entries are in one segment, so that its parts are merged into rows that another kernel wrote.
RECEIVERS = np.where(RNG.random(20_000) < 0.5, 0, RNG.integers(0, ROWS, 20_000))
SENDERS, TYPES = RNG.integers(0, ROWS, 20_000), RNG.integers(0, 3, 20_000)
PARAMS = {
    "weight": jnp.asarray(RNG.standard_normal((3, 1, WIDTH, WIDTH)) * 0.1, jnp.float32),
    "attention_src": jnp.asarray(RNG.standard_normal((3, 1, WIDTH)) * 0.1, jnp.float32),
    "attention_dst": jnp.asarray(RNG.standard_normal((3, 1, WIDTH)) * 0.1, jnp.float32),
}


def of_segments(x):
    return segment.segment_sum(x[jnp.asarray(SENDERS)], jnp.asarray(RECEIVERS), ROWS)


def of_graph(x):
    graph = rgnn.RelGraph.from_edges(SENDERS, RECEIVERS, TYPES, num_nodes=ROWS, num_edge_types=3)

    def loss(x, params):
        y = rgnn.library.rgat(graph, x, params)
        return (y**2).sum(), y

    (_, y), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, PARAMS)
    return y, gradients


def cleared(x):
    return clear_rows([x], jnp.array([0, 1000]))[0]


@pytest.mark.parametrize("function", [of_segments, of_graph, cleared], ids=lambda f: f.__name__)
def test_a_loop_stacks_what_single_calls_give(function):
    want = jax.tree.map(lambda *some: np.stack(some), *[jax.jit(function)(x) for x in XS])
    found = jax.jit(lambda xs: jax.lax.scan(lambda c, x: (c, function(x)), 0.0, xs)[1])(XS)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


def test_a_loop_stacks_what_passes_through_a_start():
    def run(table, xs):
        def step(total, x):
            pending, passed = gather_start(table, jnp.arange(100), before=x)
            return total + gather_done(pending).sum(), passed

        return jax.lax.scan(step, 0.0, xs)

    total, passed = jax.jit(run)(HostTable.from_numpy(XS[0]), XS)
    np.testing.assert_array_equal(passed, XS)
    np.testing.assert_allclose(total, STEPS * XS[0, :100].sum(), rtol=1e-5)


def test_a_loop_stacks_a_table_that_it_writes():
    table = DeviceTable.from_numpy(XS[0], writable=True)

    def step(table, x):
        table = scatter(table, jnp.arange(0, ROWS, 2), x[::2])
        return table, table.words

    last, found = jax.jit(lambda table, xs: jax.lax.scan(step, table, xs))(table, XS)
    want = np.repeat(XS[:1], STEPS, 0)
    want[:, ::2] = XS[:, ::2]
    np.testing.assert_array_equal(np.asarray(found).view(np.float32).reshape(want.shape), want)
    np.testing.assert_array_equal(last.numpy(), want[-1])


def test_a_loop_writes_tables_of_a_stack():
    """Each slice of a stack is a table: the stack itself stays as it is."""
    spec = DeviceTable.from_numpy(XS[0], writable=True).spec
    stack = jnp.asarray(XS.view(np.uint32))

    def step(total, words):
        written = scatter(DeviceTable(words, spec), jnp.arange(0, ROWS, 2), jnp.ones((ROWS // 2, WIDTH)))
        return total, written.words

    _, found = jax.jit(lambda stack: jax.lax.scan(step, 0.0, stack))(stack)
    want = XS.copy()
    want[:, ::2] = 1.0
    np.testing.assert_array_equal(np.asarray(found).view(np.float32), want)
    np.testing.assert_array_equal(np.asarray(stack).view(np.float32), XS)


@pytest.mark.parametrize("drawn, steps", [(pipelines.plain, 1), (pipelines.in_time, 3), (pipelines.links, 3)])
def test_pipelined_steps_stack_whole_batches(drawn, steps):
    pipelines.test_edges_that_are_read_ahead_give_the_same_samples(drawn, steps)
