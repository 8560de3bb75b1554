"""`gather` against numpy, on whatever device is the default: the CPU handler here, the CUDA kernels on a GPU."""

import re
from concurrent.futures import ThreadPoolExecutor

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

from dejax import _native
from dejax.host_gather import HostTable, check_errors, gather

ON_GPU = jax.default_backend() == "gpu"


def reference(rows: np.ndarray, ids: np.ndarray, clip: bool = False, fill: object = 0) -> np.ndarray:
    out = np.full(ids.shape + rows.shape[1:], np.asarray(fill).astype(rows.dtype))
    for at in np.ndindex(ids.shape):
        i = int(ids[at])
        i = min(max(i, 0), len(rows) - 1) if clip and len(rows) else i
        if 0 <= i < len(rows):
            out[at] = rows[i]
    return out


def random_rows(shape: tuple[int, ...], dtype: object, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).integers(0, 100, shape)
    kind = np.dtype(dtype)
    return values % 2 == 1 if kind.kind == "b" else values.astype(kind)


def same_bits(got: jax.Array, want: np.ndarray) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    assert np.asarray(got).tobytes() == want.tobytes()


@settings(max_examples=25)
@given(
    rows=st.integers(0, 9),
    row=st.lists(st.integers(0, 9), max_size=2).map(tuple),
    ids_shape=st.lists(st.integers(0, 4), max_size=2).map(tuple),
    mode=st.sampled_from(["fill", "clip"]),
    order=st.sampled_from(["given", "sorted", "auto"]),
    dtype=st.sampled_from(
        ["bool", "int8", "uint16", "float32", "complex64", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
    ),
    seed=st.integers(0, 99),
)
def test_any_shape(rows: int, row: tuple, ids_shape: tuple, mode: str, order: str, dtype: object, seed: int) -> None:
    values = random_rows((rows, *row), dtype, seed)
    ids = np.random.default_rng(seed).integers(-3, rows + 3, ids_shape, np.int32)
    got = gather(HostTable.from_numpy(values), ids, mode=mode, order=order, fill_value=3)
    same_bits(got, reference(values, ids, mode == "clip", 3))


@pytest.mark.parametrize("width", [1, 3, 4, 12, 16, 37, 100, 128, 513])
@pytest.mark.parametrize("order", ["given", "sorted"])
def test_widths_and_many_ids(width: int, order: str) -> None:
    values = random_rows((1000, width), np.float32)
    ids = np.random.default_rng(1).integers(-5, 1005, 3001, np.int32)
    ids[500:900] = 7  # a row that many ids name
    got = gather(HostTable.from_numpy(values), ids, order=order, num_sms=3)
    inside = (ids >= 0) & (ids < 1000)
    np.testing.assert_array_equal(got, np.where(inside[:, None], values[np.clip(ids, 0, 999)], 0))


def test_wide_types_and_ids() -> None:
    values = random_rows((11, 5), np.float64)
    table = HostTable.from_numpy(values)
    with pytest.raises(TypeError, match="64-bit mode"):
        table[np.array([0])]
    np.testing.assert_array_equal(gather(table, np.array([3, 11]), out_dtype=np.float32), [values[3], [0] * 5])
    with jax.enable_x64(True):
        ids = np.array([3, 10, -1, 0, 11, 2**63 - 1, -(2**63), 2**32 + 3], np.int64)
        for clip in (False, True):
            for order in ("given", "sorted"):
                got = gather(table, ids, mode="clip" if clip else "fill", order=order)
                same_bits(got, reference(values, ids, clip))
    # Outside of the 64-bit mode jax would drop the upper bits, and 2**32 + 3 would be row 3.
    same_bits(gather(HostTable.from_numpy(values.astype(np.float32)), ids), reference(values.astype(np.float32), ids))


@pytest.mark.parametrize("out", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "dtype",
    ["float32", "float16", "int8", "uint8", "int16", "uint16", "int32", "float64", ml_dtypes.bfloat16,
     ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2],
    ids=str,
)  # fmt: skip
def test_conversion(dtype: object, out: str) -> None:
    kind = np.dtype(dtype)
    values = random_rows((37, 11), kind)
    target = np.dtype(getattr(ml_dtypes, out, None) or out)
    ids = np.array([0, 36, -1, 5, 5], np.int32)
    got = gather(HostTable.from_numpy(values), ids, out_dtype=target, fill_value=2)
    want = np.where((ids >= 0)[:, None], values[ids].astype(np.float32), 2).astype(target)
    same_bits(got, want)


@pytest.mark.parametrize(
    "dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2], ids=str
)
def test_conversion_of_every_value(dtype: object) -> None:
    kind = np.dtype(dtype)
    bits = np.arange(1 << 8 * kind.itemsize, dtype=np.uint32).astype(f"u{kind.itemsize}")
    values = bits.view(kind).reshape(-1, 1)
    got = np.asarray(gather(HostTable.from_numpy(values), np.arange(len(values)), out_dtype=np.float32))
    want = values.astype(np.float32)
    # XLA's threads on the CPU flush subnormal floats to zero, which bfloat16 has.
    normal = ~(np.abs(want) < np.finfo(np.float32).tiny)
    np.testing.assert_array_equal(got[normal], want[normal])
    if kind.itemsize == 2:  # conversion from float32 rounds to nearest, ties to even
        rng = np.random.default_rng(0)
        numbers = (rng.standard_normal(4096) * 10.0 ** rng.integers(-9, 9, 4096)).astype(np.float32).reshape(-1, 1)
        numbers[:5, 0] = [np.inf, -np.inf, np.nan, 65519.9, 65520.0]
        got = gather(HostTable.from_numpy(numbers), np.arange(4096), out_dtype=kind)
        with np.errstate(over="ignore"):
            want = numbers.astype(kind).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(got).astype(np.float32), want)


