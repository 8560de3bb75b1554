"""`scatter`, `scatter_add` and the row-sparse optimizers, against numpy and Optax."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from dejax.host_gather import (
    HostTable,
    Optimizer,
    RowGradient,
    TableClosedError,
    adagrad,
    adam,
    scatter,
    scatter_add,
    sgd,
    shardings,
    value_and_grad,
)

RNG = np.random.default_rng(0)
ROWS = RNG.standard_normal((12, 5)).astype(np.float32)
IDS = np.array([3, 11, 3, -1, 12, 0, 3], np.int32)
NEW = RNG.standard_normal((7, 5)).astype(np.float32)


@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.bool_, ml_dtypes.bfloat16], ids=str)
def test_scatter_keeps_the_last_of_equal_ids(dtype: object) -> None:
    want, new = (ROWS * 9).astype(dtype), (NEW * 9).astype(dtype)
    table = HostTable.from_numpy(want)
    for i, row in zip(IDS, new, strict=True):
        if 0 <= i < 12:
            want[i] = row
    written = scatter(table, IDS, new)
    np.testing.assert_array_equal(written.numpy().astype(np.float32), want.astype(np.float32))
    assert table.is_closed()
    with pytest.raises(TableClosedError, match="donated"):
        table[IDS]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 3, 4, 40])
def test_scatter_add(dtype: object, width: int) -> None:
    rows = RNG.standard_normal((12, width)).astype(dtype)
    new = RNG.standard_normal((7, width)).astype(np.float32)
    want = rows.astype(np.float32)
    for i, row in zip(IDS, new, strict=True):
        if 0 <= i < 12:
            want[i] += row
    got = scatter_add(HostTable.from_numpy(rows), IDS, new).numpy().astype(np.float32)
    np.testing.assert_allclose(
        got, want, rtol=1e-6 if dtype is np.float32 else 1e-2, atol=1e-6 if dtype is np.float32 else 1e-2
    )


def test_in_a_jitted_function_the_memory_stays() -> None:
    table = HostTable.from_numpy(ROWS)
    address = table._leaf.unsafe_buffer_pointer()

    def step(table: HostTable, ids: jax.Array) -> tuple[HostTable, jax.Array]:
        rows = table[ids]
        table = scatter_add(table, ids, jnp.ones_like(rows))
        table = scatter(table, ids[:1], table[ids[:1]] * 2)
        return table, table[ids].sum()

    compiled = jax.jit(step, donate_argnums=0, out_shardings=shardings((table, 0)))
    for _ in range(3):
        table, total = compiled(table, jnp.array([1, 2]))
    assert table._leaf.unsafe_buffer_pointer() == address
    want = ROWS.copy()
    for _ in range(3):
        want[[1, 2]] += 1
        want[1] *= 2
    np.testing.assert_allclose(table.numpy(), want, rtol=1e-6)
    np.testing.assert_allclose(total, want[[1, 2]].sum(), rtol=1e-5)


def test_in_a_scan() -> None:
    table = HostTable.from_numpy(ROWS)

    def run(table: HostTable, blocks: jax.Array) -> HostTable:
        return jax.lax.scan(lambda t, ids: (scatter_add(t, ids, t[ids]), None), table, blocks)[0]

    run = jax.jit(run, donate_argnums=0, out_shardings=shardings(table))
    want = ROWS.copy()
    want[[0, 1]] *= 2
    want[[1, 2]] *= 2
    np.testing.assert_allclose(run(table, jnp.array([[0, 1], [1, 2]])).numpy(), want, rtol=1e-6)


def test_bad_arguments() -> None:
    table = HostTable.from_numpy(ROWS)
    with pytest.raises(ValueError, match=r"rows for these ids must have shape \(7, 5\), got \(7, 4\)"):
        scatter(table, IDS, NEW[:, :4])
    with pytest.raises(TypeError, match="must be integers"):
        scatter(table, IDS * 1.0, NEW)
    with pytest.raises(TypeError, match="the table must be of float32, bfloat16 or float16, got int32"):
        scatter_add(HostTable.zeros((3, 5), np.int32), IDS, NEW)
    with pytest.raises(TypeError, match="must be a HostTable"):
        scatter(ROWS, IDS, NEW)
    with pytest.raises(ValueError, match="state must be"):
        adam(0.1).update(RowGradient(IDS, NEW), adam(0.1).init(HostTable.zeros((3, 5))), table)
    np.testing.assert_array_equal(table.numpy(), ROWS)
    same = scatter(table, np.zeros(0, np.int32), np.zeros((0, 5)))
    np.testing.assert_array_equal(same.numpy(), ROWS)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (sgd(lambda count: 0.1 / (count + 1)), optax.sgd(lambda count: 0.1 / (count + 1))),
        (adam(0.1, weight_decay=0.01), optax.adamw(0.1, weight_decay=0.01)),
    ],
    ids=["schedule", "adamw"],
)
def test_optimizers_against_optax_when_every_row_is_touched(
    ours: Optimizer, theirs: optax.GradientTransformation
) -> None:
    table, params = HostTable.from_numpy(ROWS), jnp.asarray(ROWS)
    state, other = ours.init(table), theirs.init(params)
    step = jax.jit(ours.update, donate_argnums=(1, 2), out_shardings=shardings((table, state)))
    for k in range(3):
        gradient = np.random.default_rng(k).standard_normal((12, 5)).astype(np.float32)
        half = np.concatenate([gradient * 0.25, gradient * 0.75])  # each row twice: duplicates are summed
        order = np.random.default_rng(k).permutation(24)
        ids = np.tile(np.arange(12), 2)[order]
        table, state = step(RowGradient(jnp.asarray(ids, jnp.int32), jnp.asarray(half[order])), state, table)
        updates, other = theirs.update(jnp.asarray(gradient), other, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(table.numpy(), params, rtol=2e-5, atol=2e-6)
    assert int(state.step) == 3


def test_untouched_rows_stay() -> None:
    table = HostTable.from_numpy(ROWS)
    optimizer = adam(0.1)
    table, state = optimizer.update(RowGradient(jnp.array([2]), jnp.ones((1, 5))), optimizer.init(table), table)
    changed = np.flatnonzero((table.numpy() != ROWS).any(1))
    np.testing.assert_array_equal(changed, [2])
    assert state.second is not None and np.flatnonzero(state.second.numpy().any(1)).tolist() == [2]


def test_updates_are_deterministic() -> None:
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 4, 5000, np.int32))
    values = jnp.asarray(np.random.default_rng(1).standard_normal((5000, 5)), jnp.float32)
    results = [scatter_add(HostTable.from_numpy(ROWS), ids, values).numpy().tobytes() for _ in range(3)]
    assert len(set(results)) == 1


def test_a_step_that_fails_loses_nothing() -> None:
    table = HostTable.from_numpy(ROWS)

    @jax.jit
    def bad(table: HostTable) -> HostTable:
        raise RuntimeError("while tracing")

    with pytest.raises(RuntimeError, match="while tracing"):
        jax.jit(bad, donate_argnums=0)(table)
    np.testing.assert_array_equal(table.numpy(), ROWS)


def test_checkpoint(tmp_path: Path) -> None:
    # A table is saved as any array, from its view, and comes back by its file.
    table = scatter(HostTable.from_numpy(ROWS), np.array([1]), np.zeros((1, 5)))
    np.save(tmp_path / "table.npy", table.numpy())
    again = HostTable.from_numpy(HostTable.from_npy(tmp_path / "table.npy").numpy())
    np.testing.assert_array_equal(scatter_add(again, np.array([1]), np.ones((1, 5))).numpy()[1], np.ones(5))


@pytest.mark.slow
def test_checkpoint_by_orbax(tmp_path: Path) -> None:
    # Tables together with device state in one checkpoint: as views, which Orbax writes without a copy on the device.
    checkpoint = pytest.importorskip("orbax.checkpoint")
    optimizer = adam(0.1)
    table = HostTable.from_numpy(ROWS)
    table, state = optimizer.update(RowGradient(IDS, NEW), optimizer.init(table), table)
    is_table = lambda value: isinstance(value, HostTable)  # noqa: E731
    tree = {"table": table, "state": state}
    with checkpoint.StandardCheckpointer() as writer:
        writer.save(tmp_path / "step", jax.tree.map(lambda x: x.numpy() if is_table(x) else x, tree, is_leaf=is_table))
    with checkpoint.StandardCheckpointer() as reader:
        kept = reader.restore(tmp_path / "step")
    moments = kept["state"]
    restored = type(state)(
        jnp.asarray(moments["step"]), *(HostTable.from_numpy(np.asarray(moments[k])) for k in ("first", "second"))
    )
    again, _ = optimizer.update(RowGradient(IDS, NEW), restored, HostTable.from_numpy(np.asarray(kept["table"])))
    table, _ = optimizer.update(RowGradient(IDS, NEW), state, table)
    np.testing.assert_array_equal(again.numpy(), table.numpy())


@pytest.mark.parametrize("width", [1024, 1025, 3000])
def test_wide_rows(width: int) -> None:
    """The CPU adds up 1,024 columns at a time."""
    rows, new = RNG.standard_normal((12, width)).astype(np.float32), RNG.standard_normal((7, width)).astype(np.float32)
    optimizer, sums = adagrad(0.1), np.zeros_like(rows)
    inside = (IDS >= 0) & (IDS < 12)
    np.add.at(sums, IDS[inside], new[inside])
    np.testing.assert_allclose(
        scatter_add(HostTable.from_numpy(rows), IDS, new).numpy(), rows + sums, rtol=1e-5, atol=1e-5
    )
    table = HostTable.from_numpy(rows)
    table, _ = optimizer.update(RowGradient(IDS, new), optimizer.init(table), table)
    want = rows - np.where(sums != 0, 0.1 * sums / (np.sqrt(0.1 + sums**2) + 1e-7), 0)
    np.testing.assert_allclose(table.numpy(), want, rtol=1e-5, atol=1e-5)


def test_wide_integers_are_not_cut() -> None:
    rows = np.array([[2**40 + 3, -(2**40)]])
    small = scatter(HostTable.zeros((2, 2), np.int8), np.array([1]), rows)
    np.testing.assert_array_equal(small.numpy()[1], rows[0].astype(np.int8))
    floats = scatter_add(HostTable.zeros((2, 2)), np.array([1]), rows)
    np.testing.assert_allclose(floats.numpy()[1], rows[0], rtol=1e-6)
    with pytest.raises(TypeError, match="64-bit mode"):
        scatter(HostTable.zeros((2, 2), np.int64), np.array([1]), rows)


def test_rows_without_elements() -> None:
    """Reshaping to -1 rows of no elements has no meaning: each update raised a ZeroDivisionError."""
    ids = jnp.array([[0, 2], [2, 9]])
    table = HostTable.zeros((3, 0))
    table = scatter_add(scatter(table, ids, np.zeros((2, 2, 0))), ids, np.zeros((2, 2, 0)))
    state = (rule := adam(0.1)).init(table)
    _, gradient = value_and_grad(lambda table: table[ids].sum())(table)
    assert gradient.values.shape == (4, 0)
    table, state = rule.update(gradient, state, table)
    assert table.shape == (3, 0) and int(state.step) == 1
