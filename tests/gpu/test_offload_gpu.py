"""Offload on a GPU: the same bits on every path that a tensor can take, and failures that show."""

import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dejax.offload import ActivationStore, offload, optimizer
from dejax.offload.activations import calls
from tests.offload.layers import interceptor

pytestmark = pytest.mark.gpu

LAYERS, BATCH, WIDTH = 12, 256, 512
TENSOR = BATCH * WIDTH * 4  # bytes of one activation in float32


def layer(w, x):
    return x + 0.1 * (jax.nn.gelu(x @ w) @ w.T)


def loss_of(body, scan: bool):
    def loss(ws, x):
        if scan:
            x, _ = jax.lax.scan(lambda c, w: (body(w, c), None), x, ws)
        else:
            for i in range(LAYERS):
                x = body(ws[i], x)
        return (x.astype(jnp.float32) ** 2).mean()

    return loss


def operands(dtype=jnp.float32):
    key_w, key_x = jax.random.split(jax.random.key(0))
    ws = jax.random.normal(key_w, (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5
    return ws.astype(dtype), jax.random.normal(key_x, (BATCH, WIDTH)).astype(dtype)


# Offload changes where fusions end, and with them which matrix product autotuning prefers and what is rounded between
# two operations: without these freedoms of the compiler bits can be compared.
PLAIN = {
    "xla_gpu_autotune_level": 0,
    "xla_gpu_enable_triton_gemm": False,
    "xla_allow_excess_precision": False,
}


def gradient(body, scan: bool):
    return jax.jit(jax.grad(loss_of(body, scan), argnums=(0, 1)), compiler_options=PLAIN)


def assert_same_bits(got, want) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("inner", [lambda f: f, jax.checkpoint], ids=["residuals", "inputs"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_same_bits_as_saved(dtype, inner, scan) -> None:
    ws, x = operands(dtype)
    # The program with the same cuts, whose tensors stay. Plain autodiff has no cuts: there XLA may fuse, and so round,
    # in other places.
    want = gradient(offload(inner(layer), store="device", min_bytes=1), scan)(ws, x)
    if dtype == jnp.float32 or not scan or inner is jax.checkpoint:
        assert_same_bits(want, gradient(inner(layer), scan)(ws, x))
    with ActivationStore() as store:
        got = gradient(offload(inner(layer), min_bytes=1), scan)
        first = got(ws, x)
        assert_same_bits(first, want)
        for _ in range(3):
            assert_same_bits(got(ws, x), want)
        stats = store.stats()
    assert stats.live_count == 0
    assert stats.stored_count == stats.fetched_count
    assert stats.prefetched_bytes > 0 and stats.ring_hit_bytes > 0


@pytest.mark.parametrize("device_bytes", [0, TENSOR, 5 * TENSOR // 2, 4 * TENSOR, 100 * TENSOR])
def test_every_size_of_ring(device_bytes) -> None:
    ws, x = operands()
    want = gradient(jax.checkpoint(layer), True)(ws, x)
    with ActivationStore(device_bytes=device_bytes) as store:
        got = gradient(offload(jax.checkpoint(layer), min_bytes=1), True)
        for _ in range(4):
            assert_same_bits(got(ws, x), want)
        assert store.stats().live_count == 0


@jax.custom_vjp
def residuals_are_gradients(a, x):
    return (x @ a).sum()


residuals_are_gradients.defvjp(
    lambda a, x: (residuals_are_gradients(a, x), (a, x)), lambda kept, ct: (kept[0], ct * kept[1] + kept[1] @ kept[0])
)


@pytest.mark.parametrize("way", ["scan", "vmap"])
def test_what_is_a_slice_or_goes_into_a_stack(way) -> None:
    """XLA folds slices of whole lines into calls; jax 0.11 fetched twice what is put into a stack and used as well."""
    keys = jax.random.split(jax.random.key(0))
    ws, xs = (jax.random.normal(key, (6, 128, 128)) for key in keys)

    def gradient(store):
        body = offload(residuals_are_gradients, store=store, inputs="all", min_bytes=1)

        def loss(ws, xs):
            if way == "vmap":
                return jax.vmap(body)(ws, xs).sum()
            return jax.lax.scan(lambda c, x: (c + body(*x), None), 0.0, (ws, xs))[0]

        return jax.jit(jax.grad(loss, argnums=(0, 1)), compiler_options=PLAIN)

    want = gradient("device")(ws, xs)
    with ActivationStore(device_bytes=2 * ws[0].nbytes) as store:
        got = gradient(None)
        for _ in range(4):
            assert_same_bits(got(ws, xs), want)
        stats = store.stats()
    assert stats.stored_count == stats.fetched_count == 4 * 12
    assert stats.live_count == 0
    text = got.lower(ws, xs).compile().as_text()
    assert text.count('custom_call_target="dejax_offload_store"') == 2
    assert text.count('custom_call_target="dejax_offload_fetch"') == 2


@pytest.mark.parametrize("engine", ["direct", "tensorstore"])
def test_disk_tier(engine: str, tmp_path: Path) -> None:
    ws, x = operands()
    want = gradient(jax.checkpoint(layer), True)(ws, x)
    body = offload(jax.checkpoint(layer), min_bytes=1)
    with ActivationStore(
        tmp_path, device_bytes=2 * TENSOR, host_bytes=4 * TENSOR, engine=engine, chunk_bytes=1 << 17
    ) as s:
        got = gradient(body, True)
        for _ in range(6):
            assert_same_bits(got(ws, x), want)
        s.drain()
        stats = s.stats()
    assert stats.read_bytes > 0 and stats.host_bytes <= 4 * TENSOR
    assert stats.live_count == 0 and not list(tmp_path.iterdir())


def test_backward_in_another_jit_and_twice() -> None:
    ws, x = operands()
    body = offload(layer, min_bytes=1)
    want = gradient(layer, True)(ws, x)
    with ActivationStore():
        _, vjp = jax.jit(lambda ws, x: jax.vjp(loss_of(body, True), ws, x), compiler_options=PLAIN)(ws, x)
        backward = jax.jit(lambda vjp, ct: vjp(ct), compiler_options=PLAIN)
        assert_same_bits(backward(vjp, jnp.float32(1)), want)
        assert_same_bits(backward(vjp, jnp.float32(1)), want)  # the slots have not been used again


def test_steps_dispatched_ahead() -> None:
    ws, x = operands()
    step = gradient(offload(jax.checkpoint(layer), min_bytes=1), True)
    with ActivationStore():
        want = step(ws, x)
        ahead = [step(ws, x) for _ in range(20)]
        for got in ahead:
            assert_same_bits(got, want)


def swapped(x, y, flag):
    """Two stores of one site, and fetches in an order that the data decides, as no backward pass has."""
    put = [calls.store(v, binding=0, site=10**6, ring_bytes=6 * v.nbytes) for v in (x, y)]
    put[1], put[0] = jax.lax.optimization_barrier((put[1], put[0]))
    first = jnp.where(flag, put[0], put[1])
    second = jnp.where(flag, put[1], put[0])
    a = calls.fetch(second, x, (), binding=0, site=10**6)
    b = calls.fetch(first, x, (a[:1],), binding=0, site=10**6)
    return a, b


def test_the_data_may_decide_the_order_of_fetches() -> None:
    x, y = jnp.ones(5000), jnp.full(5000, 2.0)
    run = jax.jit(swapped)
    with ActivationStore():
        for flag in (True, True, False, True, False):
            a, b = run(x, y, flag)
            assert (a == (2 if flag else 1)).all() and (b == (1 if flag else 2)).all()


def test_two_threads_with_one_store_and_little_memory() -> None:
    ws, x = operands()
    step = gradient(offload(jax.checkpoint(layer), min_bytes=1), True)
    want = gradient(jax.checkpoint(layer), True)(ws, x)
    with ActivationStore(device_bytes=3 * TENSOR, host_bytes=2 * LAYERS * TENSOR) as store:
        errors = []

        def work() -> None:
            try:
                with store.use():
                    for _ in range(20):
                        assert_same_bits(step(ws, x), want)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        assert store.stats().live_count == 0


@pytest.mark.parametrize("donated", [True, False])
@pytest.mark.parametrize("piece_bytes", [1 << 30, 1 << 20])
def test_optimizer_state_in_pieces(donated, piece_bytes) -> None:
    params = {"a": jnp.linspace(-1, 1, 1 << 20).reshape(1024, 1024), "b": jnp.linspace(1, 2, 3 << 18).reshape(3, -1)}

    def run(tx):
        def step(params, state, grads):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        now, state = jax.tree.map(jnp.copy, params), tx.init(params)
        where = jax.tree.map(lambda leaf: leaf.sharding, (now, state))
        places = (*where, where[0])
        step = jax.jit(step, donate_argnums=(0, 1) if donated else (), in_shardings=places, out_shardings=where)
        for _ in range(3):
            now, state = step(now, state, jax.tree.map(lambda x: jnp.roll(x, 1) - 0.5, now))
        return now, state

    want = run(optax.adamw(1e-2))
    got = run(optimizer(optax.adamw(1e-2), streams=True, piece_bytes=piece_bytes))
    assert jax.tree.leaves(got[1])[1].sharding.memory_kind == "pinned_host"
    assert_same_bits(got, want)


@pytest.mark.parametrize("piece_bytes", [1 << 30, 1 << 18])
def test_pieces_that_are_slices(piece_bytes) -> None:
    """The state's new values are slices of a stack, the updates go into one: in jax 0.11 such calls ran twice."""
    previous = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), lambda updates, state, params=None: (state, updates)
    )
    tx = optimizer(previous, streams=True, piece_bytes=piece_bytes)
    stack = jax.random.normal(jax.random.key(0), (4, 512, 1024))
    params = dict.fromkeys("ab", stack[0])

    def step(stack, state):
        updates, state = tx.update({"a": stack[1], "b": stack[3]}, state)
        return stack.at[0].set(updates["a"]).at[2].set(updates["b"]), state

    state = tx.init(params)
    where = jax.tree.map(lambda leaf: leaf.sharding, (stack, state))
    step = jax.jit(step, donate_argnums=1, in_shardings=where, out_shardings=where)
    first, state = step(stack, state)
    assert_same_bits(first, stack.at[0].set(0).at[2].set(0))
    assert_same_bits(state, {"a": stack[1], "b": stack[3]})
    second, state = step(stack * 2, state)
    assert_same_bits(second, (stack * 2).at[0].set(stack[1]).at[2].set(stack[3]))
    assert_same_bits(state, {"a": 2 * stack[1], "b": 2 * stack[3]})


@pytest.mark.skipif(jax.device_count() > 1, reason="streams are the default on one device")
def test_optimizer_by_default_in_an_nnx_model() -> None:
    """No shardings are given, nothing is donated: state stays on the host and travels in pieces."""
    from flax import nnx

    def run(tx):
        model = nnx.Linear(1024, 1024, rngs=nnx.Rngs(0))
        state = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @nnx.jit
        def step(model, state, x):
            state.update(model, nnx.grad(lambda m: (m(x) ** 2).mean())(model))

        for i in range(4):
            step(model, state, jax.random.normal(jax.random.key(i), (64, 1024)))
        kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(nnx.state(state)) if leaf.size > 1 << 16}
        return nnx.state(model, nnx.Param), kinds

    want, _ = run(optax.adam(1e-2))
    got, kinds = run(optimizer(optax.adam(1e-2), piece_bytes=1 << 20))
    assert "pinned_host" in kinds
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)  # the gradient may be fused into either program


def test_a_failing_store_fails_the_step_and_the_next_one_works() -> None:
    ws, x = operands()
    step = gradient(offload(jax.checkpoint(layer), min_bytes=1), True)
    want = gradient(jax.checkpoint(layer), True)(ws, x)
    with ActivationStore() as store:
        for kind in ("store", "fetch"):
            assert_same_bits(step(ws, x), want)
            interceptor(store).inject(kind, 1)
            with pytest.raises(Exception, match="injected fault"):
                jax.block_until_ready(step(ws, x))
            assert store.stats().live_count == 0
            assert_same_bits(step(ws, x), want)
