"""States of an optimizer or a step that lie in different places, compared."""

import jax
import jax.numpy as jnp
import numpy as np

from dejax.offload import DiskArray


def is_on_disk(x):
    return isinstance(x, DiskArray)


def is_on_host(x):
    return x.sharding.memory_kind == "pinned_host"


def in_memory(state):
    """A copy as numpy. `np.asarray` of an array in pinned host memory is a view: XLA refuses to donate its memory."""

    def copy(x):
        return np.asarray(jax.device_put(x, jax.memory.Space.Device) if isinstance(x, jax.Array) else x)

    return jax.tree.map(copy, state, is_leaf=is_on_disk)


def equal(a, b):
    """The same bits; on a GPU, where XLA rounds two programs apart, nearly the same numbers."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jax.default_backend() == "gpu":
            np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=1e-5, atol=1e-7)
        else:
            np.testing.assert_array_equal(x, y)


def save(file, **trees):
    """Writes the leaves of trees to one file."""
    leaves = {f"{name}{i}": x for name, tree in trees.items() for i, x in enumerate(jax.tree.leaves(in_memory(tree)))}
    np.savez(file, **leaves)


def load(file, **likes):
    """The trees of a file, with the structures of others."""
    saved = np.load(file)
    treedefs = {name: jax.tree.structure(like, is_leaf=is_on_disk) for name, like in likes.items()}
    return [d.unflatten([saved[f"{name}{i}"] for i in range(d.num_leaves)]) for name, d in treedefs.items()]


def not_elementwise(params):
    return jax.tree.map(lambda p: jnp.cumsum(p, 0) if p.ndim else p, params)


def cannot_be_traced(params):
    return jax.tree.map(lambda p: jnp.full(p.shape, float(p.ravel()[0])), params)


def dejax_copies(run, *args):
    return "dejax_offload_pieces" in run.lower(*args).as_text()
