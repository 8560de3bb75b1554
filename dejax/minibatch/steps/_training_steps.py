"""`TrainingSteps`: a jitted training function of one device, or of each device of a mesh."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dejax import _compat
from dejax._dtypes import entering_jit
from dejax.host_gather import shardings
from dejax.host_gather.tables.table import is_table_of_host


class TrainingSteps:
    """A jitted training function, as `sampled_step` or `pipelined_steps` makes it.

    Call it with `(state, topology, features, keys, seeds, *rest)`. Tables in the state are updated in place.

    Attributes:
        pipelined: whether one call runs several steps.

    >>> import jax, jax.numpy as jnp, numpy as np
    >>> from dejax.minibatch import FeatureStore, HeteroTopology, pipelined_steps, sample_blocks, step_keys
    >>> topology = HeteroTopology.from_edges({("a", "to", "a"): ([1, 2], [0, 0])}, {"a": 3})
    >>> store = FeatureStore.from_arrays({"a": np.array([[1.0], [2.0], [4.0]], np.float32)})
    >>> def sample(key, topology, seeds):
    ...     return sample_blocks(key, topology, ("a", seeds), [2])
    >>> run = pipelined_steps(lambda total, batch: (total + batch.x["a"].sum(), total), sample)
    >>> keys, seeds = step_keys(jax.random.key(0), 0, 2), np.array([[0], [2]], np.int32)
    >>> total, _ = run(jnp.zeros(()), topology, store, keys, seeds)
    >>> run.pipelined, float(total)
    (True, 11.0)
    """

    def __init__(
        self,
        function: Callable[..., Any],
        pipelined: bool,
        donate: bool,
        mesh: Mesh | None = None,
        axis: str = "data",
    ) -> None:
        self.pipelined = pipelined
        self._function, self._donate, self._mesh = function, donate, mesh
        if mesh is not None:
            self._function = _over_mesh(function, pipelined, mesh, axis)
        self._jitted: dict[Any, Any] = {}

    def __call__(self, state: Any, *arguments: Any) -> tuple[Any, Any]:
        """The state after the step or steps, and the results of `update`: of several steps stacked, [steps, ...]."""
        # Results are committed to the tables' device. Commit the first state, too: otherwise jax would compile the
        # program again for the second call.
        place = functools.partial(_placed, mesh=self._mesh)
        state = jax.tree.map(place, entering_jit(self._what, state), is_leaf=is_table_of_host)
        with _garbage_uncollected():
            found: tuple[Any, Any] = self._for(state)(state, *self._checked(arguments))
        return found

    def trace(self, state: Any, *arguments: Any) -> Any:
        """Traces the function like `jax.jit(...).trace`, to lower or compile it ahead of time."""
        with _garbage_uncollected():
            return self._for(state).trace(state, *self._checked(arguments))

    @property
    def _what(self) -> str:
        return "pipelined_steps" if self.pipelined else "sampled_step"

    def _checked(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments after the state: topology, features, keys, seeds (and their times), and others."""
        seeds = entering_jit(self._what, arguments[3:4], ids_or_times=True)
        return (*arguments[:3], *seeds, *entering_jit(self._what, arguments[4:]))

    def _for(self, state: Any) -> Any:
        leaves, treedef = jax.tree.flatten(state, is_leaf=is_table_of_host)
        tables = tuple(
            (n, jax.tree.structure(leaf), leaf.sharding) for n, leaf in enumerate(leaves) if is_table_of_host(leaf)
        )
        key = (treedef, tables) if tables else None
        if key not in self._jitted:
            options: dict[str, Any] = {"out_shardings": (shardings(state), None)} if tables else {}
            donated = (0,) if self._donate else ()
            self._jitted[key] = jax.jit(self._function, donate_argnums=donated, **options)
        return self._jitted[key]


@contextlib.contextmanager
def _garbage_uncollected() -> Iterator[None]:
    """Pauses Python's garbage collector, which would take a quarter of the time of tracing.

    What tracing makes stays, so a collection looks through it and through all imported modules and frees nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _over_mesh(function: Callable[..., Any], pipelined: bool, mesh: Mesh, axis: str) -> Callable[..., Any]:
    """`function` on each device of a mesh, with the device's part of the seeds and keys of its own."""
    if axis not in mesh.shape:
        raise ValueError(f"`axis` must be one of the mesh's axes, {', '.join(map(str, mesh.axis_names))}, got {axis!r}")
    everywhere, of_seeds = PartitionSpec(), PartitionSpec(None, axis) if pipelined else PartitionSpec(axis)

    def own(state: Any, topology: Any, features: Any, keys: Array, seeds: Any, *rest: Any) -> Any:
        state, topology, features, rest = _compat.own_empty_arrays((state, topology, features, rest))
        number = jax.lax.axis_index(axis)

        def of_device(key: Array) -> Array:
            return jax.random.fold_in(key, number)

        keys = jax.vmap(of_device)(keys) if pipelined else of_device(keys)
        return function(state, topology, features, keys, seeds, *rest)

    def all_devices(*arguments: Any) -> Any:
        specs = [everywhere] * len(arguments)
        specs[4] = of_seeds
        run = jax.shard_map(own, mesh=mesh, in_specs=tuple(specs), out_specs=everywhere, check_vma=False)
        return run(*arguments)

    return all_devices


def _placed(leaf: Any, mesh: Mesh | None = None) -> Any:
    if mesh is not None and isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec()))
    if isinstance(leaf, jax.core.Tracer) or not isinstance(leaf, jax.Array) or getattr(leaf, "committed", True):
        return leaf
    return jax.device_put(leaf, next(iter(leaf.devices())))
