"""The kernel templates' contract on a GPU, against float64: every case of the interpreted tests, and real sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.pallas.reference import GEMMS, TF32, TRAVERSALS, WEIGHT_GRADIENTS, Gemm, Traversal, WeightGradient, scaled

pytestmark = pytest.mark.gpu

# Of the largest entry: bfloat16 keeps 7 bits of each operand.
LOW = 2e-2


def tolerance(case) -> float | None:
    if case.dtype != jnp.float32 or case.precision == "bf16":
        return LOW
    return TF32 if case.precision == "tf32" else None


def types(positions: int, count: int, seed: int = 0) -> tuple[int, ...]:
    """Skewed counts of types, some of them empty."""
    rng = np.random.default_rng(seed)
    return tuple(int(c) for c in rng.multinomial(positions, rng.dirichlet(np.full(count, 0.2))))


def degrees(rows: int, entries: int, long_segment: int, seed: int = 0) -> tuple[int, ...]:
    """Skewed degrees with empty rows and one row of `long_segment` entries."""
    rng = np.random.default_rng(seed)
    weight = rng.pareto(1.5, rows) * (rng.random(rows) > 0.1)
    found = rng.multinomial(entries, weight / weight.sum())
    found[rows // 2] = long_segment
    return tuple(int(d) for d in found)


LARGE_GEMMS = {
    f"{k} to {n}, {heads} heads, {precision}, {np.dtype(dtype).name}, block {block}": Gemm(
        counts=types(60_000, 64),
        rows=20_000,
        k=k,
        n=n,
        heads=heads,
        precision=precision,
        dtype=dtype,
        block=block,
        padding=100,
    )
    for k, n, heads, precision, dtype, block in [
        (64, 64, None, "tf32", jnp.float32, 64),
        (64, 64, None, "f32", jnp.float32, 32),
        (64, 64, None, "bf16", jnp.float32, 128),
        (64, 64, 1, "tf32", jnp.bfloat16, 64),
        (128, 64, 1, "tf32", jnp.float32, 128),
        (300, 200, 1, "tf32", jnp.float32, 64),
        (300, 200, 1, "tf32", jnp.bfloat16, 64),
        (16, 16, 4, "tf32", jnp.float32, 64),
        (17, 100, 3, "f32", jnp.float32, 32),
    ]
}
LARGE_WEIGHT_GRADIENTS = {
    f"{k} by {n}, {heads} heads, {precision}, {np.dtype(dtype).name}": WeightGradient(
        counts=types(60_000, 64),
        rows=20_000,
        k=k,
        n=n,
        heads=heads,
        precision=precision,
        dtype=dtype,
        padding=100,
        rows_per_split=None,
    )
    for k, n, heads, precision, dtype in [
        (64, 64, None, "tf32", jnp.float32),
        (64, 64, None, "f32", jnp.float32),
        (64, 64, None, "tf32", jnp.bfloat16),
        (16, 16, 4, "tf32", jnp.float32),
        (100, 200, 1, "bf16", jnp.float32),
    ]
}
LARGE_TRAVERSALS = {
    f"{kind}, {heads} heads of {width}, chunk {chunk}, {np.dtype(dtype).name}": Traversal(
        kind=kind,
        degrees=degrees(3000, 30_000, 5000),
        heads=heads,
        width=width,
        dtype=dtype,
        chunk=chunk,
        nodes=3000,
        schedule=None,
    )
    for kind, heads, width, chunk, dtype in [
        ("attention", 1, 64, 1024, jnp.float32),
        ("attention", 8, 8, 1024, jnp.float32),
        ("attention", 4, 32, 64, jnp.bfloat16),
        ("attention", 3, 17, None, jnp.float32),
        ("sum", 1, 64, 1024, jnp.float32),
        ("sum", 1, 1000, 1024, jnp.float32),
        ("max", 1, 100, 256, jnp.float32),
        ("edges", 4, 64, 1024, jnp.float32),
        ("scalars", 1, 1, 1024, jnp.float32),
    ]
}


@pytest.mark.parametrize("name", [*GEMMS, *LARGE_GEMMS])
def test_grouped_gemm(name):
    case = (GEMMS | LARGE_GEMMS)[name]
    a = case.arrays()
    case.check(jax.jit(case.run)(a), a, tolerance(case))


@pytest.mark.parametrize("name", [*WEIGHT_GRADIENTS, *LARGE_WEIGHT_GRADIENTS])
def test_grouped_weight_gradient(name):
    case = (WEIGHT_GRADIENTS | LARGE_WEIGHT_GRADIENTS)[name]
    a = case.arrays()
    run = jax.jit(case.run)
    result = run(a)
    case.check(result, a, tolerance(case))
    for first, second in zip(jax.tree.leaves(result), jax.tree.leaves(run(a)), strict=True):
        assert np.array_equal(np.asarray(first, np.float32), np.asarray(second, np.float32)), "two runs differ"


@pytest.mark.parametrize("name", [*TRAVERSALS, *LARGE_TRAVERSALS])
def test_traverse(name):
    case = (TRAVERSALS | LARGE_TRAVERSALS)[name]
    a = case.arrays()
    run = jax.jit(case.run)
    result = run(a)
    limit = 2e-3 if case.spread > 1 else LOW if case.dtype != jnp.float32 else None
    case.check(result, a, limit)
    again = run(a)
    assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(result), jax.tree.leaves(again), strict=True))


@pytest.mark.parametrize("name, operand", [("attention, long segments", "z"), ("attention, long segments", "score")])
def test_traverse_vmap(name, operand):
    case = scaled(TRAVERSALS[name])
    samples = [case.arrays(seed) for seed in (0, 1, 2)]
    stacked = {n: np.stack([s[n] for s in samples]) if n == operand else v for n, v in samples[0].items()}
    run = jax.jit(jax.vmap(case.run, in_axes=({n: 0 if n == operand else None for n in stacked},)))
    rows, entries = run(stacked)
    for i, s in enumerate(samples):
        one = {n: s[n] if n == operand else v for n, v in samples[0].items()}
        case.check((tuple(r[i] for r in rows), tuple(v[i] for v in entries)), one)


@pytest.mark.parametrize("operand", ["x", "w"])
def test_grouped_gemm_vmap(operand):
    case = GEMMS["leaky relu, dot"]
    samples = [case.arrays(seed) for seed in (0, 1, 2)]
    stacked = {n: np.stack([s[n] for s in samples]) if n == operand else v for n, v in samples[0].items()}
    run = jax.jit(jax.vmap(case.run, in_axes=({n: 0 if n == operand else None for n in stacked},)))
    y, dot = run(stacked)
    for i, s in enumerate(samples):
        case.check((y[i], dot[i]), {n: s[n] if n == operand else v for n, v in samples[0].items()}, TF32)


def test_rows_past_2_to_the_32_bytes():
    """Rows of a table of 5 GB are read where they are, by a product and by a traversal."""
    rows, width = 20_000_000, 64
    table = jax.jit(lambda: jnp.zeros((rows, width), jnp.float32).at[jnp.array([5, rows - 3])].set(1.0))()
    index = jnp.array([rows - 3, 5, 7, rows - 1], jnp.int32)
    expected = np.array([1, 1, 0, 0], np.float32)[:, None] * np.ones((4, width))
    from dejax import pallas as kernels

    tiles = jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32)
    groups = kernels.GemmGroups(jnp.array([0, 4], jnp.int32), 4, lambda _: tiles, 16)
    y = kernels.grouped_gemm(kernels.GroupedGemm(table, jnp.eye(width)[None], groups, x_index=index))
    assert np.array_equal(y, expected)
    (total,), _ = kernels.traverse(
        lambda t: ((t,), ()),
        None,
        [table],
        [kernels.TileOperand("indexed", 0)],
        index_tables=[index],
        reductions=[kernels.Reduction("sum", (width,))],
        segments=kernels.RowSegments(offsets=jnp.arange(5, dtype=jnp.int32), num_entries=4, num_rows=4),
    )
    assert np.array_equal(total, expected)
