"""Tables with rows on the device give the rows of a `HostTable`, and writes have its bits."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dejax.host_gather import (
    CachedTable,
    DeviceTable,
    HostTable,
    RowGradient,
    SplitTable,
    adagrad,
    adam,
    gather,
    scatter,
    scatter_add,
    sgd,
    shardings,
)
from tests.host_gather.rows import HOT, IDS, ROWS

RNG = np.random.default_rng(1)
MADE = {
    "device": lambda rows: DeviceTable.from_numpy(rows),
    "device array": lambda rows: DeviceTable.from_array(jnp.asarray(rows)),
    "split": lambda rows: SplitTable.from_numpy(rows, HOT),
    "all on the device": lambda rows: SplitTable.from_numpy(rows, np.arange(50)[::-1]),
    "all in host memory": lambda rows: SplitTable.from_numpy(rows, []),
    "parts": lambda rows: SplitTable.from_parts(
        HostTable.from_numpy(np.delete(rows, HOT, axis=0)), DeviceTable.from_numpy(rows[HOT]), HOT
    ),
}


@pytest.mark.parametrize("made", [*MADE][1:])
def test_rows_wherever_they_lie(made: str) -> None:
    """test_contract.py has all ways to read a table."""
    table = MADE[made](ROWS)
    np.testing.assert_array_equal(jax.jit(gather)(table, IDS), HostTable.from_numpy(ROWS)[IDS])
    np.testing.assert_array_equal(table.numpy(), ROWS)
    assert table.read_only and len(table) == 50 and table.nbytes == ROWS.nbytes


@pytest.mark.parametrize("dtype", [np.int8, np.float64, np.uint16, np.bool_, ml_dtypes.float8_e4m3fn, np.float16])
@pytest.mark.parametrize(
    "made", ["split", *(pytest.param(m, marks=pytest.mark.slow) for m in ("device", "device array"))]
)
def test_dtypes(made: str, dtype: type) -> None:
    if made == "device array" and dtype is np.float64:
        pytest.skip("jax has no float64 here")
    rows = RNG.integers(0, 2, (50, 2, 3)).astype(dtype)
    table = MADE[made](rows)
    np.testing.assert_array_equal(table.numpy(), rows)
    if dtype is np.bool_:
        np.testing.assert_array_equal(table[IDS[:3]], rows[IDS[:3]])
    else:
        np.testing.assert_array_equal(gather(table, IDS[:3], out_dtype=jnp.float32), rows[IDS[:3]].astype(np.float32))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_empty_tables(shape: tuple[int, int]) -> None:
    rows = np.zeros(shape, np.float32)
    for table in (DeviceTable.from_numpy(rows), SplitTable.from_numpy(rows, np.arange(shape[0])[:1])):
        np.testing.assert_array_equal(table[np.array([0, -1])], np.zeros((2, shape[1])))
        assert table.numpy().shape == shape


def test_a_memory_map_is_copied_block_by_block(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dejax.host_gather.tables.placed._BLOCK_BYTES", 100)
    np.save(tmp_path / "rows.npy", ROWS)
    table = SplitTable.from_numpy(np.load(tmp_path / "rows.npy", mmap_mode="r"), HOT)
    np.testing.assert_array_equal(table.numpy(), ROWS)


def test_gradient_of_the_rest_and_closing() -> None:
    table = SplitTable.from_numpy(ROWS, HOT)
    gradient = jax.jit(jax.grad(lambda w, t: (t[IDS] @ w).sum()))(jnp.ones(6), table)
    np.testing.assert_allclose(gradient, ROWS[[4, 17, 4, 3, 0]].sum(0), rtol=1e-5)
    table.close()
    assert table.is_closed()
    with pytest.raises(RuntimeError, match="closed"):
        table[IDS]


def test_bits_made_on_the_device() -> None:
    bits = jnp.asarray(RNG.integers(0, 120, (5, 4)), jnp.uint8)
    table = DeviceTable.from_array(bits, "float8_e4m3fn")
    assert table.words is bits or table.words.unsafe_buffer_pointer() == bits.unsafe_buffer_pointer()
    want = np.asarray(bits).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(gather(table, np.arange(5), out_dtype=np.float32), want)
    with pytest.raises(ValueError, match="unsigned integers as wide as bfloat16"):
        DeviceTable.from_array(bits, jnp.bfloat16)


def test_bad_input() -> None:
    table, device = HostTable.from_numpy(ROWS[:46]), DeviceTable.from_numpy(ROWS[:4])
    for ids, message in (([50], "0 to 49"), ([-1], "0 to 49"), ([1, 1], "distinct"), ([0.5], "integers")):
        with pytest.raises(ValueError, match=message):
            SplitTable.from_numpy(ROWS, ids)
    with pytest.raises(ValueError, match="an id for each of 4 rows"):
        SplitTable.from_parts(table, device, [1])
    with pytest.raises(ValueError, match="equal rows"):
        SplitTable.from_parts(table, DeviceTable.from_numpy(ROWS[:4].astype(np.float16)), HOT)
    for read_only in (device, SplitTable.from_numpy(ROWS, HOT)):
        with pytest.raises(ValueError, match="rows in device memory"):
            scatter(read_only, [0], ROWS[:1])
        with pytest.raises(ValueError, match="rows in device memory"):
            adam(0.1).init(read_only)
        with pytest.raises(ValueError, match="sliced or reshaped|leading axis"):
            jax.lax.scan(lambda c, t: (c, t[jnp.zeros(1, jnp.int32)]), 0, read_only)
        with pytest.raises(TypeError, match="slice"):
            read_only[1:3]


def test_a_later_write_to_the_array_does_not_show() -> None:
    memory = np.zeros(64, np.float32)
    first = (-memory.ctypes.data % 64) // 4  # at a multiple of 64 bytes, where jax uses memory in place on the CPU
    rows = memory[first : first + 16].reshape(4, 4)
    rows[:] = 1
    table = DeviceTable.from_numpy(rows)
    rows[:] = 7
    assert (table.numpy() == 1).all()


RULES = {"sgd": sgd(0.5), "adagrad": adagrad(0.5), "adam": adam(0.1), "add": None, "set": None}
WRITABLE = {
    "device": lambda rows: DeviceTable.from_numpy(rows, writable=True),
    "device array": lambda rows: DeviceTable.from_array(jnp.asarray(rows), writable=True),
    "split": lambda rows: SplitTable.from_numpy(rows, HOT, writable=True),
    "all in host memory": lambda rows: SplitTable.from_numpy(rows, [], writable=True),
    "parts": lambda rows: SplitTable.from_parts(
        HostTable.from_numpy(np.delete(rows, HOT, axis=0)), DeviceTable.from_numpy(rows[HOT], writable=True), HOT
    ),
    "cached": lambda rows: CachedTable.from_ids(HostTable.from_numpy(rows), HOT),
}


_WRITES = [
    ("split", "adam", "float32", True), ("device", "add", "float16", True), ("parts", "set", "float32", False),
    ("cached", "sgd", "float32", True), ("cached", "set", "float16", False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "rule", "dtype", "jitted"),
    [
        pytest.param(*case, marks=() if case in _WRITES else pytest.mark.slow)
        for case in itertools.product(WRITABLE, RULES, ["float32", "float16"], [True, False])
    ],
)
def test_writes_have_the_bits_of_a_host_table(kind, rule, dtype, jitted) -> None:
    rows, optimizer = ROWS.astype(dtype), RULES[rule]

    def write(table, state, ids, values):
        if optimizer is None:
            return (scatter_add if rule == "add" else scatter)(table, ids, values), state
        return optimizer.update(RowGradient(ids, values), state, table)

    results = []
    for make in (HostTable.from_numpy, WRITABLE[kind]):
        rng, table = np.random.default_rng(5), make(rows)
        state = None if optimizer is None else optimizer.init(table)
        step = write
        if jitted:
            step = jax.jit(write, donate_argnums=(0, 1), out_shardings=shardings((table, state)))
        for _ in range(3):
            ids = jnp.asarray(rng.integers(-2, 52, 30), jnp.int32)  # with equal ones, and out of range
            table, state = step(table, state, ids, jnp.asarray(rng.standard_normal((30, *rows.shape[1:])), jnp.float32))
        moments = [m for m in (state or ()) if isinstance(m, HostTable | DeviceTable | SplitTable)]
        results.append([table.numpy(), table[np.arange(50)], *(moment.numpy() for moment in moments)])
        if kind == "cached" and isinstance(table, CachedTable):
            slots = np.asarray(table.slots)
            copies = np.asarray(table.cache)[slots[slots >= 0]].view(dtype)
            np.testing.assert_array_equal(copies, table.numpy()[slots >= 0].reshape(copies.shape))
        elif make is not HostTable.from_numpy:
            assert all(type(moment) is type(table) for moment in moments)
    assert any((results[1][0] != rows).reshape(-1))
    jax.tree.map(np.testing.assert_array_equal, *results)
