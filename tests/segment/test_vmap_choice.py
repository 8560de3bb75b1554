"""Without a plan, unsorted ids take XLA's scatter or a sort and a kernel, whichever is faster for the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dejax import segment
from dejax.segment import _cost, _request
from tests.described import H200

BATCH, ENTRIES, SEGMENTS, WIDTH = 3, 12, 5, 2
IDS = np.random.default_rng(0).integers(-1, SEGMENTS + 1, (2, BATCH, ENTRIES)).astype(np.int32)
DATA = np.random.default_rng(1).normal(size=(2, BATCH, ENTRIES, WIDTH)).astype(np.float32)


def ways(function, *arguments):
    """The primitives of reductions in a function that is traced for an H200."""
    with jax.sharding.use_abstract_mesh(H200):
        text = str(jax.make_jaxpr(function)(*arguments))
    return {way for way in ("scatter", "reduce") if f"dejax_segment_{way}[" in text}


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_the_batch_decides():
    """The shapes of jax's issues 39959 and 17844."""

    def summed(segments):
        return lambda data, ids: segment.segment_sum(data, ids, segments)

    large, ids = array(1024, 48_492), array(48_492, dtype=jnp.int32)
    assert ways(summed(12_123), array(48_492), ids) == {"scatter"}
    assert ways(jax.vmap(summed(12_123), (0, None)), large, ids) == {"reduce"}
    assert ways(jax.vmap(summed(4096), (0, None)), array(100, 16_384), array(16_384, dtype=jnp.int32)) == {"scatter"}
    wide, own = array(64, 48_492, 64), array(64, 48_492, dtype=jnp.int32)
    assert ways(jax.vmap(summed(12_123)), wide, own) == {"reduce"}
    # More ids than one kernel or scatter takes: a scatter by XLA's own rule.
    assert ways(jax.vmap(summed(2**20)), array(4096, 8), array(4096, 8, dtype=jnp.int32)) == set()


def test_the_batch_decides_for_gradients_and_nested_batches():
    def loss(data, ids):
        return (segment.segment_sum(data, ids, 12_123) ** 2).sum()

    large, ids = array(1024, 48_492), array(48_492, dtype=jnp.int32)
    assert ways(jax.vmap(jax.grad(loss), (0, None)), large, ids) == {"reduce"}
    nested = jax.vmap(jax.vmap(loss, (0, None)), (0, None))
    assert ways(nested, array(256, 4, 48_492), ids) == {"reduce"}


@pytest.fixture(params=["scatter", "kernel"])
def small_batches(request, monkeypatch):
    """Kernels are interpreted; one example is scattered, and a batch as the parameter says."""
    most = {"scatter": 2**31, "kernel": ENTRIES * WIDTH}[request.param]
    monkeypatch.setattr(_request, "place", lambda backend, *sizes: (True, True))
    monkeypatch.setattr(
        _cost, "scatter_pays", lambda shape, *_, **__: shape.examples * shape.entries * shape.width <= most
    )
    return request.param


def reference(kind, data, ids):
    out = np.full((SEGMENTS, WIDTH), {"sum": 0.0, "max": -np.inf}[kind])
    for row, number in zip(data, ids, strict=True):
        if 0 <= number < SEGMENTS:
            out[number] = (out[number] + row) if kind == "sum" else np.maximum(out[number], row)
    return out


@pytest.mark.parametrize("kind", ["sum", "max"])
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (1, 0)])
def test_batches(small_batches, kind, axes):
    data, ids = (DATA[0] if axes[0] is not None else DATA[0, 0]), (IDS[0] if axes[1] is not None else IDS[0, 0])
    operator = getattr(segment, f"segment_{kind}")
    given = np.moveaxis(data, 0, 1) if axes[0] == 1 else data
    found = jax.jit(jax.vmap(lambda d, i: operator(d, i, SEGMENTS), axes))(given, ids)
    want = [
        reference(kind, data[n] if axes[0] is not None else data, ids[n] if axes[1] is not None else ids)
        for n in range(BATCH)
    ]
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


def test_gradients_of_batches(small_batches):
    def loss(data, ids):
        return (segment.segment_sum(data, ids, SEGMENTS) ** 3).sum() + segment.segment_max(
            data, ids, SEGMENTS, empty=0
        ).sum()

    def plain(data, ids):
        ids = jnp.where(ids >= 0, ids, SEGMENTS)
        top = jax.ops.segment_max(data, ids, SEGMENTS)
        return (jax.ops.segment_sum(data, ids, SEGMENTS) ** 3).sum() + jnp.where(jnp.isfinite(top), top, 0).sum()

    for derivative in (jax.grad, lambda f: jax.jacfwd(jax.grad(f))):
        found, want = (jax.jit(jax.vmap(derivative(f)))(DATA[0], IDS[0]) for f in (loss, plain))
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


def test_nested_batches_in_a_loop(small_batches):
    summed = jax.vmap(jax.vmap(lambda d, i: segment.segment_mean(d, i, SEGMENTS)))
    _, found = jax.lax.scan(lambda carry, d: (carry, summed(d, IDS)), 0, np.stack([DATA, 2 * DATA]))
    for a in range(2):
        for b in range(BATCH):
            count = np.maximum(np.bincount(IDS[a, b][(IDS[a, b] >= 0) & (IDS[a, b] < SEGMENTS)], minlength=SEGMENTS), 1)
            want = reference("sum", DATA[a, b], IDS[a, b]) / count[:, None]
            np.testing.assert_allclose(found[:, a, b], [want, 2 * want], rtol=1e-5, atol=1e-6)


def test_a_batch_of_each_device(small_batches):
    summed = jax.vmap(lambda d, i: segment.segment_sum(d, i, SEGMENTS))
    mesh, spec = jax.sharding.Mesh(jax.devices()[:1], ("x",)), PartitionSpec("x")
    mapped = jax.shard_map(summed, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    found = jax.jit(mapped)(DATA[0], IDS[0])
    np.testing.assert_allclose(found, list(map(reference, ["sum"] * BATCH, DATA[0], IDS[0])), rtol=1e-5, atol=1e-6)


def test_export(small_batches):
    pytest.importorskip("flatbuffers")
    from jax import export

    summed = jax.jit(jax.vmap(lambda d, i: segment.segment_sum(d, i, SEGMENTS)))
    stored = export.export(summed)(DATA[0], IDS[0]).serialize()
    found = export.deserialize(stored).call(DATA[0], IDS[0])
    np.testing.assert_allclose(found, list(map(reference, ["sum"] * BATCH, DATA[0], IDS[0])), rtol=1e-5, atol=1e-6)
