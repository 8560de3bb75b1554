"""Outside of `jit` each call traces its function again, and memory stays constant."""

import dataclasses
import functools
import gc
import itertools
import os
import sys
import types
from typing import Any

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
@pytest.mark.parametrize("kind", ["one", "new"])
def test_ten_thousand_eager_steps_run_in_constant_memory(kind):
    assert growth(kind, 2000, 10_000, enough=3_000) < 3_000  # allocators and thread pools take some MB in all


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


def test_closures_over_changed_values_are_traced_anew():
    """Each closure has another value in the second call, which must not use the trace of the first."""
    x = jnp.linspace(0, 1, 64)
    held = {"scale": 2.0, "array": jnp.ones(64), "list": [1.0], "numpy": np.ones(64)}

    class Config:
        scale = 2.0

    class Meta(type):
        pass

    class Inherited(Config, metaclass=Meta):
        @classmethod
        def by_class(cls, x):
            return cls.helper(jnp.sin(x))

        @classmethod
        def helper(cls, x):
            return x * cls.factor

    @dataclasses.dataclass(frozen=True)
    class Frozen:
        config: Any

        def __call__(self, x):
            return jnp.sin(x) * self.config.scale

        def method(self, x):
            return self(x)

    class Number(float):
        pass

    @functools.wraps(jnp.sin)
    def wraps(x):
        return jnp.sin(x) * SCALE

    def with_attribute(x):
        return jnp.sin(x) * with_attribute.scale

    def imports(x):
        from settings_of_a_test import scale

        return jnp.sin(x) * scale

    with_attribute.scale = 2.0
    settings = sys.modules["settings_of_a_test"] = types.ModuleType("settings_of_a_test")
    settings.scale = 2.0
    config, number = Config(), Number(1.0)
    frozen = Frozen(config)
    Meta.above = Inherited.factor = number.scale = 2.0
    lazy = types.ModuleType("lazy")
    lazy.__getattr__ = lambda name: held["scale"]
    scale, array, numpy = 2.0, jnp.ones(64), np.ones(64)

    def helper(x):
        return x * scale

    functions = {
        "number": lambda x: jnp.sin(x) * scale,
        "array": lambda x: jnp.sin(x) * array,
        "numpy": lambda x: jnp.sin(x) * numpy,
        "dict": lambda x: jnp.sin(x) * held["scale"] * held["array"] * held["list"][0],
        "numpy in a dict": lambda x: jnp.sin(x) * held["numpy"],
        "object": lambda x: jnp.sin(x) * config.scale,
        "class": lambda x: jnp.sin(x) * Config.scale,
        "helper": lambda x: helper(jnp.sin(x)),
        "partial": functools.partial(lambda s, x: jnp.sin(x) * s["scale"], held),
        "default": lambda x, c=config: jnp.sin(x) * c.scale,
        "global": lambda x: jnp.sin(x) * SCALE,
        "inherited": lambda x: jnp.sin(x) * Inherited.scale,
        "metaclass": lambda x: jnp.sin(x) * Inherited.above,
        "class method": Inherited.by_class,
        "class method called": lambda x: Inherited.by_class(x),
        "part of a frozen object": frozen,
        "method of a frozen object": frozen.method,
        "attribute of a number": lambda x: jnp.sin(x) * number.scale,
        "module with __getattr__": lambda x: jnp.sin(x) * lazy.scale,
        "wraps a library's": wraps,
        "attribute": with_attribute,
        "attribute of another": lambda x: jnp.sin(x) * with_attribute.scale,
        "import": imports,
        "getattr": lambda x: jnp.sin(x) * getattr(settings, "scale"),  # noqa: B009
        "globals": lambda x: jnp.sin(x) * globals()["SCALE"],
        "inner": lambda x: (lambda y: y * SCALE)(jnp.sin(x)),
    }
    offloaded = {name: offload(f, min_bytes=1, inputs="all") for name, f in functions.items()}

    def check(factor):
        for name, f in offloaded.items():
            got = jax.grad(lambda x, f=f: f(x).sum())(x)
            np.testing.assert_allclose(got, factor * np.cos(x), rtol=1e-5, err_msg=name)

    globals()["SCALE"] = 2.0
    array, numpy = 2 * array, 2 * numpy
    held["array"], held["numpy"] = held["array"], 2 * held["numpy"]
    check(2.0)
    globals()["SCALE"] = scale = config.scale = Config.scale = held["scale"] = 3.0
    settings.scale = with_attribute.scale = Meta.above = Inherited.factor = number.scale = 3.0
    array, numpy = 1.5 * array, 1.5 * numpy
    held["numpy"] *= 1.5
    check(3.0)


SCALE = 2.0


@pytest.mark.parametrize("wrap", [offload, region])
def test_what_python_reads_outside_of_the_function_is_read_in_each_call(tmp_path, wrap):
    """Files, folders, settings of libraries, caches, modules: nothing in the function's code or closure changes."""
    x, text, table = jnp.linspace(0, 1, 8), tmp_path / "scale.txt", tmp_path / "scale.npy"

    @functools.lru_cache
    def cached():
        return text.read_text()

    functions = {
        "file": lambda x: jnp.sin(x) * float(text.read_text()),
        "np.load": lambda x: jnp.sin(x) * np.load(table),
        "listdir": lambda x: jnp.sin(x) * (len(os.listdir(tmp_path)) - 1),
        "print options": lambda x: jnp.sin(x) * np.get_printoptions()["precision"],
        "str": lambda x: jnp.sin(x) * (len(str(np.float64(1 / 3)[None])) - 4),
        "cleared cache": lambda x: jnp.sin(x) * float(cached()),
        "environment": lambda x: jnp.sin(x) * float(os.environ["DEJAX_TEST_SCALE"]),
        "jax setting": lambda x: jnp.sin(x) * float(jax.config.jax_default_matmul_precision == "highest"),
    }
    wrapped = {name: wrap(f, min_bytes=1, inputs="all") for name, f in functions.items()}
    for scale in 1.0, 2.0:
        text.write_text(str(scale))
        cached.cache_clear()
        np.save(table, scale)
        if scale == 2.0:
            (tmp_path / "another").touch()
        precision = "highest" if scale == 2.0 else "default"
        with (
            np.printoptions(precision=int(scale)),
            pytest.MonkeyPatch.context() as patch,
            jax.default_matmul_precision(precision),
        ):
            patch.setenv("DEJAX_TEST_SCALE", str(scale))
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
