"""`offload` computes what the function computes, under every transformation, or says at trace time why not."""

import functools

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

from dejax import _native
from dejax.offload import ActivationStore, _boundary, offload
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

pytestmark = pytest.mark.skipif(_native.unavailable_reason() is not None, reason="no native extension")


@pytest.fixture
def store():
    with ActivationStore() as store:
        yield store


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize(("kind", "reference"), [("all", "plain"), ("inputs", "checkpoint")])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_have_the_same_bits(store, dtype, kind, reference, scan):
    ws, x = operands(dtype)
    for _ in range(2):
        assert_same_bits(step(kind, scan)(ws, x), step(reference, scan)(ws, x))
    stats = store.stats()
    assert stats.stored_count == stats.fetched_count and stats.live_count == 0
    if kind == "inputs":
        assert stats.stored_bytes == 2 * LAYERS * x.nbytes  # the inputs, no parameter


@pytest.mark.parametrize("inner", [lambda f: f, jax.checkpoint], ids=["residuals", "inputs"])
def test_cuts_alone_give_the_same_bits(store, inner):
    ws, x = operands(jnp.bfloat16)
    cut = jax.jit(jax.grad(loss_of(offload(inner(layer), store="device", min_bytes=1)), argnums=(0, 1)))(ws, x)
    assert store.stats().stored_count == 0
    assert_same_bits(step("inputs" if inner is jax.checkpoint else "all")(ws, x), cut)
    with pytest.raises(ValueError, match="must be an ActivationStore, 'device' or None, got 'disc'"):
        offload(layer, store="disc")(ws[0], x)


def test_what_has_no_nan_is_guarded(store):
    """A stored mask cannot be made NaN: what it is used with goes through a guard."""
    w, x = operands()[0][0], operands()[1]

    def fn(w, x):
        y = x @ w
        return jnp.where(y > 0, y, 0.1 * y)

    def gradient(body):
        return jax.jit(jax.grad(lambda w, x: (body(w, x) ** 2).sum(), argnums=(0, 1)))

    got = gradient(offload(fn, min_bytes=1))
    assert_same_bits(got(w, x), gradient(fn)(w, x))
    text = got.trace(w, x).lower(lowering_platforms=("cuda",)).as_text()
    assert "dejax_offload_guard" in text
    assert "dejax_offload_guard" not in step("all").trace(*operands()).lower(lowering_platforms=("cuda",)).as_text()


def test_a_small_base_stays_small(store):
    """What is not stored is kept in its smallest form: here a row, not what it was broadcast to."""

    def fn(x):
        row = jnp.sin(x[0])
        return x * jnp.broadcast_to(row, x.shape)

    x = operands()[1]
    _, vjp = jax.vjp(lambda x: offload(fn, policy=[], min_bytes=1, inputs="none")(x), x)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(vjp))
    assert kept < 1.5 * x.nbytes


def test_a_value_alone_stores_nothing(store):
    ws, x = operands()
    jax.block_until_ready(jax.jit(loss_of(offloaded))(ws, x))
    assert store.stats().stored_count == 0


