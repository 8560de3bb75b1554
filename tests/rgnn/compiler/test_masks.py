"""Scores of -inf, as from masks, and of +inf and NaN: softmax and maximum against a reference with a row per edge."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import rgnn
from dejax.rgnn.passes import PASSES
from tests.cases import slow_but
from tests.rgnn.references import GRAPHS
from tests.rgnn.strategies import CHUNK

BACKENDS = {
    "xla": rgnn.Options(backend="xla"),
    "xla_without_passes": rgnn.Options(backend="xla", disable=PASSES),
    "xla_without_backward": rgnn.Options(backend="xla", disable=("backward",)),
    "xla_without_softmax": rgnn.Options(backend="xla", disable=("softmax",)),
    "pallas": rgnn.Options(backend="pallas", precision="f32", interpret=True),
    "pallas_without_shared_scalars": rgnn.Options(
        backend="pallas", precision="f32", interpret=True, disable=("share_scalars", "hoist")
    ),
}
EDGES = GRAPHS["long_segments"]
DESTINATION = {"dst": EDGES.receivers, "relation": EDGES.receivers * EDGES.num_edge_types + EDGES.edge_type}


def attention(g: Any, s: Any, x: Any, within: str) -> tuple:
    """The softmax, a sum weighted by it, and the maximum score."""
    score = g.edge(s)
    share = rgnn.edge_softmax(score, within)
    z = g.src(x)
    wide = share[..., None] if score.shape == (2,) else share
    return g.sum_to_dst(wide * z), share, g.max_to_dst(score)


@partial(jax.jit, static_argnames="within")
def reference(s: Any, x: Any, within: str) -> tuple:
    group, nodes = DESTINATION[within], EDGES.num_nodes
    groups = int(group.max()) + 1
    largest = jax.ops.segment_max(jax.lax.stop_gradient(s), group, groups)
    e = jnp.exp(s - jnp.where(largest == -jnp.inf, 0, largest)[group])
    total = jax.ops.segment_sum(e, group, groups)
    share = e / jnp.where(total == 0, 1, total)[group]
    wide = share.reshape(*share.shape, *(1,) * (3 - share.ndim))
    top = jax.ops.segment_max(s, EDGES.receivers, nodes)
    top = jnp.where(top == -jnp.inf, 0, top)
    return jax.ops.segment_sum(wide * x[EDGES.senders], EDGES.receivers, nodes), share, top


def arrays(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores, all -inf at some nodes and in some relations of other nodes; features; a mask."""
    rng = np.random.default_rng(3)
    s = rng.normal(size=(len(EDGES.senders), *shape))
    s[(EDGES.receivers % 3 == 1) | ((EDGES.receivers % 3 == 2) & (EDGES.edge_type == 0))] = -np.inf
    s[rng.random(len(s)) < 0.2] = -np.inf
    s[EDGES.receivers == 0, ...] = -np.inf  # a long segment, except for a few edges
    s[np.flatnonzero(EDGES.receivers == 0)[-2:]] = 0.7
    return s, rng.normal(size=(EDGES.num_nodes, 2, 3)), np.isfinite(s)


@pytest.mark.parametrize(
    ("backend", "within", "shape"),
    slow_but(
        [("xla", "relation", (2, 3))],
        itertools.product(BACKENDS, DESTINATION, [(), (2,), (2, 1), (2, 3)]),
    ),
)
def test_masked_scores(backend: str, within: str, shape: tuple[int, ...]) -> None:
    """The softmax of -inf is 0. Where all scores are -inf, softmax, gradient and maximum are 0."""
    s, x, finite = arrays(shape)
    graph, options = EDGES.build(long_segment_chunk=CHUNK), BACKENDS[backend]
    program = rgnn.program(lambda g, s, x: attention(g, s, x, within))

    def loss(results: tuple) -> Any:
        return sum((jnp.sin(1.3 * y + 0.5) ** 2).sum() for y in results)

    with jax.enable_x64(True):
        want = reference(s, x, within)
        slopes = jax.jit(jax.grad(lambda s, x: loss(reference(s, x, within)), (0, 1)))(s, x)

    def run(s: Any, x: Any) -> tuple:
        results = program(graph, s, x, options=options)
        return loss(results), results

    found, results = jax.jit(jax.grad(run, (0, 1), has_aux=True))(jnp.asarray(s, "float32"), jnp.asarray(x, "float32"))
    alone = program(graph, jnp.asarray(s, "float32"), jnp.asarray(x, "float32"), options=options)
    for got, without_gradients, expected in zip(results, alone, want, strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5)
        np.testing.assert_allclose(without_gradients, expected, atol=2e-5)
    assert np.all(np.asarray(results[1])[~finite] == 0)
    np.testing.assert_allclose(found[1], slopes[1], atol=1e-4)
    np.testing.assert_allclose(np.asarray(found[0])[finite], np.asarray(slopes[0])[finite], atol=1e-4)
    assert np.all(np.asarray(found[0])[~finite] == 0)


