"""A table as a pytree: jax.tree may pass it on, and must not compute with its bits."""

import copy
import pickle
from collections.abc import Callable

import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

from dejax.host_gather import CachedTable, DeviceTable, HostTable, scatter_add, shardings, value_and_grad

ROWS = np.arange(40, dtype=np.float32).reshape(8, 5)


def table() -> HostTable:
    return HostTable.from_numpy(ROWS)


ARITHMETIC: dict[str, Callable] = {
    "moving average": lambda t: jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, t, t),
    "sum": lambda t: jax.tree.map(lambda a, b: a + b, t, t),
    "by a numpy number": lambda t: jax.tree.map(lambda a: np.float32(0.9) * a, t),
    "by an array": lambda t: jax.tree.map(lambda a: jnp.ones((8, 5)) * a, t),
    "square": lambda t: jax.tree.map(jnp.square, t),
    "sum of elements": lambda t: sum(jnp.sum(x) for x in jax.tree.leaves(t)),
    "numpy's sum": lambda t: [np.add(x, 1) for x in jax.tree.leaves(t)],
    "a method": lambda t: [x.sum() for x in jax.tree.leaves(t)],
    "an index": lambda t: [x[0] for x in jax.tree.leaves(t)],
    "isfinite": lambda t: jax.tree.map(jnp.isfinite, t),
    "where": lambda t: jax.tree.map(lambda x: jnp.where(True, x, x), t),
    "zeros_like": lambda t: jax.tree.map(jnp.zeros_like, t),
    "astype": lambda t: jax.tree.map(lambda x: x.astype(jnp.bfloat16), t),
    "comparison": lambda t: jax.tree.map(lambda x: x > 0, t),
    "reduce": lambda t: jax.tree.reduce(lambda a, b: a + b, t, 0.0),
    "with path": lambda t: jax.tree_util.tree_map_with_path(lambda path, x: x * 2, t),
    "jit of a leaf": lambda t: jax.tree.map(jax.jit(lambda x: x * 2), t),
    "ravel": lambda t: ravel_pytree(t),
    "global_norm": optax.global_norm,
    "adam.init": lambda t: optax.adam(1e-3).init(t),
    "sgd with momentum": lambda t: optax.sgd(1e-3, momentum=0.9).init(t),
    "apply_updates": lambda t: optax.apply_updates(t, t),
    "incremental_update": lambda t: optax.incremental_update(t, t, 0.1),
    "clip": lambda t: optax.clip_by_global_norm(1.0).update(t, optax.EmptyState()),
    "ema": lambda t: optax.ema(0.9).init(t),
}


@pytest.mark.filterwarnings("ignore:optax")
@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize(
    "where",
    [
        "alone",
        "on the device",
        *(pytest.param(w, marks=pytest.mark.slow) for w in ("among parameters", "in jit", "cached")),
    ],
)
def test_arithmetic_on_the_bits_is_refused(name: str, where: str) -> None:
    given, act = DeviceTable.from_numpy(ROWS) if where == "on the device" else table(), ARITHMETIC[name]
    with pytest.raises((TypeError, ValueError), match="HostTable|ufuncs|TableLeaf"):
        if where == "in jit":
            jax.jit(lambda t: act(t) and 0)(given)
        elif where == "among parameters":
            act({"w": jnp.ones(3), "table": given})
        else:
            act(CachedTable.from_ids(given, [1]) if where == "cached" else given)
    np.testing.assert_array_equal(given.numpy(), ROWS)


def test_trees_pass_tables_on() -> None:
    given = table()
    tree = {"w": jnp.ones(3), "table": given}
    leaves, structure = jax.tree.flatten(tree)
    again = jax.tree.unflatten(structure, leaves)["table"]
    assert again._leaf is given._leaf
    assert jax.tree.map(lambda x: x, given)._leaf is given._leaf
    (leaf,) = jax.tree.leaves(given)
    assert leaf.shape == (8, 5) and leaf.size == 40 and leaf.ndim == 2
    assert sum(x.size for x in leaves) == 43 and "8, 5" in repr(leaf)
    assert leaf.sharding == given.sharding and not leaf.is_deleted()
    jax.tree.map(lambda x: x.block_until_ready(), tree)
    jax.block_until_ready(tree)
    dynamic = jax.tree.map(lambda x: x if x.ndim else None, tree)  # parts of a tree
    got = jax.jit(lambda d: d["table"][jnp.array([3])] * d["w"][0])(dynamic)
    np.testing.assert_array_equal(got, ROWS[[3]])
    by_path = jax.tree_util.tree_leaves_with_path(tree)
    assert [jax.tree_util.keystr(path) for path, _ in by_path] == ["['table'].rows", "['w']"]
    assert jax.eval_shape(lambda t: t[jnp.array([0])], given).shape == (1, 5)
    moved = jax.device_put(tree, shardings(tree))  # on a GPU jax refuses a device alone: the table is in host memory
    np.testing.assert_array_equal(moved["table"][np.array([7])], ROWS[[7]])