def test_equal_tensors_views_and_parameters(store):
    """y is needed by three products, once as it is, once transposed, once cast; w and its transpose stay."""
    w, x = operands()[0][0], operands()[1]

    def fn(w, x):
        y = jnp.sin(x @ w)
        wide = y.astype(jnp.bfloat16).astype(jnp.float32)
        return (y @ w.T) * (y.T @ y).sum() + wide * y

    want = jax.jit(jax.grad(lambda w, x: fn(w, x).sum(), argnums=(0, 1)))(w, x)
    got = jax.jit(jax.grad(lambda w, x: offload(fn, min_bytes=TENSOR // 2)(w, x).sum(), argnums=(0, 1)))(w, x)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)
    stats = store.stats()
    assert stats.stored_bytes <= 6 * TENSOR  # not w; y once, although six operations keep it or a view of it
    assert stats.live_count == 0


def test_names_and_functions_choose(store):
    w, x = operands()[0][0], operands()[1]

    def fn(w, x):
        return x + checkpoint_name(jax.nn.gelu(checkpoint_name(x @ w, "product")), "act") @ w.T

    def stored(**how):
        before = store.stats().stored_bytes
        jax.block_until_ready(jax.jit(jax.grad(lambda w: offload(fn, min_bytes=1, **how)(w, x).sum()))(w))
        return store.stats().stored_bytes - before

    assert stored(policy=["act"], inputs="none") == TENSOR
    assert stored(policy=["no such name"]) == 0
    assert stored(policy=lambda residual: residual.is_input) == TENSOR
    assert stored(policy=lambda residual: residual.is_input, inputs="none") == 0
    assert stored(policy=lambda residual: residual.is_input, inputs=(0, 1)) == 2 * TENSOR + WIDTH_EXTRA
    assert stored(policy=lambda residual: residual.shape == ()) < 64


WIDTH_EXTRA = 64 * 64 * 4 - TENSOR  # w is 64 x 64, x 32 x 64


def test_small_tensors_stay(store):
    ws, x = operands()
    gradient = jax.grad(loss_of(offload(layer)))  # 8 KiB each
    with pytest.warns(UserWarning, match=r"`layer` stores nothing: .* 8,192 bytes, less than min_bytes=1,048,576"):
        jax.block_until_ready(gradient(ws, x))
    jax.block_until_ready(gradient(ws, 2 * x))  # once
    assert store.stats().stored_count == 0
    assert "`layer` stores nothing" in store.summary()


def test_around_and_inside_checkpoint(store):
    ws, x = operands()
    want = step("checkpoint")(ws, x)
    assert_same_bits(jax.jit(jax.grad(loss_of(jax.checkpoint(offloaded)), argnums=(0, 1)))(ws, x), want)
    assert store.stats().live_count == 0


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


def test_what_a_loop_does_not_change_is_stored_once_and_fetched_often(store):
    ws, x = operands()
    w = ws[0]

    def gradient(body):
        def loss(w, x):
            out, _ = jax.lax.scan(lambda c, scale: (c + scale * body(w, x), None), x, jnp.arange(1.0, 6.0))
            return (out**2).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1)))

    want = gradient(layer)(w, x)
    got = gradient(offloaded)
    for _ in range(8):
        for a, b in zip(got(w, x), want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)
    assert store.stats().fetched_count >= store.stats().stored_count


def test_what_a_loop_shares_outlives_a_first_run_short_of_memory(tmp_path):
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
    with ActivationStore(tmp_path, host_bytes=4 * TENSOR, chunk_bytes=4096) as store:
        for _ in range(4):
            np.testing.assert_allclose(got(ws, x, table), want, rtol=1e-4, atol=1e-3)
        stats = store.stats()
    assert stats.fetched_count > stats.stored_count and stats.read_bytes > 0


def test_vmap(store):
    ws, x = operands()
    xs = jnp.stack([x, 2 * x])
    for transform in (
        lambda body: jax.vmap(jax.grad(loss_of(body)), (None, 0)),
        lambda body: jax.grad(lambda ws, xs: jax.vmap(loss_of(body), (None, 0))(ws, xs).sum()),
    ):
        want, got = jax.jit(transform(layer))(ws, xs), jax.jit(transform(offloaded))(ws, xs)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    assert store.stats().stored_count == store.stats().fetched_count > 0


def test_vmap_takes_what_is_not_batched_once(store):
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


def test_what_depends_on_no_argument_is_made_again(store):
    x = operands()[1]
    seen = []

    @jax.jit  # as attention in jax.nn is
    def masked(x):
        return jnp.where(jnp.tril(jnp.ones((x.shape[0],) * 2, bool)), jnp.sin(x @ x.T), 0)

    def f(x):
        return masked(x) @ x + jax.nn.silu(x)

    def wanted(residual):
        seen.append(residual.dtype)
        return True

    got = jax.jit(jax.grad(lambda x: offload(f, policy=wanted, min_bytes=1)(x).sum()))(x)
    np.testing.assert_allclose(got, jax.jit(jax.grad(lambda x: f(x).sum()))(x), rtol=1e-5, atol=1e-5)
    assert set(seen) == {np.dtype("float32")} and store.stats().stored_count == store.stats().fetched_count > 0


def test_what_a_callback_gives_is_not_asked_for_again(store):
    """It depends on no argument, and would be another number the next time."""
    calls = []

    def number():
        calls.append(1)
        return np.full((64,), len(calls), np.float32)

    def scaled(x):
        return jnp.sin(x * io_callback(number, jax.ShapeDtypeStruct((64,), jnp.float32)))

    y, pull = jax.vjp(offload(scaled, min_bytes=0), jnp.ones((32, 64)))
    (gradient,) = pull(jnp.ones_like(y))
    assert len(calls) == 1
    np.testing.assert_allclose(gradient, np.cos(1.0) * np.ones((32, 64)), rtol=1e-6)


def test_what_backward_has_no_use_for_is_not_stored(store):
    x = operands()[1]

    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    f.defvjp(lambda x: (f(x), (jnp.cos(x), jnp.exp(x))), lambda kept, ct: (kept[0] * ct,))
    for run in jax.jit, lambda f: f:
        got = run(jax.grad(lambda x: offload(f, min_bytes=1)(x).sum()))(x)
        np.testing.assert_allclose(got, jnp.cos(x), rtol=1e-6)
    stats = store.stats()
    assert stats.stored_count == stats.fetched_count == 2 and stats.live_count == 0


