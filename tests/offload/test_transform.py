"""`offload` computes what the function computes under every transformation, or raises while tracing."""

import functools

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from dejax.offload import ActivationStore, offload, region
from tests.cases import slow_but
from tests.offload.layers import (
    LAYERS,
    TENSOR,
    assert_same_bits,
    layer,
    loss_of,
    offloaded,
    operands,
    step,
)


@pytest.fixture
def store():
    with ActivationStore() as store:
        yield store


REFERENCES = [("all", "plain"), ("inputs", "checkpoint")]
QUICK = [(jnp.float32, "all", "plain", False), (jnp.bfloat16, "inputs", "checkpoint", True)]
PRODUCT = [
    (dtype, *pair, scan) for dtype in (jnp.float32, jnp.bfloat16) for pair in REFERENCES for scan in (True, False)
]


@pytest.mark.parametrize(
    ("dtype", "kind", "reference", "scan"),
    slow_but(QUICK, PRODUCT),
)
def test_gradients_have_the_same_bits(store, dtype, kind, reference, scan):
    ws, x = operands(dtype)
    for _ in range(2):
        assert_same_bits(step(kind, scan)(ws, x), step(reference, scan)(ws, x))
    stats = store.stats()
    assert stats.stored_count == stats.fetched_count and stats.live_count == 0
    if kind == "inputs":
        assert stats.stored_bytes == 2 * LAYERS * x.nbytes  # the inputs, no parameter


@pytest.mark.slow
@pytest.mark.parametrize(
    "inner", [pytest.param(lambda f: f, marks=pytest.mark.slow), jax.checkpoint], ids=["residuals", "inputs"]
)
def test_store_device_gives_the_same_bits(store, inner):
    ws, x = operands(jnp.bfloat16)
    cut = jax.jit(jax.grad(loss_of(offload(inner(layer), store="device", min_bytes=1)), argnums=(0, 1)))(ws, x)
    assert store.stats().stored_count == 0
    assert_same_bits(step("inputs" if inner is jax.checkpoint else "all")(ws, x), cut)
    with pytest.raises(ValueError, match="must be an ActivationStore, 'device' or None, got 'disc'"):
        offload(layer, store="disc")(ws[0], x)


def test_masks_are_stored(store):
    w, x = operands()[0][0], operands()[1]

    def fn(w, x):
        y = x @ w
        return jnp.where(y > 0, y, 0.1 * y)

    def gradient(body):
        return jax.jit(jax.grad(lambda w, x: (body(w, x) ** 2).sum(), argnums=(0, 1)))

    got = gradient(offload(fn, min_bytes=1))
    assert_same_bits(got(w, x), gradient(fn)(w, x))


def test_a_value_alone_stores_nothing(store):
    ws, x = operands()
    jax.block_until_ready(jax.jit(loss_of(offloaded))(ws, x))
    assert store.stats().stored_count == 0


@pytest.mark.slow
def test_accumulation_and_loops(store):
    ws, x = operands()
    xs = jnp.stack([x, 2 * x, 3 * x])

    def accumulate(body):
        grad = jax.grad(loss_of(body))

        def run(ws, xs):
            return jax.lax.scan(lambda total, x: (total + grad(ws, x), None), jnp.zeros_like(ws), xs)[0]

        return jax.jit(run)

    want = accumulate(layer)(ws, xs)
    for _ in range(2):
        assert_same_bits(accumulate(offloaded)(ws, xs), want)
    stats = store.stats()
    assert stats.live_count == 0 and stats.peak_live_bytes < 4 * 16 * TENSOR


def test_loop_invariant_tensors_survive_a_first_run_short_of_memory(tmp_path):
    ws, x = operands()
    table = jnp.cos(x)

    def gradient(body):
        def loss(ws, x, table):
            return (jax.lax.scan(lambda c, w: (body(w, c, table), None), x, ws)[0] ** 2).sum()

        return jax.jit(jax.grad(loss))

    def body(w, x, table):  # the sine and cosine of the table are stored before the loop, and fetched in each turn
        return x + jnp.sin(x @ w) * jnp.sin(table)

    want = gradient(body)(ws, x, table)
    got = gradient(offload(body, min_bytes=1))
    for device_bytes in (0, 2 * TENSOR, None):  # of a GPU's ring: without one, one for a few tensors, one for all
        with ActivationStore(tmp_path, device_bytes=device_bytes, host_bytes=4 * TENSOR, chunk_bytes=4096) as store:
            for _ in range(4):
                np.testing.assert_allclose(got(ws, x, table), want, rtol=1e-4, atol=1e-3)
            stats = store.stats()
        assert stats.fetched_count > stats.stored_count and (stats.read_bytes > 0 or device_bytes is None)