def test_scale_of_int8_rows() -> None:
    values = np.random.default_rng(0).integers(-128, 128, (20, 6)).astype(np.int8)
    table = HostTable.from_numpy(values)
    scales = np.random.default_rng(1).random(20).astype(np.float32)
    ids = np.array([[3, 19], [-1, 0]])
    want = np.where((ids >= 0)[..., None], values[ids] * scales[ids][..., None], 0)
    np.testing.assert_allclose(gather(table, ids, scale=scales), want, rtol=1e-6)
    np.testing.assert_allclose(gather(table, ids, scale=0.5), np.where((ids >= 0)[..., None], values[ids] * 0.5, 0))
    assert gather(table, ids, scale=scales, out_dtype=jnp.bfloat16).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match=r"`scale` must have shape \(\) or \(20,\)"):
        gather(table, ids, scale=np.ones(3))


@pytest.mark.parametrize("order", ["given", "sorted"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8], ids=str)
@pytest.mark.parametrize("width", [1, 5, 32])
def test_mean(dtype: object, order: str, width: int) -> None:
    values = random_rows((30, width), dtype)
    ids = np.random.default_rng(0).integers(-8, 34, (6, 7), np.int32)
    ids[2] = -1
    inside = ((ids >= 0) & (ids < 30))[..., None]
    rows = values[np.clip(ids, 0, 29)].astype(np.float64)
    count = inside.sum(1)
    want = np.where(count > 0, (rows * inside).sum(1) / np.maximum(count, 1), 9)
    table = HostTable.from_numpy(values)
    got = gather(table, ids, reduce="mean", fill_value=9, order=order, out_dtype=np.float32)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    got = gather(table, ids, reduce="mean", mode="clip", order=order, out_dtype=np.float32)
    np.testing.assert_allclose(got, rows.mean(1), rtol=1e-6)


def test_mode_raise() -> None:
    values = random_rows((5, 3), np.float32)
    table = HostTable.from_numpy(values)
    assert gather(table, np.array([4, 0]), mode="raise").shape == (2, 3)
    check_errors()
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError, IndexError), match="id 5 .*out of range"):
        jax.block_until_ready(gather(table, np.array([0, 5]), mode="raise"))
        check_errors()
    check_errors()


def test_bad_arguments() -> None:
    table = HostTable.from_numpy(random_rows((5, 3), np.float32))
    ids = np.array([0])
    with pytest.raises(TypeError, match="`ids` must be integers, got float32"):
        gather(table, np.zeros(2, np.float32))
    with pytest.raises(TypeError, match="`ids` must be integers, got a mask; use jnp.nonzero"):
        gather(table, np.zeros(2, bool))
    with pytest.raises(TypeError, match="signed integers, got uint32"):
        gather(table, np.zeros(2, np.uint32))
    for options in ({"mode": "wrap"}, {"order": "random"}, {"reduce": "sum"}):
        with pytest.raises(ValueError, match="must be one of"):
            gather(table, ids, **options)
    with pytest.raises(ValueError, match="`num_sms` must be at least 1"):
        gather(table, ids, num_sms=0)
    with pytest.raises(ValueError, match="`fill_value` must be a scalar"):
        gather(table, ids, fill_value=[1, 2])
    with pytest.raises(ValueError, match="last axis to average"):
        gather(table, np.int32(3), reduce="mean")
    with pytest.raises(TypeError, match="`out_dtype` must be"):
        gather(table, ids, out_dtype=np.int8)
    with pytest.raises(TypeError, match="cannot be converted"):
        gather(HostTable.from_numpy(np.ones((2, 2), np.complex64)), ids, out_dtype=np.float32)
    assert table[[]].shape == (0, 3)
    assert table[np.zeros((2, 0), np.int8)].shape == (2, 0, 3)


def test_vmap_over_ids() -> None:
    values = random_rows((9, 4), np.float32)
    table = HostTable.from_numpy(values)
    ids = np.random.default_rng(0).integers(-2, 11, (3, 4, 5), np.int32)
    want = reference(values, ids)
    mapped = jax.vmap(jax.vmap(lambda table, ids: table[ids], (None, 1), 1), (None, 0))
    np.testing.assert_array_equal(mapped(table, jnp.asarray(ids)), want)
    np.testing.assert_array_equal(jax.jit(mapped)(table, jnp.asarray(ids)), want)
    text = jax.jit(mapped).lower(table, jnp.asarray(ids)).as_text()
    assert text.count("@dejax_table_gather") == 1