def test_shard_map(store):
    if len(jax.devices()) < 4:
        pytest.skip("four devices")
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


@pytest.mark.parametrize("transform", [jax.hessian, lambda f: jax.jacfwd(jax.grad(f))])
def test_second_derivatives_are_an_error_at_trace_time(store, transform):
    w, x = operands()[0][0], operands()[1]
    with pytest.raises((NotImplementedError, ValueError), match="offload"):
        jax.make_jaxpr(transform(lambda x: offloaded(w, x).sum()))(x)


def test_forward_mode_is_an_error(store):
    ws, x = operands()
    for run in (lambda f: f), jax.jit:
        for scan in True, False:
            with pytest.raises(NotImplementedError, match="offload: forward mode .* take jax.checkpoint"):
                jax.jvp(run(loss_of(offloaded, scan)), (ws, x), (ws, x))


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


def test_lowering_for_cuda_needs_no_gpu():
    ws, x = operands()
    text = step("inputs").trace(ws, x).lower(lowering_platforms=("cuda",)).as_text()
    assert "@dejax_offload_store" in text and "@dejax_offload_fetch" in text


def test_the_ring_is_no_larger_than_the_bus_needs():
    balance = _boundary._FLOPS_PER_BYTE  # operations while the bus moves a byte
    k = 512
    one, several = [100 * k], [60 * k, 30 * k, 10 * k]
    assert _boundary.ring_bytes(one, flops=balance * 100 * k) == 100 * k
    assert _boundary.ring_bytes(one, flops=0) == 600 * k
    assert _boundary.ring_bytes(several, flops=balance * 100 * k) == 100 * k  # a layer's worth
    assert _boundary.ring_bytes(several, flops=0) == 200 * k
    assert _boundary.ring_bytes([k + 1], flops=float("inf")) == 2 * k  # a tensor of odd size fits
    assert _boundary.ring_bytes([], flops=0) == 0


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

    def local(x):  # one of its own is no matter
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


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("inner", [lambda f: f, jax.checkpoint], ids=["residuals", "inputs"])
def test_explicit_shardings(store, inner, run):
    if len(jax.devices()) < 2:
        pytest.skip("two devices")
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


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_forward_mode_names_the_remedy(store, run):
    x = operands()[1]
    sine = offload(jnp.sin, min_bytes=1, inputs="all")

    def loop(x):
        return jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (sine(c[0]), c[1] + 1), (x, 0))[0]

    for forward in (
        lambda x: jax.jvp(sine, (x,), (x,)),
        lambda x: jax.jvp(loop, (x,), (x,)),
        lambda x: jax.jacfwd(sine)(x),
        lambda x: jax.vmap(lambda x: jax.jvp(sine, (x,), (x,))[1])(x),
        lambda x: jax.linearize(sine, x)[1](x),
        lambda x: jax.jvp(jax.checkpoint(sine), (x,), (x,)),
    ):
        with pytest.raises(NotImplementedError, match="offload: forward mode .* take jax.checkpoint"):
            jax.block_until_ready(run(forward)(x))
    fixed = run(jax.grad(lambda x: jax.lax.fori_loop(0, 3, lambda _, c: sine(c), x).sum()))(x)
    plain = jax.grad(lambda x: jnp.sin(jnp.sin(jnp.sin(x))).sum())(x)
    np.testing.assert_allclose(fixed, plain, rtol=1e-5, atol=1e-6)


def test_a_call_that_stores_nothing_says_so_once(store, recwarn):
    w, x = operands()[0][0], operands()[1]

    def small(w, x):
        return jnp.tanh(x @ w)

    def linear(w, x):
        return x + 1

    for body in offload(linear), offload(small, policy=[]), offload(small, min_bytes=1), offload(small, store="device"):
        jax.grad(lambda x, body=body: body(w, x).sum())(x)
        if body.__wrapped__ is small:
            continue
        assert not recwarn.list
    offload(small)(w, x)  # without a derivative nothing is to be stored
    before = [str(w.message) for w in recwarn.list]
    with pytest.warns(UserWarning, match=r"`.*small` stores nothing: the largest of \d tensors .* 8,192 bytes") as seen:
        for _ in range(3):
            jax.grad(lambda x: offload(small, min_bytes=9000)(w, x).sum())(x)
    assert len(seen) == 1 and seen[0].filename == __file__
    assert store.summary().count("small` stores nothing") == 1 + any("small" in text for text in before)