def test_trees_pass_tables_on_the_device_on() -> None:
    given = DeviceTable.from_numpy(ROWS)
    leaves, structure = jax.tree.flatten({"table": given})
    assert jax.tree.unflatten(structure, leaves)["table"].words is given.words
    assert leaves[0].shape == (8, 5) and "DeviceTable" in repr(leaves[0])
    assert [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(given)] == [".words"]
    for moved in jax.device_put(given), jax.block_until_ready(given), jax.jit(lambda t: t)(given):
        np.testing.assert_array_equal(moved[np.array([7])], ROWS[[7]])
    mapped = jax.vmap(lambda t, ids: t[ids], (None, 0))(given, np.array([[1], [2]]))
    np.testing.assert_array_equal(mapped, ROWS[[[1], [2]]])


def test_other_shapes_and_types_than_the_tables_are_refused() -> None:
    for replace in (lambda x: jnp.zeros(x.shape), lambda x: np.zeros((8, 5), np.int32), lambda x: jnp.zeros((3, 5))):
        with pytest.raises(ValueError, match="sliced or reshaped"):
            jax.tree.map(replace, table())[np.array([0])]


def test_flax_passes_tables_on() -> None:
    given = table()

    @flax.nnx.jit
    def step(model: flax.nnx.Module, table: HostTable, ids: jax.Array) -> jax.Array:
        return model(table[ids])

    model = flax.nnx.Linear(5, 2, rngs=flax.nnx.Rngs(0))
    np.testing.assert_allclose(step(model, given, jnp.array([3, 1])), model(jnp.asarray(ROWS[[3, 1]])), rtol=1e-5)


def test_one_step_with_optax_for_the_other_parameters() -> None:
    given, w = table(), jnp.ones(5)
    optimizer = optax.adam(0.1)
    state = optimizer.init(w)

    def step(table: HostTable, w: jax.Array, state: optax.OptState) -> tuple:
        _, (rows, gradient) = value_and_grad(lambda t, w: ((t[np.array([1, 2])] @ w) ** 2).sum(), argnums=(0, 1))(
            table, w
        )
        updates, state = optimizer.update(gradient, state, w)
        return scatter_add(table, rows.ids, -0.01 * rows.values), optax.apply_updates(w, updates), state

    compiled = jax.jit(step, donate_argnums=0, out_shardings=shardings((given, w, state)))
    for _ in range(2):
        given, w, state = compiled(given, w, state)
    assert np.isfinite(given.numpy()).all() and (given.numpy()[3:] == ROWS[3:]).all()


# ------------------------------------------------------------------------------------------------ tables that are gone


def test_iteration_and_membership_are_refused() -> None:
    given = table()
    for each in (given, CachedTable.from_ids(given, [1])):
        with pytest.raises(TypeError, match=r"table.numpy\(\)"):
            for _ in each:
                break
        with pytest.raises(TypeError, match=r"table.numpy\(\)"):
            list(each)
        with pytest.raises(TypeError, match=r"table.numpy\(\)"):
            _ = 3.0 in each


def test_pickling_and_deep_copies_are_refused() -> None:
    given = table()
    for each in (given, CachedTable.from_ids(given, [1]), {"t": given}, jax.tree.leaves(given)):
        for act in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError, match=r"pickling.*table.numpy\(\)"):
                act(each)
    same = copy.copy(given)
    np.testing.assert_array_equal(same[np.array([2])], ROWS[[2]])
    given.close()
    assert same.is_closed()  # it shares the memory
    pickle.dumps(jax.tree.structure(given).node_data()[1])  # its static part may travel