def test_gradients_of_everything_else() -> None:
    values = random_rows((9, 4), np.float32)
    table = HostTable.from_numpy(values)
    ids = jnp.array([1, 1, 8, -1])

    def loss(w: jax.Array, table: HostTable) -> jax.Array:
        return jnp.tanh(table[ids] @ w).sum()

    w = jnp.full((4,), 0.01)
    want = jax.grad(lambda w: jnp.tanh(reference(values, np.asarray(ids)) @ w).sum())(w)
    np.testing.assert_allclose(jax.grad(loss)(w, table), want, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.grad(jax.checkpoint(loss)))(w, table), want, rtol=1e-6)
    np.testing.assert_allclose(jax.jvp(lambda w: loss(w, table), (w,), (w,))[1], want @ w, rtol=1e-5)
    jaxpr = str(jax.make_jaxpr(jax.grad(loss))(w, table))
    assert "f32[9,4]" not in jaxpr  # no dense cotangent


def test_threads_at_once() -> None:
    values = random_rows((1 << 10, 64), np.float32)
    table, f = HostTable.from_numpy(values), jax.jit(lambda table, ids: table[ids])
    blocks = np.random.default_rng(0).integers(0, len(values), (12, 1 << 11), np.int32)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda ids: np.asarray(f(table, ids)), blocks))
    for ids, got in zip(blocks, results, strict=True):
        np.testing.assert_array_equal(got, values[ids])


@pytest.mark.cpu_only("reads the program compiled for the CPU")
def test_the_table_is_not_copied() -> None:
    table = HostTable.zeros((1 << 12, 16))
    f = jax.jit(lambda t, ids: jax.lax.scan(lambda c, i: (c + t[i].sum(), None), 0.0, ids)[0])
    text = f.lower(table, jnp.zeros((3, 4), jnp.int32)).compile().as_text()
    assert [line for line in text.splitlines() if re.search(r"= u32\[4096,16\]\S* copy", line)] == []


@pytest.mark.parametrize("width", [1023, 1025, 2500])
def test_means_of_wide_rows(width: int) -> None:
    """The CPU's handler sums 1,024 columns at a time."""
    values = random_rows((9, width), np.float32)
    ids = np.array([[3, -1, 8], [-1, -1, 9], [0, 0, 1]])
    inside = ((ids >= 0) & (ids < 9))[..., None]
    want = (values[np.clip(ids, 0, 8)] * inside).sum(1) / np.maximum(inside.sum(1), 1)
    np.testing.assert_allclose(gather(HostTable.from_numpy(values), ids, reduce="mean"), want, rtol=1e-6)


@pytest.mark.cpu_only("calls the CPU's handler")
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"out": (4, 9)}, "the result has other rows"),
        ({"out": (3, 8)}, "the result has other rows"),
        ({"out": (4, 8), "result": 2}, "the result has other rows"),
        ({"source": 1}, "the result has other rows"),
        ({"row_bytes": 30}, "a row must have whole elements"),
        ({"row_bytes": 16}, "other rows"),
        ({"result": 6}, "no such conversion"),
        ({"source": 77}, "no such conversion"),
        ({"scale": 3}, "a scale for each row, or one"),
        ({"fan_out": 0}, "attributes do not fit"),
        ({"fan_out": 3, "mean": True}, "multiple of the fan-out"),
        ({"peers": 2}, "the blocks of the cache do not fit"),
    ],
)
def test_sizes_are_checked_before_anything_is_read(changed: dict, message: str) -> None:
    """A program of another version might call the handler with sizes that do not fit."""
    _native.extension("a test")
    out = jax.ShapeDtypeStruct(changed.get("out", (4, 8)), jnp.float32)
    attributes = {
        "source": np.int64(0), "result": np.int64(0), "row_bytes": np.int64(32), "fan_out": np.int64(1), "mean": False,
        "clip": False, "raises": False, "split": False, "fill_value": np.float32(0),
        "fill": np.zeros(16, np.uint8), "kernel": np.int64(0), "grid": np.int64(1), "align": np.int64(16),
        "peers": np.int64(0),
    }  # fmt: skip
    attributes |= {k: np.int64(v) if k != "mean" else v for k, v in changed.items() if k not in ("out", "scale")}
    call = jax.ffi.ffi_call("dejax_table_gather", (out, jax.ShapeDtypeStruct((2,), jnp.uint32)))
    nothing = jnp.zeros(0, jnp.int32)
    scale = jnp.ones(changed.get("scale", 0))
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(
            call(jnp.zeros((6, 8), jnp.uint32), jnp.arange(4, dtype=jnp.int32), nothing, nothing, nothing, scale,
                 **attributes)
        )  # fmt: skip