@pytest.mark.slow
def test_vmap_stores_unbatched_tensors_once(store):
    ws, x = operands()
    xs, signs = jnp.stack([x, 2 * x, 3 * x]), jnp.array([1.0, -1.0, 0.5])

    def loss(f):
        return lambda w, x, sign: (f(w, x, jnp.arange(x.size).reshape(x.shape) % 3) * sign).sum()

    def f(w, x, mask):
        return jnp.where(mask == 0, jnp.sin(x) @ jnp.cos(w), x)

    everything = offload(f, inputs="all", min_bytes=1)
    # Sine and cosine of each, and the mask.
    for axes, stored in ((None, None, 0), 5), ((None, 0, None), 9), ((0, 0, 0), 13):
        operands_now = [leaf if axis == 0 else leaf[0] for leaf, axis in zip((ws[:3], xs, signs), axes, strict=True)]

        def of_each(f, axes=axes):
            return jax.vmap(jax.grad(loss(f), (0, 1)), axes)

        def of_all(f, axes=axes):
            return jax.grad(lambda *args: jax.vmap(loss(f), axes)(*args).sum(), (0, 1))

        for grad in of_each, of_all:
            before = store.stats()
            got = jax.jit(grad(everything))(*operands_now)
            for a, b in zip(got, jax.jit(grad(f))(*operands_now), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
            after = store.stats()
            counts = after.stored_count - before.stored_count, after.fetched_count - before.fetched_count
            assert counts == (stored, stored), axes


@pytest.mark.devices(4)
def test_shard_map(store):
    ws, x = operands()
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def gradient(body):
        @jax.jit
        @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        def run(ws, x):
            return jax.lax.pmean(jax.grad(loss_of(body))(ws, x), "data")

        return run

    want = gradient(layer)(ws, x)
    got = gradient(offloaded)
    for _ in range(3):
        assert_same_bits(got(ws, x), want)
    # No parameter is stored, though shard_map makes each one vary between the devices.
    assert store.stats().stored_bytes <= 3 * LAYERS * 7 * x.nbytes


def test_cond_and_closures_and_static_arguments(store):
    ws, x = operands()

    def through(wrap):
        def fn(name, x):
            return {"sin": jnp.sin, "cos": jnp.cos}[name](x @ ws[0]) @ ws[0].T  # closes over an array

        body = wrap(fn)

        def loss(x):
            return jax.lax.cond(x.sum() > 0, lambda: body("sin", x).sum(), lambda: body("cos", 2 * x).sum())

        return jax.jit(jax.grad(loss))

    want = through(lambda fn: fn)(x)
    got = through(lambda fn: offload(fn, min_bytes=1, static_argnums=0))(x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_closed_over_tracers_get_gradients(store):
    ws, x = operands()

    def loss(wrap, ws):
        body = wrap(lambda c: layer(ws[0], c))
        return (jax.lax.scan(lambda c, _: (body(c), None), x, None, length=3)[0] ** 2).sum()

    want = jax.jit(jax.grad(functools.partial(loss, lambda fn: fn)))(ws)
    got = jax.jit(jax.grad(functools.partial(loss, lambda fn: offload(fn, min_bytes=1))))(ws)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_donated_inputs(store):
    ws, x = operands()
    update = jax.jit(lambda ws, x: ws - 0.1 * jax.grad(loss_of(offloaded))(ws, x), donate_argnums=0)
    want = ws - 0.1 * step("plain")(ws, x)[0]
    np.testing.assert_allclose(update(ws + 0, x), want, rtol=1e-6, atol=1e-7)


def test_backward_in_another_jit_and_twice(store):
    ws, x = operands()
    want = step("plain")(ws, x)
    _, vjp = jax.jit(lambda ws, x: jax.vjp(loss_of(offloaded), ws, x))(ws, x)
    backward = jax.jit(lambda vjp, ct: vjp(ct))
    assert_same_bits(backward(vjp, jnp.float32(1)), want)
    assert store.stats().live_count == 0
    assert_same_bits(backward(vjp, jnp.float32(1)), want)


def test_two_backward_passes_in_one_program(store):
    ws, x = operands()

    def both(ws, x):
        _, vjp = jax.vjp(loss_of(offloaded), ws, x)
        return vjp(jnp.float32(1)), vjp(jnp.float32(2))

    for _ in range(4):
        one, two = jax.jit(both)(ws, x)
        assert_same_bits(one, step("plain")(ws, x))
        np.testing.assert_allclose(two[0], 2 * one[0], rtol=1e-6)


def test_bad_arguments():
    x = jnp.ones((4, 4))
    with pytest.raises(
        ValueError, match="`inputs` must be 'auto', 'all', 'none' or positions of arguments, got 'some'"
    ):
        offload(jnp.sin, inputs="some")(x)
    with pytest.raises(ValueError, match="`inputs` must be positions of the 1 arguments, got 3"):
        offload(jnp.sin, inputs=3)(x)
    with pytest.raises(ValueError, match=r"policy=\['act'\]"):
        offload(jnp.sin, policy="act")
    with pytest.raises(TypeError, match="static_argnums"):
        offload(lambda name, x: x)("sin", x)


def test_policies_of_checkpoint_and_unknown_names(store):
    """JAX's policies have other arguments, and a name that no tensor has would store nothing: both are errors."""
    x, policies = jnp.ones((4, 4)), jax.checkpoint_policies
    offloads = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["act"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    for policy in (
        policies.save_only_these_names("act"),
        policies.save_any_names_but_these("act"),
        policies.everything_saveable,
        policies.nothing_saveable,
        policies.dots_saveable,
        policies.dots_with_no_batch_dims_saveable,
        policies.save_from_both_policies(policies.dots_saveable, offloads),
        policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
        offloads,
        functools.partial(policies.everything_saveable),
    ):
        for wrap in offload, region:
            with pytest.raises(TypeError, match=r"policy=\['name'\].*offload\(jax.checkpoint\(fn, policy"):
                wrap(jnp.sin, policy=policy)

    def named(x, name="act"):
        return checkpoint_name(jnp.sin(x), name) * jnp.cos(x)

    def gradient(body):
        return jax.grad(lambda x: body(x).sum())(x)

    with pytest.raises(TypeError, match="`policy` must return a bool for a Residual, got None"):
        gradient(offload(named, policy=lambda residual: None, min_bytes=1))
    for body in (
        offload(named, policy=["act", "other"], min_bytes=1),
        offload(lambda x: jax.jit(functools.partial(named, name="other"))(named(x)), policy=["act", "other"]),
        region(lambda x: jax.lax.scan(lambda x, _: (named(x), None), x, None, length=2)[0], policy=["other"]),
    ):
        with pytest.raises(ValueError, match="got 'other', which no tensor of .* has; give names"):
            gradient(body)
    assert store.stats().stored_count == 0
    gradient(offload(named, policy=["act"], min_bytes=1))
    assert store.stats().stored_count == 1
    scanned = lambda x: jax.lax.scan(lambda x, _: (named(x), None), named(x, "first"), None, length=2)[0]  # noqa: E731
    gradient(region(scanned, policy=["act", "first"], min_bytes=1))
    assert store.stats().stored_count == 1 + 3


@pytest.mark.slow
def test_no_tracer_leaks(store):
    ws, x = operands()
    w = ws[0]
    bodies = {
        "arguments": lambda w, x: offloaded(w, x),
        "closure": lambda w, x: offload(lambda x: layer(w, x), min_bytes=1)(x),
        "closure of a checkpoint": lambda w, x: offload(jax.checkpoint(lambda x: layer(w, x)), min_bytes=1)(x),
        "in a loop": lambda w, x: jax.lax.scan(lambda c, _: (offloaded(w, c), None), x, None, length=2)[0],
    }
    for name, body in bodies.items():
        for run in (lambda f: f), jax.jit:
            with jax.checking_leaks():
                got = run(jax.grad(lambda w, x, body=body: (body(w, x) ** 2).sum(), (0, 1)))(w, x)
            assert all(bool(jnp.isfinite(leaf).all()) for leaf in got), name


def test_references_have_one_error(store):
    x, reference = operands()[1], jax.new_ref(jnp.zeros(()))

    def fn(x, reference):
        reference[...] = x.sum()
        return jnp.sin(x)

    for call in (
        lambda x, r: offload(fn, min_bytes=1)(x, r),
        lambda x, r: offload(fn, min_bytes=1, static_argnums=1)(x, r),
        lambda x, r: offload(lambda x: fn(x, r), min_bytes=1)(x),
        lambda x, r: offload(lambda x, s: fn(x, s["r"]), min_bytes=1)(x, {"r": r}),
    ):
        for run in call, jax.jit(call), jax.grad(lambda x, r, call=call: call(x, r).sum()):
            with pytest.raises(TypeError, match=r"must not be given or close over a jax\.Ref: .* give the value"):
                run(x, reference)

    def local(x):  # a reference of its own is allowed
        mine = jax.new_ref(x)
        mine[...] = jnp.sin(mine[...])
        return mine[...] * x

    got = jax.jit(jax.grad(lambda x: offload(local, min_bytes=1)(x).sum()))(x)
    np.testing.assert_allclose(got, jnp.cos(x) * x + jnp.sin(x), rtol=1e-5, atol=1e-5)


class _Sound(jax.extend.core.Effect):
    pass


_sound = jax.extend.core.Primitive("sound")
_sound.def_impl(lambda x: x)
_sound.def_effectful_abstract_eval(lambda aval: (aval, {_Sound()}))


def test_effects_that_custom_derivatives_cannot_have(store):
    x = operands()[1]
    body = offload(lambda x: jnp.sin(_sound.bind(x)), min_bytes=1)
    for run in jax.jit(body), jax.jit(jax.grad(lambda x: body(x).sum())):
        with pytest.raises(NotImplementedError, match="offload: `.*lambda.*` has side effects .* Move them out"):
            run(x)
    said = []

    def allowed(x):
        jax.debug.callback(lambda: said.append(1))
        return jnp.sin(x)

    jax.block_until_ready(jax.jit(jax.grad(lambda x: offload(allowed, min_bytes=1)(x).sum()))(x))
    jax.effects_barrier()
    assert said


@pytest.mark.parametrize("run", [pytest.param(lambda f: f, marks=pytest.mark.slow), jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("inner", [lambda f: f, jax.checkpoint], ids=["residuals", "inputs"])
@pytest.mark.devices(2)
def test_explicit_shardings(store, inner, run):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    w, x = operands()[0][0], operands()[1]

    def fn(x, w):
        y = x @ w
        return jnp.sin(y) * y

    want = jax.grad(lambda x, w: fn(x, w).sum(), (0, 1))(x, w)
    with jax.set_mesh(mesh):
        rows = jax.device_put(x, P("d", None))
        for spec in P(None, None), P(None, None, reduced={"d"}):
            weights = jax.device_put(w, spec)
            body = offload(inner(fn), min_bytes=1, inputs="all")
            got = run(jax.grad(lambda x, w, body=body: body(x, w).sum(), (0, 1)))(rows, weights)
            plain = run(jax.grad(lambda x, w: inner(fn)(x, w).sum(), (0, 1)))(rows, weights)
            assert list(map(jax.typeof, got)) == list(map(jax.typeof, plain))
            got = [jax.sharding.reshard(leaf, P(None, None)) for leaf in got]
            for a, b in zip(got, want, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    stats = store.stats()
    assert stats.stored_count == stats.fetched_count > 0


@pytest.mark.slow
def test_a_branch_that_was_not_taken_has_no_handle(store):
    """`vmap` of `switch` by a batched index runs all branches: where none was taken that stores, there is no handle."""
    x = jnp.linspace(-1, 1, 32).reshape(4, 8)
    body = offload(lambda x: jnp.sin(x) * x, min_bytes=1, inputs="all")

    def loss(index, x):
        branches = [lambda x: body(x).sum(), lambda x: 2 * body(2 * x).sum(), lambda x: 3 * x.sum()]
        return jax.lax.switch(index, branches, x)

    gradient = jax.grad(loss, 1)
    plain = jax.grad(lambda x: (jnp.sin(x) * x).sum())
    want = jnp.stack([plain(x), 4 * plain(2 * x), jnp.full_like(x, 3)])
    indices = jnp.arange(3)
    np.testing.assert_allclose(jnp.stack([jax.jit(gradient)(i, x) for i in indices]), want, rtol=1e-5, atol=1e-7)
    by_map = jax.jit(lambda x: jax.lax.map(lambda i: gradient(i, x), indices))(x)
    np.testing.assert_allclose(by_map, want, rtol=1e-5, atol=1e-7)
    # Of branches that store equally many tensors of equal shapes, each example has the handles of its own.
    batched = jax.jit(jax.vmap(gradient, (0, None)))
    np.testing.assert_allclose(batched(indices[:2], x), want[:2], rtol=1e-5, atol=1e-7)
    with pytest.raises(jax.errors.JaxRuntimeError, match="a fetch must have a handle, got none: .* not taken"):
        jax.block_until_ready(batched(indices, x))
