"""`data_parallel`: a training step of one device as a step of a mesh, with the same losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from dejax import _compat
from dejax._dtypes import entering_jit, narrowed, wide, zeros
from dejax._pytrees import pytree
from dejax.distributed._placing import all_on_mesh, check_axis, spec_of
from dejax.host_gather import RowGradient


@pytree
@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """The result of a training step on one part of a batch; also the mean of these results over all parts.

    The function `gradients` that you give to `data_parallel` returns a `Part`, and your function `update` gets the
    mean.

    Attributes:
        loss: float scalar or pytree of float arrays: means over the seeds (examples) of the part, without padding.
        gradients: pytree of gradients of the mean loss, one for each parameter.
        weight: scalar, the number of seeds that are not padding; parts are averaged with these weights. A part with
            weight 0 is ignored.
        rows: `RowGradient`s of table rows that the part read, by name; gradients of the mean loss, too.
        counts: pytree of integers to sum over all parts, such as `sample.lost.sum()`.
    """

    loss: Any
    gradients: Any
    weight: Any = 1
    rows: Mapping[str, RowGradient] = dataclasses.field(default_factory=dict)
    counts: Any = None


@pytree
@dataclasses.dataclass(frozen=True, slots=True)
class StepReport:
    """The loss and the counts of one training step of `data_parallel`, equal on all devices.

    Attributes:
        loss: mean of `Part.loss` over all seeds of the batch that are not padding.
        weight: float32 scalar, the number of these seeds.
        counts: pytree, the sums of `Part.counts` over all parts.

    >>> import jax, jax.numpy as jnp
    >>> from dejax.distributed import Part, data_parallel
    >>> def gradients(state, key, batch, data):
    ...     return Part(*jax.value_and_grad(lambda w: ((batch - w) ** 2).mean())(state))
    >>> step = data_parallel(gradients, lambda state, mean: state - 0.5 * mean.gradients, parts=2)
    >>> state, report = step(jnp.zeros(()), jax.random.key(0), jnp.arange(4.0), None)
    >>> float(report.loss), float(report.weight)
    (3.5, 2.0)
    """

    loss: Any
    weight: Array
    counts: Any


Gradients = Callable[[Any, Array, Any, Any], Part]
Update = Callable[[Any, Part], Any]


def data_parallel(
    gradients: Gradients,
    update: Update,
    mesh: Mesh | None = None,
    *,
    axis: str = "data",
    parts: int | None = None,
    steps: int = 1,
    donate: bool = True,
) -> Callable[[Any, Any, Any, Any], tuple[Any, StepReport]]:
    """Compiles a data-parallel training step for a mesh from two functions that are written for one device.

    The batch is cut into `parts` of equal size. Each device computes its parts one after the other, each part with its
    own random key. Losses and gradients are averaged over all seeds (examples) that are not padding, and every device
    makes the same update. With the same `parts` the result does not depend on the number of devices, except for the
    order in which floats are added.

    Args:
        gradients: function `(state, key, batch, data) -> Part` for one part of the batch: it samples, reads features,
            and returns the mean loss and its gradients.
        update: function `(state, mean) -> state` that applies an optimizer to `mean`, the mean `Part` of all parts. The
            returned state has the structure and shapes of the given one. `mean.rows` holds the row gradients of this
            device's parts only. Writing them to a table that is shared for writing (`share`) or divided over devices
            (`ShardedTable`) applies the row gradients of all devices, each once.
        mesh: the devices; None means one device without a mesh.
        axis: name of the mesh axis along which the batch is divided. Devices along other axes repeat the work.
        parts: number of parts, a multiple of the number of devices along `axis`; by default that number.
        steps: number of training steps that one call runs in one program. With more than 1, the arrays of `batch` have
            the shape [steps, global batch, ...], `key` is an array of `steps` keys, and the arrays of the report have a
            leading axis of `steps`. Use it where a step takes a GPU less than a few milliseconds: the Python work of a
            call then takes longer than the step.
        donate: whether the step may reuse the memory of the given state. Required if `update` writes tables.

    Returns:
        A function `step(state, key, batch, data) -> (state, StepReport)`. `batch` is a pytree of arrays whose first
        axis is the global batch; every process passes the whole batch. `state` and `data` may already lie on the mesh;
        otherwise the first call replicates them. Inside of `gradients` and `update`, an array that is divided over the
        mesh by a `NamedSharding` is the shard of the device.

    Raises:
        ValueError: `parts` is no multiple of the number of devices, or `steps` is below 1. When called: the batch
            cannot be cut into `parts`, or `key` or `batch` is for another number of steps.

    >>> from dejax.distributed import make_mesh
    >>> def gradients(state, key, batch, data):
    ...     return Part(*jax.value_and_grad(lambda w: ((batch - w) ** 2).mean())(state))
    >>> step = data_parallel(gradients, lambda state, mean: state - 0.5 * mean.gradients, make_mesh(1), parts=2)
    >>> state, report = step(jnp.zeros(()), jax.random.key(0), jnp.arange(4.0), None)
    >>> float(state), float(report.loss)
    (1.5, 3.5)
    """
    devices = 1 if mesh is None else check_axis("data_parallel", mesh, axis)
    parts = devices if parts is None else parts
    if parts < 1 or parts % devices:
        raise ValueError(f"data_parallel: `parts` must be a multiple of {devices}, the devices, got {parts}")
    if steps < 1:
        raise ValueError(f"data_parallel: `steps` must be at least 1, got {steps}")
    return _Step(gradients, update, mesh, axis, parts, devices, steps, donate)


class _Step:
    """A step, compiled for each structure of its arguments."""

    def __init__(
        self,
        gradients: Gradients,
        update: Update,
        mesh: Mesh | None,
        axis: str,
        parts: int,
        devices: int,
        steps: int,
        donate: bool,
    ) -> None:
        self.gradients, self.update, self.mesh, self.axis = gradients, update, mesh, axis
        self.parts, self.own, self.steps, self.donate = parts, parts // devices, steps, donate
        self._compiled: dict[Any, Any] = {}

    def __call__(self, state: Any, key: Any, batch: Any, data: Any = None) -> tuple[Any, StepReport]:
        compiled, leaves = self._prepared(state, key, batch, data)
        state_leaves, report = compiled(*leaves)
        return jax.tree.unflatten(jax.tree.structure(state), state_leaves), report

    def lower(self, state: Any, key: Any, batch: Any, data: Any = None) -> Any:
        """As `jax.jit(...).lower`: the program, for example for `link_bytes`."""
        compiled, leaves = self._prepared(state, key, batch, data)
        return compiled.lower(*leaves)

    def _prepared(self, state: Any, key: Any, batch: Any, data: Any) -> tuple[Any, tuple[list[Any], ...]]:
        states, state_tree = jax.tree.flatten(entering_jit("data_parallel", state))
        others, other_tree = jax.tree.flatten(entering_jit("data_parallel", (key, data)))
        batches, batch_tree = jax.tree.flatten(entering_jit("data_parallel", batch, ids_or_times=True))
        self._check(key, batches)
        trees = state_tree, other_tree, batch_tree
        if self.mesh is not None:
            states = all_on_mesh(states, self.mesh, PartitionSpec())
            others = all_on_mesh(others, self.mesh, PartitionSpec())
            batches = all_on_mesh(batches, self.mesh, self._batch_spec)
        if trees not in self._compiled:
            self._compiled[trees] = self._jitted(trees, states, others)
        return self._compiled[trees], (states, others, batches)

    def _check(self, key: Any, batches: list[Any]) -> None:
        leading = () if self.steps == 1 else (self.steps,)
        for leaf in batches:
            shape = tuple(getattr(leaf, "shape", ()))
            steps, rest = shape[: len(leading)], shape[len(leading) :]
            if steps != leading or not rest or rest[0] % self.parts:
                first = f"[{self.steps} steps, batch, ...] with a batch that is" if leading else "[batch, ...] with"
                raise ValueError(
                    f"data_parallel: the arrays of `batch` must be {first} a multiple of {self.parts} parts, got shape "
                    f"{shape}; pad the seeds with -1"
                )
        if leading and jnp.shape(key)[:1] != leading:
            raise ValueError(
                f"data_parallel: `key` must be key[{self.steps}], one for each step, got shape {jnp.shape(key)}; use "
                "jax.random.split or dejax.minibatch.step_keys"
            )

    @property
    def _batch_spec(self) -> PartitionSpec:
        return PartitionSpec(self.axis) if self.steps == 1 else PartitionSpec(None, self.axis)

    def _jitted(self, trees: tuple[Any, Any, Any], states: list[Any], others: list[Any]) -> Any:
        """The jitted call for these structures: a function of the leaves of state, (key, data) and batch."""

        def one(states: list[Any], key: Any, batches: list[Any], data: Any) -> tuple[list[Any], StepReport]:
            state = jax.tree.unflatten(trees[0], states)
            mean = self._mean(state, key, jax.tree.unflatten(trees[2], batches), data)
            after, structure = jax.tree.flatten(self.update(state, mean))
            if structure != trees[0]:
                raise ValueError(
                    f"data_parallel: `update` must return a state of the structure that it got, {trees[0]}, got "
                    f"{structure}"
                )
            return after, StepReport(mean.loss, mean.weight, mean.counts)

        def on_device(states: list[Any], others: list[Any], batches: list[Any]) -> tuple[list[Any], StepReport]:
            states, others, batches = _compat.own_empty_arrays((states, others, batches))
            key, data = jax.tree.unflatten(trees[1], others)
            if self.steps == 1:
                return one(states, key, batches, data)
            return jax.lax.scan(lambda states, given: one(states, *given, data), states, (key, batches))

        donated = (0,) if self.donate else ()
        # Where each leaf of the state lies stays fixed; tables in host memory would otherwise come out on the device.
        places = [getattr(leaf, "sharding", None) for leaf in states]
        if self.mesh is None:
            return jax.jit(on_device, donate_argnums=donated, out_shardings=(_tables_only(states), None))
        specs = [spec_of(leaf, self.mesh) for leaf in states]
        over_mesh = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=(specs, [spec_of(leaf, self.mesh) for leaf in others], self._batch_spec),
            out_specs=(specs, PartitionSpec()),
            check_vma=False,
        )
        return jax.jit(over_mesh, donate_argnums=donated, out_shardings=(places, None))

    # -------------------------------------------------------------------------------------------- on a device

    def _mean(self, state: Any, key: Array, batch: Any, data: Any) -> Part:
        """The mean over the parts of all devices, and the rows of this device's parts."""
        first = 0 if self.mesh is None else jax.lax.axis_index(self.axis) * self.own

        def of_part(number: Any, batch: Any) -> Part:
            found = self.gradients(state, jax.random.fold_in(key, number), batch, data)
            if not isinstance(found, Part):
                raise TypeError(f"data_parallel: `gradients` must return a Part, got {type(found).__name__}")
            return dataclasses.replace(found, weight=jnp.asarray(found.weight, jnp.float32), rows=dict(found.rows))

        if self.own == 1:
            part = of_part(first, batch)
            total = self._sum_over_devices(part.weight)
            factor = _factors(part.weight, total)
            means = (part.loss, part.gradients)
            sums = jax.tree.map(lambda x: self._sum_over_devices(_times(x, factor)), wide(means))
            loss, gradients = narrowed(sums, means)
            rows = _scaled(jax.tree.map(lambda x: x[None], part.rows), factor[None])
            return Part(loss, gradients, total, rows, jax.tree.map(self._sum_over_devices, part.counts))
        return self._running(
            of_part, first, jax.tree.map(lambda x: x.reshape(self.own, x.shape[0] // self.own, *x.shape[1:]), batch)
        )

    def _running(self, of_part: Callable[[Any, Any], Part], first: Any, cut: Any) -> Part:
        """The mean of all parts by a running sum: one gradient, in float32, is stored instead of one for each part."""
        shapes = jax.eval_shape(of_part, first, jax.tree.map(lambda x: x[0], cut))
        means = (shapes.loss, shapes.gradients)

        def add(sums: Any, given: tuple[Array, Any]) -> tuple[Any, Any]:
            part = of_part(*given)
            terms = jax.tree.map(lambda x: _times(x, part.weight), wide((part.loss, part.gradients)))
            return jax.tree.map(jnp.add, sums, terms), (part.weight, part.rows, part.counts)

        sums, (weights, rows, counts) = jax.lax.scan(add, zeros(means), (first + jnp.arange(self.own), cut))
        total = self._sum_over_devices(weights.sum())
        inverse = jnp.where(total > 0, 1 / jnp.maximum(total, 1e-30), 0)
        sums = jax.tree.map(lambda x: self._sum_over_devices(x * inverse.astype(x.dtype)), sums)
        loss, gradients = narrowed(sums, means)
        counts = jax.tree.map(lambda x: self._sum_over_devices(x.sum(0)), counts)
        return Part(loss, gradients, total, _scaled(rows, _factors(weights, total)), counts)

    def _sum_over_devices(self, x: Array) -> Array:
        return x if self.mesh is None else jax.lax.psum(x, self.axis)


def _tables_only(states: list[Any]) -> list[Any]:
    """The places of leaves in host memory; the others are left to XLA."""
    places = [getattr(leaf, "sharding", None) for leaf in states]
    return [place if place is not None and place.memory_kind == "pinned_host" else None for place in places]


def _factors(weights: Array, total: Array) -> Array:
    """The share of each part in the mean: 0 for all where no seed is real."""
    return jnp.where(total > 0, weights / jnp.maximum(total, 1e-30), 0)


def _weighted(x: Array, factors: Array) -> Array:
    """`x`, stacked parts, times the factor of each; a part without real seeds may hold NaN, and gives 0."""
    return jax.vmap(_times)(x, factors)


def _times(x: Array, factor: Array) -> Array:
    return jnp.where(factor > 0, x * factor.astype(x.dtype), jnp.zeros((), x.dtype))


def _scaled(rows: Any, factors: Array) -> Any:
    """Row gradients of stacked parts as one for each table, of the mean over all parts."""

    def joined(gradient: RowGradient) -> RowGradient:
        ids, values = gradient.ids, _weighted(gradient.values, factors)
        if ids.ndim != 2 or values.shape[:2] != ids.shape:
            raise ValueError(
                f"data_parallel: `rows` must have ids int[n] and values [n, *row], got {ids.shape[1:]} and "
                f"{values.shape[1:]}"
            )
        return RowGradient(ids.reshape(-1), values.reshape(ids.size, *values.shape[2:]))

    return {name: joined(gradient) for name, gradient in rows.items()}
