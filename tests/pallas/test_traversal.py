"""Traversals and maps over entries, interpreted, where a case of the contract does not show it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import pallas as kernels
from tests.cases import slow_but
from tests.pallas.reference import Traversal, chunk_arrays, decoded, interpreted


@pytest.mark.parametrize(
    ("operand", "chunk"), slow_but([("z", 3)], itertools.product(("score", "z", "bias", "gain"), (None, 3)))
)
def test_traverse_vmap(operand, chunk):
    case = Traversal(degrees=(2, 5, 0), heads=2, width=3, chunk=chunk)
    samples = [case.arrays(seed) for seed in (0, 1, 2)]
    stacked = {n: np.stack([s[n] for s in samples]) if n == operand else v for n, v in samples[0].items()}
    run = interpreted(jax.vmap(case.run, in_axes=({n: 0 if n == operand else None for n in stacked},)))
    rows, entries = run(stacked)
    for i, s in enumerate(samples):
        one = {n: s[n] if n == operand else v for n, v in samples[0].items()}
        case.check((tuple(r[i] for r in rows), tuple(v[i] for v in entries)), one)


def _weighted(scores: list[float], chunk: int | None = None):
    """max, sum of weights and weighted sum of 0, 1, 2, ... over one row with these scores."""
    n = len(scores)
    score, value = jnp.array(scores, jnp.float32), jnp.arange(n, dtype=jnp.float32)
    long_segments = None
    if chunk is not None:
        long_segments = kernels.LongSegmentTable(chunk, *chunk_arrays(np.array([0, n], np.int32), chunk, 0))
    reductions = [
        kernels.Reduction("max", ()), kernels.Reduction("weighted", (), 0), kernels.Reduction("weighted", (), 0)
    ]  # fmt: skip
    rows, _ = kernels.traverse(
        lambda s, v: ((s, jnp.ones((1, 1)), v), ()),
        None,
        [score, value],
        [kernels.TileOperand("entry")] * 2,
        reductions=reductions,
        schedule=kernels.TraversalSchedule(1, 2, 1, 1),
        segments=kernels.RowSegments(
            offsets=jnp.array([0, n], jnp.int32), num_entries=n, num_rows=1, long_segments=long_segments
        ),
    )
    return [float(r[0]) for r in rows]


@pytest.mark.parametrize("chunk", slow_but([None], [None, 2]))
def test_scores_of_minus_infinity_weigh_nothing(chunk):
    inf = float("inf")
    assert _weighted([-inf, 1.0, -inf, 1.0, -inf], chunk) == [1.0, 2.0, 4.0]
    assert _weighted([-inf, -inf, -inf], chunk) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("chunk", slow_but([None], [None, 2]))
def test_ties_count_the_largest(chunk):
    """How many entries are the largest, by element; none where nothing is above -inf."""
    inf = np.inf
    scores = np.array([[1, 5], [3, 5], [3, 2], [0, 5], [3, -inf], [2, -inf]], np.float32)
    offsets = np.array([0, 5, 6], np.int32)
    table = None if chunk is None else kernels.LongSegmentTable(chunk, *chunk_arrays(offsets, chunk, 1))
    rows, _ = kernels.traverse(
        lambda s: ((s, jnp.ones((1, 1, 2))), ()),
        None,
        [jnp.asarray(scores)],
        [kernels.TileOperand("entry")],
        reductions=[kernels.Reduction("max", (2,)), kernels.Reduction("ties", (2,), 0)],
        schedule=kernels.TraversalSchedule(1, 2, 1, 1),
        segments=kernels.RowSegments(
            offsets=jnp.asarray(offsets),
            num_entries=6,
            num_rows=2,
            long_segments=table,
        ),
    )
    assert np.array_equal(rows[0], [[3, 5], [2, 0]]) and np.array_equal(rows[1], [[3, 3], [1, 0]])


def test_values_that_are_not_finite_outside_a_row_do_not_leak():
    # The body divides by what it loads: slots without an entry load zeros and give infinities.
    rows, entries = kernels.traverse(
        lambda w: ((1 / w, 1 / w), (1 / w,)),
        None,
        [jnp.array([2.0, 4.0, 0.5])],
        [kernels.TileOperand("entry")],
        reductions=[kernels.Reduction("sum", ()), kernels.Reduction("max", ())],
        schedule=kernels.TraversalSchedule(2, 4, 1, 1),
        segments=kernels.RowSegments(offsets=jnp.array([0, 2, 2], jnp.int32), num_entries=3, num_rows=2),
        outputs=kernels.Outputs(entries=[((), jnp.float32)]),
    )
    assert np.array_equal(rows[0], [0.75, 0.0]) and np.array_equal(rows[1], [0.5, 0.0])
    assert np.array_equal(entries[0], [0.5, 0.25, 0.0])


def test_integer_operands_stay_integers():
    rows, _ = kernels.traverse(
        lambda i, flag: ((jnp.where(flag, i % 3, 0).astype(jnp.float32),), ()),
        None,
        [jnp.array([4, 5, 7], jnp.int32), jnp.array([True, True, False])],
        [kernels.TileOperand("entry"), kernels.TileOperand("entry")],
        reductions=[kernels.Reduction("sum", ())],
        segments=kernels.RowSegments(offsets=jnp.array([0, 3], jnp.int32), num_entries=3, num_rows=1),
    )
    assert float(rows[0][0]) == 3.0


@pytest.mark.parametrize("rows, entries", [(0, 0), (0, 3), (3, 0)])
def test_nothing_to_do(rows, entries):
    case = Traversal(degrees=(0,) * rows, padding=entries)
    a = case.arrays()
    case.check(interpreted(case.run)(a), a)


@pytest.mark.parametrize("shape", [(3, 17), *(pytest.param(s, marks=pytest.mark.slow) for s in ((16,), (20,)))])
def test_a_map_uses_rows_as_it_writes_them(shape):
    """Rows written in 16 bits: what is computed of them is of the rounded numbers, in which padding has no part."""
    x = np.random.default_rng(0).standard_normal((37, *shape)).astype(np.float32)

    def body(a):
        rows = total = kernels.rounded(a + 3, shape)
        for axis in reversed(range(2, rows.ndim)):
            total = jax.lax.reduce_sum(total, (axis,))
        return rows, total

    def run(x):
        return kernels.map_entries(
            body,
            [x],
            [kernels.TileOperand("entry")],
            num_entries=37,
            outputs=[(shape, jnp.float32), ((), jnp.float32)],
            row_scaled_outputs=(0,),
        )

    rows, total = interpreted(run)(x)
    assert isinstance(rows, kernels.RowScaled) and rows.shape == x.shape and rows.exponent.shape == (37, 1)
    found = np.asarray(rows.decode(), np.float64)
    np.testing.assert_allclose(found, x + 3, atol=2.0**-11 * np.abs(x + 3).max())
    np.testing.assert_allclose(total, found.reshape(37, -1).sum(1), rtol=1e-6)
    with pytest.raises(ValueError, match="row_scaled names output 1, which must be float32, got bfloat16"):
        kernels.map_entries(
            lambda a: (a, a), [x], [kernels.TileOperand("entry")], num_entries=37,
            outputs=[(shape, jnp.float32), (shape, jnp.bfloat16)], row_scaled_outputs=(1,), interpret=True,
        )  # fmt: skip


@pytest.mark.parametrize(("parts", "warps"), slow_but([(2, 1)], itertools.product((1, 2, 5), (1, 2))))
def test_tiles_side_by_side_in_rows_that_are_stored_longer(request, parts, warps):
    """20 features in 24: the zeros behind them are the last tile's padding, or a tile of their own."""
    if parts == 5 and jax.__version_info__ < (0, 11):
        # The inverse power of a row of zeros is 2^126. XLA multiplies it by the epilogue's 4 and 5 first: infinity.
        reason = "XLA of jax 0.10 multiplies constants first: 0 * infinity in empty rows"
        request.applymarker(pytest.mark.xfail(reason=reason))
    case = Traversal(kind="sum", width=20 // parts, schedule=(2, 4, warps), chunk=4)
    a = case.arrays()

    def run(a):
        return kernels.traverse(
            lambda x, weight: ((x * weight[:, :, None],), ()),
            lambda sums, tiles: (tuple(sums[0] * (i + 1) for i in range(parts)),),
            [a["x"], a["weight"]],
            [kernels.TileOperand("indexed", 0), kernels.TileOperand("entry")],
            index_tables=[a["index"]],
            reductions=[kernels.Reduction("sum", (case.width,))],
            schedule=kernels.TraversalSchedule(*case.schedule, 1),
            segments=kernels.RowSegments(
                offsets=a["offsets"],
                order=a["order"],
                num_entries=case.entries,
                num_rows=len(case.degrees),
                long_segments=kernels.LongSegmentTable(case.chunk, *a["chunks"]),
            ),
            outputs=kernels.Outputs(rows=[((20,), jnp.float32)], row_scaled=(0,)),
        )

    (rows,), _ = interpreted(run)(a)
    ((expected,), _) = case.reference(a)
    assert rows.shape == (len(case.degrees), 20) and rows.mantissa.shape == (len(case.degrees), 24)
    expected = np.concatenate([expected * (i + 1) for i in range(parts)], axis=1)
    np.testing.assert_allclose(decoded(rows), expected, atol=2.0**-10 * np.abs(expected).max())


def test_errors_say_what_to_do():
    x, offsets = jnp.zeros((3, 2)), jnp.array([0, 3], jnp.int32)
    entry = [kernels.TileOperand("entry")]
    common = {"segments": kernels.RowSegments(offsets=offsets, num_entries=3, num_rows=1)}
    same = lambda t: ((t,), ())  # noqa: E731
    with pytest.raises(ValueError, match=r"arrays\[0\] must have 4 entries"):
        kernels.traverse(
            same, None, [x], entry, segments=kernels.RowSegments(offsets=offsets, num_entries=4, num_rows=1)
        )
    with pytest.raises(ValueError, match="offsets must have num_rows"):
        kernels.traverse(
            same, None, [x], entry, segments=kernels.RowSegments(offsets=offsets, num_entries=3, num_rows=3)
        )
    with pytest.raises(ValueError, match="index tables"):
        kernels.traverse(same, None, [x], [kernels.TileOperand("indexed", 0)], **common)
    accesses = "entry, position, indexed, positioned, shared, slots, row"
    with pytest.raises(ValueError, match=f"access must be one of {accesses}"):
        kernels.traverse(same, None, [x], [kernels.TileOperand("column")], **common)
    columns = kernels.TileOperand("row", columns=(0, (2,)))
    with pytest.raises(ValueError, match=r"operands\[0\].columns must name columns of a 2-dimensional array by entry"):
        kernels.traverse(same, None, [jnp.zeros((1, 2))], [columns], **common)
    with pytest.raises(ValueError, match="score must be the number of a max reduction"):
        kernels.traverse(same, None, [x], entry, reductions=[kernels.Reduction("weighted", (2,))], **common)
    with pytest.raises(ValueError, match="body must return 1 reduction values and 0 entry outputs, got 0 and 0"):
        kernels.traverse(lambda t: ((), ()), None, [x], entry, reductions=[kernels.Reduction("sum", (2,))], **common)
    with pytest.raises(NotImplementedError, match="at most 4096 elements"):
        kernels.traverse(
            same, None, [jnp.zeros((3, 5000))], entry, reductions=[kernels.Reduction("sum", (5000,))], **common
        )