@pytest.mark.parametrize(
    ("backend", "dtype"), slow_but([("xla", "float16")], itertools.product(("xla", "pallas"), ("float16", "bfloat16")))
)
def test_masks_in_16_bits(backend: str, dtype: str) -> None:
    """A mask as a bias of 0 or -inf gives the same as `where_positive`."""
    s, x, finite = arrays((2,))
    graph, options = EDGES.build(long_segment_chunk=CHUNK), BACKENDS[backend]
    ready = [jnp.asarray(a, dtype) for a in (np.where(finite, s, 0.3), x, np.where(finite, 0, -np.inf), finite)]
    biased = rgnn.program(lambda g, s, x, b, m: attention(g, g.edge(s) + g.edge(b), x, "dst"))
    chosen = rgnn.program(
        lambda g, s, x, b, m: attention(g, rgnn.where_positive(g.edge(m), g.edge(s), -np.inf), x, "dst")
    )

    for program in (biased, chosen):

        def run(s: Any, x: Any, program: rgnn.Program = program) -> tuple:
            results = program(graph, s, x, *ready[2:], options=options)
            return sum((y.astype(jnp.float32) ** 2).sum() for y in results[:2]), results

        slopes, results = jax.jit(jax.grad(run, (0, 1), has_aux=True))(*ready[:2])
        for y, want in zip(results, reference(s, x, "dst"), strict=True):
            np.testing.assert_allclose(np.asarray(y, np.float32), want, atol=3e-2)
        for slope in slopes:
            assert np.isfinite(np.asarray(slope, np.float32)).all() and slope.dtype == dtype


@pytest.mark.parametrize(
    ("backend", "bad"),
    slow_but([("xla", np.inf)], itertools.product(("xla", "xla_without_passes", "pallas"), (np.inf, np.nan))),
)
def test_infinite_and_nan_scores(backend: str, bad: float) -> None:
    """+inf or NaN gives NaN at its destination, as in `jax.nn.softmax`, and at no other."""
    s, x, _ = arrays(())
    at = int(np.flatnonzero(EDGES.receivers == EDGES.receivers[np.isfinite(s)][0])[0])
    s[at] = bad
    program = rgnn.program(lambda g, s, x: attention(g, s, x, "dst"))
    _, share, _ = program(
        EDGES.build(long_segment_chunk=CHUNK), jnp.asarray(s), jnp.asarray(x), options=BACKENDS[backend]
    )
    np.testing.assert_array_equal(np.isnan(share), EDGES.receivers == EDGES.receivers[at])


@pytest.mark.slow
def test_a_masked_feature_in_a_row_scaled_float16_row() -> None:
    """Wide rows are stored as row-scaled float16: a feature of -inf must not change the scale of the others."""
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(EDGES.num_nodes, 16)), "float32")
    mask = jnp.asarray(rng.random(x.shape) < 0.6, "float32")

    @rgnn.program
    def layer(g: Any, x: Any, mask: Any) -> tuple:
        score = g.src(rgnn.where_positive(g.node(mask), rgnn.tanh(g.node(x)), -np.inf))
        return g.sum_to_dst(rgnn.edge_softmax(score) * g.src(x)), g.max_to_dst(score)

    graph = EDGES.build()
    found = layer(graph, x, mask, options=rgnn.Options(backend="pallas", interpret=True))
    for y, want in zip(found, layer(graph, x, mask, options=BACKENDS["xla"]), strict=True):
        np.testing.assert_allclose(y, want, atol=5e-3)
