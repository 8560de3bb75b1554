"""Programs with unusual parts: gradients as without offload, by `offload` and `region`, kept and recomputed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dejax.offload import ActivationStore, offload, region

_rng = np.random.default_rng(0)
W = jnp.asarray(_rng.standard_normal((8, 8)) / 3, jnp.float32)
X = jnp.asarray(_rng.standard_normal((6, 8)), jnp.float32)
WS = jnp.asarray(_rng.standard_normal((2, 3, 8, 8)) / 4, jnp.float32)


def layer(w, x):
    return x + jnp.tanh(x @ w) @ w.T


def squares(y):
    return sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(y))


def scan_in_scan(of):
    def outer(x, ws):
        return lax.scan(lambda x, w: (of(layer)(w, x), None), x, ws)[0], None

    return lambda ws, x: lax.scan(outer, x, ws)[0]


def around_a_scan(of):
    def inner(ws, x):
        return lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0]

    return lambda ws, x: lax.scan(lambda x, ws: (of(inner)(ws, x), None), x, ws)[0]


def switch_in_scan(of):
    ways = [lambda w, x: layer(w, x), lambda w, x: jnp.cos(x) @ w, lambda w, x: x * 2.0]

    def body(w, x, i):
        return lax.switch(i % 3, [functools.partial(of(way), w) for way in ways], x)

    return lambda w, x: lax.scan(lambda x, i: (body(w, x, i), None), x, jnp.arange(5))[0]


def cond_inside(of):
    def body(w, x):
        return lax.cond(x.sum() > 0, lambda: layer(w, x), lambda: jnp.sin(x) @ w)

    return of(body)


def while_inside(of):
    def body(w, x):
        n, _ = lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] / 2 + 1, c[1] + 1), (lax.stop_gradient(x), 0))
        return lax.fori_loop(0, 2, lambda _, x: layer(w / 2, x), x) * n

    return of(body)


def custom_vjp_inside(of):
    @jax.custom_vjp
    def odd(x):
        return jnp.sin(x)

    odd.defvjp(
        lambda x: (jnp.sin(x), (x, jnp.argsort(x, -1))), lambda kept, ct: (ct * 3 * jnp.cos(kept[0]) * (1 + kept[1]),)
    )
    return of(lambda w, x: odd(x @ w) @ w)


def custom_jvp_inside(of):
    @jax.custom_jvp
    def odd(x):
        return jnp.sin(x)

    odd.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), tangents[0] * 7 * jnp.cos(primals[0])))
    return of(lambda w, x: odd(x @ w) @ w)


def dropout(of):
    def body(w, x, key):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), jnp.tanh(x @ w), 0.0) @ w

    keys = jax.random.split(jax.random.key(3), 3)
    return lambda w, x: lax.scan(lambda x, key: (x + of(body)(w, x, key), None), x, keys)[0]


def integers(of):
    def body(w, x):
        best, at = lax.top_k(x @ w, 3)
        ordered = jnp.take_along_axis(jnp.tanh(x @ w), jnp.argsort(x, -1), -1)
        return jnp.zeros_like(x).at[jnp.arange(6)[:, None], at].set(best) @ w + ordered, jnp.argmax(x, -1)

    return lambda w, x: of(body)(w, x)[0]


def narrow(of):
    def body(w, x):
        product = jnp.einsum("bi,ij->bj", x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))
        return (product.astype(jnp.float8_e4m3fn).astype(jnp.float32) * jnp.tanh(x)) @ w

    return of(body)


def int4(of):
    codes = jax.random.randint(jax.random.key(4), (8, 8), -7, 7, jnp.int8).astype(jnp.int4)
    return lambda w, x: of(lambda w, x, c: jnp.tanh(x @ c.astype(jnp.float32)) @ w)(w, x, codes)


def empty(of):
    return lambda w, x: of(lambda w, x, e: jnp.concatenate([x, jnp.sin(e)]) @ w @ w)(w, x, jnp.zeros((0, 8)))


def complex_numbers(of):
    return of(lambda w, x: jnp.abs(jnp.fft.fft(x @ w)) @ w)


def pytrees(of):
    def body(p, x):
        return {"y": jnp.tanh(x["a"] @ p["w"]), "none": None, "z": (x["b"], [p["w"] * 2])}

    return lambda w, x: of(body)({"w": w}, {"a": x, "b": jnp.arange(3), "c": None})


def one_array_twice(of):
    return lambda w, x: of(lambda a, b: jnp.tanh(a @ b.T) @ b)(x @ w, x @ w)


def passed_through(of):
    return of(lambda w, x: (x, w, x @ w))


def batched(of):
    return lambda w, x: jax.vmap(jax.vmap(of(layer), (None, 0)), (None, 0))(w, x.reshape(2, 3, 1, 8))


def batched_map(of):
    return lambda w, x: lax.map(lambda row: of(layer)(w, row), x, batch_size=4)


def inside_itself(of):
    return of(lambda w, x: of(layer)(w, jnp.sin(of(layer)(w, x))))


def recomputed(of):
    return jax.checkpoint(lambda w, x: jnp.sin(of(layer)(w, x)))


def reversed_scan(of):
    def body(x, w):
        y = of(layer)(w, x)
        return y, y.sum()

    return lambda ws, x: lax.scan(body, x, ws[0], reverse=True, unroll=2)


def experts(of):
    def body(w, x):
        gates, chosen = lax.top_k(jax.nn.softmax(x @ w), 2)
        order = jnp.argsort(chosen.reshape(-1))
        counts = jnp.bincount(chosen.reshape(-1), length=8).astype(jnp.int32)
        weights = w * jnp.arange(1, 9)[:, None, None] / 8
        y = lax.ragged_dot(jnp.repeat(x, 2, 0)[order], weights, counts)
        return jnp.einsum("nkd,nk->nd", jnp.zeros((12, 8)).at[order].set(y).reshape(6, 2, 8), gates)

    return of(body)


def attention(of):
    def body(w, x):
        heads = (x @ w).reshape(1, 6, 2, 4)
        return jax.nn.dot_product_attention(heads, heads, heads, is_causal=True).reshape(6, 8)

    return of(body)


def solved(of):
    return of(lambda w, x: jnp.linalg.solve(w @ w.T + jnp.eye(8), x.T).T + jnp.cumprod(jnp.tanh(x), 0))


STACKED = (scan_in_scan, around_a_scan, reversed_scan)
PROGRAMS = [
    *STACKED, switch_in_scan, cond_inside, while_inside, custom_vjp_inside, custom_jvp_inside, dropout, integers,
    narrow, int4, empty, complex_numbers, pytrees, one_array_twice, passed_through, batched, batched_map,
    inside_itself, recomputed, experts, attention, solved,
]  # fmt: skip


def gradient(make, of):
    fn = make(of)
    # Without excess precision, bfloat16 is rounded where the program says so, not where a fusion ends.
    options = {"xla_allow_excess_precision": False}
    return jax.jit(jax.grad(lambda w, x: squares(fn(w, x)), argnums=(0, 1)), compiler_options=options)


@functools.cache
def without_offload(make):
    return gradient(make, lambda fn: fn)(WS if make in STACKED else W, X)


def cases():
    """Each program by `offload` and by `region`, kept and recomputed. One way of every third program is not slow."""
    for number, make in enumerate(PROGRAMS):
        quick = (offload if number % 2 else region, number % 12 < 6) if number % 3 == 1 else None
        for wrap in (offload, region):
            for remat in (False, True):
                marks = [] if (wrap, remat) == quick else [pytest.mark.slow]
                if make is int4 and remat:
                    marks.append(
                        pytest.mark.cpu_only("XLA for GPUs computes int4 in jax.checkpoint wrong, without dejax too")
                    )
                name = f"{make.__name__}-{wrap.__name__}-{'recomputed' if remat else 'kept'}"
                yield pytest.param(make, wrap, remat, marks=marks, id=name)


@pytest.mark.parametrize(("make", "wrap", "remat"), list(cases()))
def test_gradients_are_those_of_the_program_without_offload(make, wrap, remat):
    w = WS if make in STACKED else W

    def of(fn):
        return wrap(jax.checkpoint(fn) if remat else fn, min_bytes=0)

    want = without_offload(make)
    with ActivationStore() as store:
        step = gradient(make, of)
        got, again = jax.block_until_ready((step(w, X), step(w, X)))
        stats = store.stats()
    assert stats.live_count == 0 and stats.fetched_count >= stats.stored_count
    for a, b, c in zip(*map(jax.tree.leaves, (got, want, again)), strict=True):
        np.testing.assert_array_equal(a, c)
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5 * max(1.0, float(jnp.abs(b).max())))


@pytest.mark.slow
@pytest.mark.parametrize("option", ["jax_remat3", "jax_custom_vjp3"])
@pytest.mark.parametrize("wrap", [offload, region])
def test_newer_forms_of_recomputation_and_derivatives(option, wrap):
    if not hasattr(jax.config, option):
        pytest.skip(f"this jax has no {option}")
    before = getattr(jax.config, option)
    jax.config.update(option, True)
    try:
        without_offload.cache_clear()
        for make in (scan_in_scan, custom_vjp_inside):
            test_gradients_are_those_of_the_program_without_offload(make, wrap, True)
    finally:
        without_offload.cache_clear()
        jax.config.update(option, before)
