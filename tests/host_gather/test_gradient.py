"""`value_and_grad` records gathers whatever was compiled before, and refuses gathers that it cannot record."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.host_gather import (
    CachedTable,
    DeviceTable,
    HostTable,
    RowGradient,
    SplitTable,
    gather,
    gather_done,
    gather_start,
    prefetched_scan,
    scatter_add,
    value_and_grad,
)

RNG = np.random.default_rng(0)
ROWS = RNG.standard_normal((12, 5)).astype(np.float32)
IDS = np.array([3, 11, 3, -1, 12, 0, 3], np.int32)


def dense(gradient: RowGradient, rows: int = 12) -> np.ndarray:
    whole = np.zeros((rows, *gradient.values.shape[1:]), np.float32)
    ids = np.asarray(gradient.ids)
    inside = (ids >= 0) & (ids < rows)
    np.add.at(whole, ids[inside], np.asarray(gradient.values, np.float32)[inside])
    return whole


def of_squares(rows: np.ndarray, ids: np.ndarray = IDS) -> np.ndarray:
    """The gradient of the sum of squares of rows by ids."""
    count = np.bincount(ids[(ids >= 0) & (ids < len(rows))], minlength=len(rows))
    return 2 * rows * count[:, None]


def squares(table: HostTable, scale: jax.Array | float = 1.0) -> jax.Array:
    return scale * (table[IDS] ** 2).sum()


def test_a_loss_that_was_compiled_before_is_refused_not_wrong() -> None:
    table, loss = HostTable.from_numpy(ROWS), jax.jit(squares)
    loss(table)
    for _ in range(2):
        with pytest.raises(ValueError, match="compiles, maps or scans.*gather outside"):
            value_and_grad(loss)(table)
        with pytest.raises(ValueError, match="compiles, maps or scans"):
            jax.jit(value_and_grad(loss))(table)
    np.testing.assert_allclose(loss(table), (ROWS[[3, 11, 3, 0, 3]] ** 2).sum(), rtol=1e-6)


def test_recording_ends_with_an_error() -> None:
    table, loss = HostTable.from_numpy(ROWS), jax.jit(squares)
    with pytest.raises(ValueError, match="compiles"):
        value_and_grad(loss)(table)
    np.testing.assert_allclose(loss(table), (ROWS[[3, 11, 3, 0, 3]] ** 2).sum(), rtol=1e-6)
    value, gradient = value_and_grad(squares)(table)
    assert value.shape == () and gradient.ids.shape == (7,)


def test_a_compiled_part_without_the_table_may_be_used() -> None:
    table = HostTable.from_numpy(ROWS)
    part = jax.jit(lambda table, x: (x**2).sum() * len(table))  # uses the table, but gathers nothing
    part(table, jnp.ones(3))
    for _ in range(2):
        _, gradient = value_and_grad(lambda t: part(t, t[IDS]))(table)
        np.testing.assert_allclose(dense(gradient), 12 * of_squares(ROWS), rtol=1e-6)


def test_frozen_tables_may_be_used_in_any_way() -> None:
    table, frozen = HostTable.from_numpy(ROWS), HostTable.from_numpy(ROWS * 3)
    inner = jax.jit(lambda t: gather(t, IDS, scale=2.0))
    inner(frozen)

    def loss(table: HostTable, frozen: HostTable, *, other: HostTable) -> jax.Array:
        rows = table[IDS]
        looped = jax.lax.scan(lambda c, i: (c + frozen[i].sum(), None), 0.0, jnp.asarray(IDS))[0]
        chosen = jax.lax.cond(looped > 0, lambda t: t[IDS], lambda t: t[IDS], other)
        mapped = jax.vmap(lambda i: gather(frozen, i, scale=0.5))(jnp.asarray(IDS))
        ahead = gather_done(gather_start(frozen, IDS))
        return (rows * (inner(frozen) + chosen + mapped + ahead + jax.checkpoint(lambda t: t[IDS])(frozen))).sum()

    want = np.zeros_like(ROWS)
    np.add.at(want, IDS[(IDS >= 0) & (IDS < 12)], (3 * (2 + 0.5 + 1 + 1) + 1) * ROWS[IDS[(IDS >= 0) & (IDS < 12)]])
    _, gradient = jax.jit(value_and_grad(loss))(table, frozen, other=table)
    np.testing.assert_allclose(dense(gradient), want, rtol=1e-5)
    # The same outside of jit, without the loops: those must not close over a concrete table.
    _, gradient = value_and_grad(lambda t, frozen: (t[IDS] * inner(frozen)).sum())(table, frozen)
    np.testing.assert_allclose(dense(gradient), want * 6 / 14.5, rtol=1e-5)


INSIDE: dict[str, Callable] = {
    "jit": lambda t: jax.jit(squares)(t),
    "jit of a closure": lambda t: jax.jit(lambda i: t[i])(jnp.asarray(IDS)).sum(),
    "scan": lambda t: jax.lax.scan(lambda c, i: (c + t[i].sum(), None), 0.0, jnp.asarray(IDS))[0],
    "scan, other ids": lambda t: jax.lax.scan(lambda c, _: (c + t[IDS].sum(), None), 0.0, None, length=2)[0],
    "scan, as carry": lambda t: jax.lax.scan(lambda t, i: (t, t[i].sum()), t, jnp.asarray(IDS))[1].sum(),
    "cond": lambda t: jax.lax.cond(True, lambda t: t[IDS].sum(), lambda t: 0.0, t),
    "cond of a closure": lambda t: jax.lax.cond(jnp.ones(()) > 0, lambda: t[IDS].sum(), lambda: 0.0),
    "vmap": lambda t: jax.vmap(lambda i: t[i].sum())(jnp.asarray(IDS)).sum(),
    "vmap, other ids": lambda t: jax.vmap(lambda x: (t[IDS] * x).sum())(jnp.ones(3)).sum(),
    "while": lambda t: jax.lax.fori_loop(0, 3, lambda i, c: c + t[i].sum(), 0.0),
    "checkpoint": lambda t: jax.checkpoint(squares)(t),
    "written": lambda t: scatter_add(t, IDS, jnp.ones((7, 5)))[IDS].sum(),
}


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("jitted", [False, True])
def test_gathers_inside_a_transformation_are_refused_with_the_remedy(name: str, jitted: bool) -> None:
    f = value_and_grad(INSIDE[name])
    with pytest.raises(ValueError, match="gather outside of that and pass the rows on"):
        (jax.jit(f) if jitted else f)(HostTable.from_numpy(ROWS))


def test_what_has_no_gradient_is_refused() -> None:
    table = HostTable.from_numpy(ROWS)
    with pytest.raises(ValueError, match="gradient of scaled rows"):
        value_and_grad(lambda t: gather(t, IDS, scale=2.0).sum())(table)
    with pytest.raises(ValueError, match="gather_start: value_and_grad does not see"):
        value_and_grad(lambda t: gather_done(gather_start(t, IDS)).sum())(table)
    with pytest.raises(ValueError, match="prefetched_scan: value_and_grad does not see"):
        value_and_grad(lambda t: prefetched_scan(lambda c, r, _: (c + r.sum(), None), 0.0, t, IDS[:, None])[0])(table)
    with pytest.raises(TypeError, match=r"argument 0 must be given by position.*f\(table, ...\)"):
        value_and_grad(squares)(table=table)
    with pytest.raises(TypeError, match="argument 2 must be given by position"):
        value_and_grad(squares, argnums=(0, 2))(table, 1.0)
    with pytest.raises(ValueError, match="must be floats, got HostTable"):
        value_and_grad(lambda t: 0.0)(HostTable.zeros((2, 2), np.int32))


def test_negative_positions_and_tables_inside_pytrees() -> None:
    table = HostTable.from_numpy(ROWS)

    def loss(x: float, parameters: dict) -> jax.Array:
        return x * squares(parameters["table"], parameters["w"])

    parameters = {"table": table, "w": jnp.float32(3)}
    _, gradient = jax.jit(value_and_grad(loss, argnums=-1), static_argnums=0)(2.0, parameters)
    np.testing.assert_allclose(dense(gradient["table"]), 6 * of_squares(ROWS), rtol=1e-6)
    np.testing.assert_allclose(gradient["w"], 2 * (ROWS[[3, 11, 3, 0, 3]] ** 2).sum(), rtol=1e-6)


def test_one_table_in_two_positions_has_two_gradients() -> None:
    table = HostTable.from_numpy(ROWS)
    f = value_and_grad(lambda a, b: (a[IDS] * b[IDS[::-1]]).sum(), argnums=(1, 0))
    _, (of_b, of_a) = jax.jit(f)(table, table)
    where = (IDS >= 0) & (IDS < 12)
    rows = np.where(where[:, None], ROWS[np.clip(IDS, 0, 11)], 0)
    for got, ids, other in ((of_a, IDS, rows[::-1]), (of_b, IDS[::-1], rows)):
        want = np.zeros_like(ROWS)
        inside = (ids >= 0) & (ids < 12)
        np.add.at(want, ids[inside], other[inside])
        np.testing.assert_allclose(dense(got), want, rtol=1e-6)


def test_derivatives_inside_the_loss_and_second_derivatives() -> None:
    table, w = HostTable.from_numpy(ROWS), jnp.linspace(0.5, 1.5, 5)

    def stepped(table: HostTable, w: jax.Array) -> jax.Array:
        """The loss takes a step of gradient descent on w, which gathers as well."""
        inner = jax.grad(lambda w: ((table[IDS] @ w) ** 2).sum())
        return ((table[IDS] @ (w - 0.01 * inner(w))) ** 2).sum()

    def plain(rows: jax.Array, w: jax.Array) -> jax.Array:
        x = jnp.where(((IDS >= 0) & (IDS < 12))[:, None], rows[np.clip(IDS, 0, 11)], 0)
        inner = jax.grad(lambda w: ((x @ w) ** 2).sum())
        return ((x @ (w - 0.01 * inner(w))) ** 2).sum()

    _, gradient = jax.jit(value_and_grad(stepped))(table, w)
    np.testing.assert_allclose(dense(gradient), jax.grad(plain)(jnp.asarray(ROWS), w), rtol=1e-4, atol=1e-4)

    def penalty(table: HostTable) -> jax.Array:
        """The norm of a gradient of rows."""
        return (value_and_grad(lambda t: (t[IDS] ** 3).sum())(table)[1].values ** 2).sum()

    _, twice = value_and_grad(penalty)(table)
    count = np.bincount(IDS[(IDS >= 0) & (IDS < 12)], minlength=12)[:, None]
    np.testing.assert_allclose(dense(twice), 36 * ROWS**3 * count, rtol=1e-4, atol=1e-5)


def test_mapped_over_examples() -> None:
    table, blocks = HostTable.from_numpy(ROWS), jnp.asarray(RNG.integers(0, 12, (4, 3)))
    f = value_and_grad(lambda table, ids: (table[ids] ** 2).sum())
    value, gradient = jax.vmap(f, (None, 0))(table, blocks)
    assert value.shape == (4,) and gradient.ids.shape == (4, 3)
    np.testing.assert_allclose(gradient.values, 2 * ROWS[np.asarray(blocks)], rtol=1e-6)


def test_tables_come_out_of_a_loss_as_they_went_in() -> None:
    table, loss = HostTable.from_numpy(ROWS), lambda t: (squares(t), (t, t[IDS]))
    (_, (again, _)), _ = value_and_grad(loss, has_aux=True)(table)
    assert jax.tree.structure(again) == jax.tree.structure(table)
    np.testing.assert_array_equal(jax.jit(lambda t: t[IDS])(again), table[IDS])


def test_of_cached_tables() -> None:
    table = HostTable.from_numpy(ROWS)
    cached = CachedTable.from_ids(table, [3, 0])
    _, gradient = jax.jit(value_and_grad(squares))(cached)
    np.testing.assert_allclose(dense(gradient), of_squares(ROWS), rtol=1e-6)


@pytest.mark.parametrize("reduce", [None, "mean"])
@pytest.mark.parametrize("mode", ["fill", "clip"])
def test_options_of_recorded_gathers(reduce: str | None, mode: str) -> None:
    table, ids = HostTable.from_numpy(ROWS), np.array([[3, 99, -7], [0, 3, 3]])
    weight = RNG.standard_normal((2, 5) if reduce else (2, 3, 5)).astype(np.float32)

    def loss(table: HostTable) -> jax.Array:
        return (gather(table, ids, mode=mode, reduce=reduce, out_dtype=jnp.float32) * weight).sum()

    def plain(rows: jax.Array) -> jax.Array:
        inside = np.full(ids.shape, True) if mode == "clip" else (ids >= 0) & (ids < 12)
        x = jnp.where(inside[..., None], rows[np.clip(ids, 0, 11)], 0)
        x = x.sum(1) / inside.sum(1)[:, None] if reduce else x
        return (x * weight).sum()

    _, gradient = jax.jit(value_and_grad(loss))(table)
    np.testing.assert_allclose(dense(gradient), jax.grad(plain)(jnp.asarray(ROWS)), rtol=1e-5, atol=1e-6)


def test_several_tables_and_arrays_with_aux() -> None:
    first, second = HostTable.from_numpy(ROWS), HostTable.from_numpy(ROWS[:4] * 2)
    w = jnp.asarray(RNG.standard_normal(5), jnp.float32)
    ids = jnp.array([[1, 1], [3, -1]])

    def loss(a: HostTable, w: jax.Array, b: HostTable) -> tuple[jax.Array, jax.Array]:
        x = a[ids].sum(1) + gather(b, jnp.array([9, 0]), mode="clip") * gather(a, ids, reduce="mean")
        return jnp.tanh(x @ w).sum(), x

    def dense(a: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
        rows = jnp.where((ids >= 0)[..., None], a[ids], 0)
        mean = rows.sum(1) / (ids >= 0).sum(1)[:, None]
        return jnp.tanh((rows.sum(1) + b[jnp.array([3, 0])] * mean) @ w).sum()

    f = jax.jit(value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
    (value, aux), (ga, gw, gb) = f(first, w, second)
    want = jax.grad(dense, argnums=(0, 1, 2))(jnp.asarray(ROWS), w, jnp.asarray(ROWS[:4] * 2))
    assert aux.shape == (2, 5)
    np.testing.assert_allclose(value, dense(jnp.asarray(ROWS), w, jnp.asarray(ROWS[:4] * 2)), rtol=1e-5)
    np.testing.assert_allclose(gw, want[1], rtol=1e-5)
    for got, reference in ((ga, want[0]), (gb, want[2])):
        whole = np.zeros(reference.shape, np.float32)
        inside = np.asarray(got.ids) >= 0
        np.add.at(whole, np.asarray(got.ids)[inside], np.asarray(got.values)[inside])
        np.testing.assert_allclose(whole, reference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["device", "split"])
def test_rows_on_the_device_have_the_gradient_of_a_host_table(kind: str) -> None:
    rows, ids = np.arange(8, dtype=np.float32).reshape(4, 2), np.array([1, 3, 1, -1])
    table = DeviceTable.from_numpy(rows) if kind == "device" else SplitTable.from_numpy(rows, [1])
    f = jax.jit(value_and_grad(lambda t, w: ((t[ids] * w) ** 2).sum(), argnums=(0, 1)))
    got, want = f(table, 2.0), f(HostTable.from_numpy(rows), 2.0)
    jax.tree.map(np.testing.assert_array_equal, got, want)
