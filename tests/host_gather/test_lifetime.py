"""Tables that were closed, donated or inherited by a fork, and files that became shorter."""

import copy
import gc
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.host_gather import (
    CachedTable,
    DeviceTable,
    HostTable,
    PeerTable,
    TableClosedError,
    scatter_add,
    shardings,
    value_and_grad,
)

ROWS = np.arange(40, dtype=np.float32).reshape(8, 5)


def table() -> HostTable:
    return HostTable.from_numpy(ROWS)


def test_use_after_close() -> None:
    table = HostTable.from_numpy(ROWS)
    view = table.numpy()
    f = jax.jit(lambda table, ids: table[ids])
    got = f(table, jnp.array([3]))
    table.close()
    table.close()
    assert table.is_closed() and "closed" in repr(table)
    np.testing.assert_array_equal(got, ROWS[[3]])
    np.testing.assert_array_equal(view, ROWS)  # a view keeps the memory
    for use in (lambda: table[np.array([0])], table.numpy, lambda: table.write(0, ROWS)):
        with pytest.raises(TableClosedError, match="closed, or donated"):
            use()
    with HostTable.from_numpy(ROWS) as table:
        assert not table.is_closed()
    assert table.is_closed()


def test_closing_while_steps_are_in_flight() -> None:
    rows = np.random.default_rng(0).random((4096, 256), np.float32)
    ids = jnp.asarray(np.random.default_rng(1).integers(0, len(rows), 8192, np.int32))
    f = jax.jit(lambda table, ids: table[ids])
    for _ in range(5):
        table = HostTable.from_numpy(rows)
        results = [f(table, ids) for _ in range(4)]
        table.close()
        del table
        for got in results:
            np.testing.assert_array_equal(got, rows[np.asarray(ids)])


def test_closed_and_donated_tables_under_jit() -> None:
    f = jax.jit(lambda table, ids: table[ids])
    ids = jnp.array([3])
    for make in (lambda: table(), lambda: CachedTable.from_ids(table(), [3])):
        given = make()
        f(given, ids)  # the second call takes jit's fast path
        given.close()
        for use in (
            lambda g=given: f(g, ids),
            lambda g=given: jax.jit(lambda t: t[ids] + 1)(g),
            lambda g=given: jax.vmap(lambda t, i: t[i], (None, 0))(g, ids),
            lambda g=given: value_and_grad(lambda t: t[ids].sum())(g),
            lambda g=given: jax.grad(lambda w, t: (t[ids] * w).sum())(1.0, g),
            lambda g=given: jax.lax.scan(lambda t, _: (t, t[ids]), g, None, length=2),
        ):
            with pytest.raises(TableClosedError, match="closed, or donated"):
                use()
    given = table()
    write = jax.jit(lambda t: scatter_add(t, ids, jnp.ones((1, 5))), donate_argnums=0, out_shardings=shardings(given))
    new = write(given)
    for use in (lambda: write(given), lambda: f(given, ids), given.numpy):
        with pytest.raises(TableClosedError, match="use the table that the function returned"):
            use()
    np.testing.assert_array_equal(f(new, ids), ROWS[[3]] + 1)
    assert given.is_closed() and "closed" in repr(given) and jax.tree.structure(given) == jax.tree.structure(new)


def test_errors_do_not_use_up_the_recursion_limit() -> None:
    """If flattening raised, jaxlib would lose a level of recursion per container at each error."""
    given = CachedTable.from_ids(table(), [1])
    given.close()
    nested: list = [given]
    for _ in range(30):
        nested = [nested]
    f = jax.jit(lambda tree: jax.tree.leaves(tree)[0])
    for _ in range(300):  # 9,000 levels, of which no thread has so many
        with pytest.raises(TableClosedError):
            f(nested)


def in_a_child(act: Callable[[], object]) -> str:
    """The exception that `act` raises in a forked child, "ran" for none, "hangs" if it does not return."""
    receive, send = multiprocessing.Pipe(False)

    def run() -> None:
        try:
            act()
            send.send("ran")
        except BaseException as error:
            send.send(type(error).__name__ + ": " + str(error))

    child = multiprocessing.get_context("fork").Process(target=run, daemon=True)
    child.start()
    found = receive.recv() if receive.poll(20) else "hangs"
    child.kill()
    child.join()
    return found


