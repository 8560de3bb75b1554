"""Outside of `jit` each call traces its function again, and memory stays constant."""

import functools
import gc
import itertools
import os
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.offload import ActivationStore, offload, region
from tests.offload.layers import layer, operands


def memory():
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def eager_step(kind):
    ws, x = operands()
    w = ws[0]
    body = offload(jax.checkpoint(layer) if kind == "checkpoint" else layer, min_bytes=1)
    if kind == "closure":  # over a tracer
        return lambda: jax.grad(lambda w: offload(lambda x: layer(w, x), min_bytes=1)(x).sum())(w)
    if kind == "new":
        return lambda: jax.grad(lambda w: offload(layer, min_bytes=1)(w, x).sum())(w)
    return lambda: jax.grad(lambda w: body(w, x).sum())(w)


KINDS = ["one", "checkpoint", "new", "closure"]


def growth(kind, warm, steps, enough):
    """Bytes that each step adds, after warm-up steps: the least of three spans, or the first below `enough`.

    Steps that leak do so in every span. An allocator or a pool of threads grows in some.
    """
    run = eager_step(kind)
    grown = []
    with ActivationStore(host_bytes=1 << 24) as store:
        for _ in range(warm):
            run().block_until_ready()
        while len(grown) < 3 and not (grown and min(grown) < enough):
            before = memory()
            for _ in range(steps):
                run().block_until_ready()
            grown.append((memory() - before) / steps)
        stats = store.stats()
    assert stats.stored_count == stats.fetched_count > 0 and stats.live_count == 0
    return min(grown)


@pytest.mark.parametrize("kind", ["closure", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[:-1])])
def test_eager_steps_keep_no_python_objects(kind):
    """A step that keeps its trace keeps some thousand objects of it."""
    run, counts = eager_step(kind), []
    with ActivationStore(host_bytes=1 << 24) as store:
        for _ in range(4):
            run().block_until_ready()
            gc.collect()
            counts.append(len(gc.get_objects()))
        assert store.stats().live_count == 0
    assert min(after - before for before, after in itertools.pairwise(counts)) < 100, counts


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_eager_steps_run_in_constant_memory(kind):
    few = kind == "closure"
    # A step that keeps its trace adds 8 to 20 MB. An allocator may take a few MB more at any time.
    assert growth(kind, 20 if few else 60, 60 if few else 200, enough=60_000) < 60_000


@pytest.mark.slow
def test_other_shapes_dtypes_and_settings_are_traced_anew():
    body = offload(lambda x: jnp.sin(x) * x, min_bytes=1, inputs="all")

    def gradient(x):
        return jax.grad(lambda x: body(x).astype(jnp.float32).sum())(x)

    for x in jnp.ones((8, 8)), jnp.ones(8), jnp.ones((8, 8), jnp.bfloat16), jnp.float32(2), 3.0:
        got = gradient(x)
        np.testing.assert_allclose(
            np.asarray(got, np.float32), np.cos(np.asarray(x, np.float32)) * np.asarray(x, np.float32)
            + np.sin(np.asarray(x, np.float32)), rtol=2e-2,
        )  # fmt: skip
        assert got.dtype == jnp.result_type(x)
    product = offload(lambda a: (a @ a).sum(), min_bytes=1, inputs="all")
    a = jax.random.normal(jax.random.key(0), (64, 64))
    text = []
    for precision in "bfloat16", "highest":
        with jax.default_matmul_precision(precision):
            text.append(str(jax.make_jaxpr(jax.grad(product))(a)))
    assert "HIGHEST" in text[1] and "HIGHEST" not in text[0]


SCALE = 2.0


@pytest.mark.parametrize("wrap", [offload, pytest.param(region, marks=pytest.mark.slow)])
def test_what_a_function_reads_is_read_in_each_call(tmp_path, wrap):
    """Each call traces its function again. Values in closures, objects, files and settings may have changed."""
    x, text = jnp.linspace(0, 1, 8), tmp_path / "scale.txt"
    scale, held, config = 1.0, {"scale": 1.0, "array": np.ones(8)}, types.SimpleNamespace(scale=1.0)

    @functools.lru_cache
    def cached():
        return text.read_text()

    functions = {
        "closure": lambda x: jnp.sin(x) * scale,
        "dict": lambda x: jnp.sin(x) * held["scale"] * held["array"],
        "object": lambda x: jnp.sin(x) * config.scale,
        "partial": functools.partial(lambda s, x: jnp.sin(x) * s["scale"], held),
        "global": lambda x: jnp.sin(x) * SCALE,
        "file": lambda x: jnp.sin(x) * float(text.read_text()),
        "cleared cache": lambda x: jnp.sin(x) * float(cached()),
        "environment": lambda x: jnp.sin(x) * float(os.environ["DEJAX_TEST_SCALE"]),
        "jax setting": lambda x: jnp.sin(x) * float(jax.config.jax_default_matmul_precision == "highest"),
    }
    wrapped = {name: wrap(f, min_bytes=1, inputs="all") for name, f in functions.items()}
    for now in 1.0, 2.0:
        scale = held["scale"] = config.scale = globals()["SCALE"] = now
        held["array"] *= now
        text.write_text(str(now))
        cached.cache_clear()
        with pytest.MonkeyPatch.context() as patch, jax.default_matmul_precision("highest" if now == 2 else "default"):
            patch.setenv("DEJAX_TEST_SCALE", str(now))
            for name, f in functions.items():
                want, got = (jax.grad(lambda x, g=g: g(x).sum())(x) for g in (f, wrapped[name]))
                np.testing.assert_allclose(got, want, rtol=1e-6, err_msg=name)


@pytest.mark.slow
def test_eager_effects_and_transformations():
    x = jnp.linspace(0, 1, 64).reshape(4, 16)
    body = offload(lambda x: jnp.sin(x) * x, min_bytes=1, inputs="all")
    want = jnp.cos(x) * x + jnp.sin(x)
    for got in (
        jax.vmap(jax.grad(lambda x: body(x).sum()))(x),
        jax.grad(lambda x: jax.vmap(body)(x).sum())(x),
        jax.vjp(body, x)[1](jnp.ones_like(x))[0],
        jax.jit(lambda pull: pull(jnp.ones_like(x))[0])(jax.vjp(body, x)[1]),
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    with jax.disable_jit():
        np.testing.assert_allclose(jax.grad(lambda x: body(x).sum())(x), want, rtol=1e-5, atol=1e-6)
    with jax.checking_leaks():
        np.testing.assert_allclose(jax.grad(lambda x: body(x).sum())(x), want, rtol=1e-5, atol=1e-6)
