"""Every kernel configuration lowered to Triton for an H200 on a machine without a GPU."""

import functools
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from dejax import pallas as kernels
from dejax import segment
from dejax.pallas import _triton
from tests.cases import slow_but
from tests.described import gpus
from tests.pallas.equations import assert_extrema_keep_nan
from tests.pallas.reference import GEMMS, TRAVERSALS, WEIGHT_GRADIENTS, Gemm, Traversal, WeightGradient, scaled
from tests.pallas.test_contract import QUICK_GEMMS, QUICK_TRAVERSALS, QUICK_WEIGHT_GRADIENTS


def lower(function, *arguments, device: str = "NVIDIA H200") -> str:
    """The StableHLO of `function` for CUDA, whose custom calls hold the kernels' Triton IR, verified.

    No kernel may drop NaN.
    """
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arguments)
    with jax.sharding.use_abstract_mesh(gpus(device)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Triton.*", category=DeprecationWarning)
        traced = jax.jit(function).trace(*shapes)
        assert_extrema_keep_nan(traced.jaxpr.jaxpr)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


# Shapes as a model has them: nothing is run, so they need not be small.
LARGE_GEMMS = {
    f"{k} to {n}, {heads} heads, {precision}, block {block}": Gemm(
        counts=(300, 0, 90), k=k, n=n, heads=heads, precision=precision, block=block
    )
    for k, n, heads in [(64, 64, None), (128, 128, 1), (256, 256, None), (1024, 64, None), (8, 8, 8), (1, 1000, None)]
    for precision in ("f32", "tf32", "bf16")
    for block in (32, 64, 128)
    if block == 64 or precision == "tf32"
}
LARGE_TRAVERSALS = {
    f"{kind}, {heads} heads of {width}, {dtype.__name__}": Traversal(
        kind=kind, degrees=(9,) * 40, heads=heads, width=width, chunk=4, schedule=None, dtype=dtype
    )
    for kind, heads, width in [
        ("attention", 1, 64),
        ("attention", 8, 8),
        ("attention", 4, 16),
        ("attention", 8, 128),
        ("sum", 1, 64),
        ("sum", 1, 1000),
        ("max", 1, 4096),
        ("edges", 4, 64),
    ]
    for dtype in (jnp.float32, jnp.bfloat16)
}


@pytest.mark.parametrize(
    "name", slow_but(QUICK_GEMMS | {"1024 to 64, None heads, tf32, block 128"}, [*GEMMS, *LARGE_GEMMS])
)
def test_grouped_gemm(name):
    case = (GEMMS | LARGE_GEMMS)[name]
    text = lower(functools.partial(case.run, interpret=False), case.arrays())
    assert text.count("custom_call") >= (1 if sum(case.counts) + case.padding else 0)


@pytest.mark.parametrize("name", slow_but(QUICK_WEIGHT_GRADIENTS, WEIGHT_GRADIENTS))
def test_grouped_weight_gradient(name):
    case = WEIGHT_GRADIENTS[name]
    text = lower(functools.partial(case.run, interpret=False), case.arrays())
    assert text.count("custom_call") >= 1


@pytest.mark.parametrize(
    ("precision", "k", "n", "heads"),
    [("f32", 64, 64, 1), ("tf32", 256, 512, 1), ("bf16", 256, 512, 1), ("tf32", 8, 8, 8)],
)
def test_grouped_weight_gradient_of_model_widths(precision, k, n, heads):
    case = WeightGradient(counts=(300, 0, 90), k=k, n=n, heads=heads, precision=precision, rows_per_split=64)
    assert lower(functools.partial(case.run, interpret=False), case.arrays()).count("custom_call") >= 2


@pytest.mark.parametrize(
    "name", slow_but(QUICK_TRAVERSALS | {"attention, 8 heads of 128, float32"}, [*TRAVERSALS, *LARGE_TRAVERSALS])
)
def test_traverse(name):
    case = (TRAVERSALS | LARGE_TRAVERSALS)[name]
    text = lower(functools.partial(case.run, interpret=False), case.arrays())
    assert text.count("custom_call") == 1  # rows, chunks of long segments and their merging


@pytest.mark.parametrize(
    "case", [GEMMS["leaky relu, dot"], WEIGHT_GRADIENTS["plain"], TRAVERSALS["attention, long segments"]]
)
def test_with_numbers_of_64_bits_about(case):
    arrays = case.arrays()
    with jax.enable_x64(True):
        assert "custom_call" in lower(functools.partial(case.run, interpret=False), arrays)


@pytest.mark.parametrize(("rows", "fits"), [(2**24, True), (2**24 + 1, False)])
def test_offsets_of_elements_of_8_bits(rows, fits, monkeypatch):
    """Pallas' lowering takes signed offsets of 32 bits up to 2^32 bytes: beyond 2^31 elements they were negative."""
    monkeypatch.setenv("DEJAX_LOWERING", "pallas")

    def examples(data, ids):  # each of them fits
        return jax.vmap(lambda x: segment.segment_sum(x, ids, 9, True, backend="pallas"), 1)(data)

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    arguments = jax.ShapeDtypeStruct((rows, 2, 64), jnp.int8), jax.ShapeDtypeStruct((rows,), jnp.int32)
    if fits:
        assert "custom_call" in lower(examples, *arguments)
        return
    with pytest.raises(NotImplementedError, match=r"at most 2\^31 elements of 8 bits, got int8\[16777217, 128\]"):
        lower(examples, *arguments)


def test_the_dialect_is_not_looked_for_at_each_operation(monkeypatch):
    class Finder:
        missed: list[str] = []

        @classmethod
        def find_spec(cls, name, path=None, target=None):
            cls.missed.append(name)

    case = TRAVERSALS["sum"]
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert "custom_call" in lower(functools.partial(case.run, interpret=False), case.arrays())
    assert [name for name in Finder.missed if name.endswith(".tt")] == []


@pytest.mark.parametrize(
    "case", [GEMMS["leaky relu, dot"], WEIGHT_GRADIENTS["plain"], TRAVERSALS["attention, long segments"]]
)
def test_vmap(case):
    arrays = case.arrays()
    name = "z" if isinstance(case, Traversal) else "x"
    batched = arrays | {name: jnp.stack([arrays[name]] * 3)}
    axes = {n: 0 if n == name else None for n in arrays}
    assert "custom_call" in lower(jax.vmap(functools.partial(case.run, interpret=False), in_axes=(axes,)), batched)


@pytest.mark.parametrize("shape", [(), (3,), (4, 17)])
def test_map_entries(shape):
    def run(x, y, index):
        return kernels.map_entries(
            lambda a, b: (a * b,), [x, y], [kernels.TileOperand("indexed", 0), kernels.TileOperand("entry")],
            num_entries=100, index_tables=[index], outputs=[(shape, jnp.bfloat16)], interpret=False,
        )  # fmt: skip

    text = lower(run, jnp.zeros((7, *shape)), jnp.zeros((100, *shape)), jnp.zeros((100,), jnp.int32))
    assert "custom_call" in text


@pytest.mark.parametrize(
    ("precision", "k", "n", "dtype"),
    slow_but(
        [("f32", 64, 64, "float32"), ("tf32", 256, 512, "bfloat16"), ("bf16", 3, 1, "float16")],
        [
            (precision, k, n, dtype)
            for precision in ("f32", "tf32", "bf16")
            for k, n in [(64, 64), (100, 37), (256, 512), (3, 1)]
            for dtype in ("float32", "bfloat16", "float16")
        ],
    ),
)
def test_row_products(precision, k, n, dtype):
    def run(x, z, y, mask):
        whole = kernels.row_products([x], y, precision=precision, interpret=False)
        return whole, kernels.row_products([x, z], y, total=True, mask=mask, precision=precision, interpret=False)

    x, z, y = (jnp.zeros((100_003, width), dtype) for width in (k, 64, n))
    assert lower(run, x, z, y, jnp.zeros(100_003, bool)).count("custom_call") >= 2


def test_sum_rows():
    def run(x, offsets, order):
        return kernels.sum_rows(x, offsets, order=order, interpret=False)

    assert "custom_call" in lower(
        run, jnp.zeros((122, 2, 64, 64)), jnp.zeros((28,), jnp.int32), jnp.zeros(122, jnp.int32)
    )


def test_tables_past_2_to_the_32_bytes_use_64_bit_offsets():
    case = scaled(TRAVERSALS["sum"], width=64)
    arrays = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), case.arrays())
    arrays["x"] = jax.ShapeDtypeStruct((20_000_000, 64), jnp.dtype(jnp.float32))  # 5.1 GB
    assert "custom_call" in lower(functools.partial(case.run, interpret=False), arrays)


@pytest.mark.parametrize("how", [lax.max, lambda x, y: lax.reduce_max(x, (0,)) + y, lambda x, y: jnp.clip(x, 0.0, y)])
def test_extrema_that_drop_nan_are_found(how):
    def kernel(x, out):
        at = (jnp.arange(16),)
        tile = _triton.load(x, at)
        _triton.store(out, at, how(tile, 2 * tile))

    with pytest.raises(AssertionError, match="dropper: .*f32"):
        lower(
            lambda x: _triton.pallas_call(
                kernel, name="dropper", num_programs=1, out_shape=[jax.ShapeDtypeStruct((16,), jnp.float32)],
                num_warps=1, num_stages=1, interpret=False,
            )(x),
            jnp.zeros(16),
        )  # fmt: skip