@pytest.mark.filterwarnings("ignore")
def test_a_forked_child_gets_an_error_from_every_use() -> None:
    given, f = table(), jax.jit(lambda table, ids: table[ids])
    ids = jnp.array([3])
    f(given, ids).block_until_ready()
    cached, optimizer_state = CachedTable.from_ids(given, [1]), {"t": given}
    view = given.numpy()
    for act in (
        lambda: f(given, ids),
        lambda: f(jax.tree.map(lambda x: x, given), ids),  # another table of the same memory
        lambda: f(copy.copy(given), ids),
        lambda: f(HostTable(given._leaf, given._spec), ids),
        lambda: f(cached, ids),
        lambda: jax.jit(lambda s: s["t"][ids])(optimizer_state),
        lambda: given[ids],
        lambda: cached[np.array([1])],
        lambda: scatter_add(given, ids, np.ones((1, 5))),
        lambda: value_and_grad(lambda t: t[ids].sum())(given),
        given.numpy,
        lambda: given.write(0, ROWS),
        lambda: table()[ids],  # a table of the child's own: jax would hang
        lambda: f(table(), ids),
    ):
        found = in_a_child(act)
        assert found.startswith("TableClosedError: ") and "spawn" in found, found
    assert in_a_child(lambda: table().numpy()) == "ran"  # without jax
    assert in_a_child(lambda: view.sum()) == "ran"
    np.testing.assert_array_equal(f(given, ids), ROWS[[3]])


def test_a_file_that_became_shorter(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).random((4096, 64), np.float32)
    np.save(tmp_path / "rows.npy", rows)
    given, f = HostTable.from_npy(tmp_path / "rows.npy"), jax.jit(lambda table, ids: table[ids])
    ids = np.array([0, 4095])
    np.testing.assert_array_equal(f(given, ids), rows[ids])
    with open(tmp_path / "rows.npy", "r+b") as file:
        file.truncate(8192)
    for use in (lambda: f(given, ids), lambda: given[ids], given.numpy):
        with pytest.raises(OSError, match="became shorter"):
            use()
    with open(tmp_path / "rows.npy", "r+b") as file:
        file.truncate(rows.nbytes + 4096)  # a longer file is fine
    assert f(given, ids).shape == (2, 64)


def test_device_put_does_not_move_a_table_out_of_host_memory() -> None:
    device = jax.devices()[0]
    given = HostTable.from_numpy(ROWS)
    pinned = jax.device_put(given._leaf, jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host"))
    given = given._of(pinned, given._spec)  # as it lies on a GPU
    tree = {"table": given, "x": np.ones(3, np.float32)}
    with pytest.raises(ValueError, match=r"must not have tables in host memory.*shardings\(tree\)"):
        jax.device_put(tree, device)
    passed_on = jax.device_put(tree, shardings(tree))
    np.testing.assert_array_equal(passed_on["table"].numpy(), ROWS)
    assert passed_on["table"].sharding == given.sharding


def test_a_copy_of_a_table_on_several_devices_keeps_their_rows() -> None:
    rows = np.random.default_rng(0).normal(size=(600, 64)).astype(np.float32)
    hot, cold = np.arange(0, 600, 2), np.arange(1, 600, 2)
    blocks = [DeviceTable.from_numpy(rows[hot[number::2]].copy()) for number in range(2)]
    table = PeerTable.from_parts(HostTable.from_numpy(rows[cold]), blocks, hot)
    passed_on = jax.jit(lambda table: table, out_shardings=shardings(table))(table)
    assert passed_on._hot is not table._hot
    del table, blocks
    gc.collect()
    others = [DeviceTable.from_numpy(np.full((150, 64), 7.0, np.float32)) for _ in range(20)]  # where the blocks lay
    np.testing.assert_array_equal(passed_on[np.arange(600)], rows)
    del others, passed_on
