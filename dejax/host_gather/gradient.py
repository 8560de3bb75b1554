"""Gradients of the rows that a loss gathers: row-sparse, never of the table's size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax.host_gather._recording import recording
from dejax.host_gather._tracing import current_trace, inside
from dejax.host_gather.cached import CachedTable
from dejax.host_gather.table import HostTable


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RowGradient:
    """The gradient of a table as rows: the sum over `i` of `values[i]` at row `ids[i]`. Ids may repeat.

    Attributes:
        ids: int[n]; ids out of range count for nothing.
        values: float[n, *row].
    """

    ids: Array
    values: Array


@jax.custom_jvp
def _attach(rows: Array, probe: Array) -> Array:
    """The rows, with the derivative of `rows + probe`: adding zeros would turn -0 into 0."""
    del probe
    return rows


@_attach.defjvp
def _attach_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return _attach(*primals), tangents[0] + tangents[1]


def value_and_grad(
    loss: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """As `jax.value_and_grad`, where the gradient of a `HostTable` or `CachedTable` is a `RowGradient`.

    Args:
        loss: a function of tables and arrays that gives a scalar, or (scalar, aux). It gathers rows of the tables to
            differentiate by directly, not inside a function that it compiles, maps or scans itself: gather first and
            pass the rows on. Other tables may be used in any way.
        argnums: positions of the arguments to differentiate by: tables, arrays, or pytrees of both.
        has_aux: whether `loss` gives aux beside the scalar.

    Returns:
        A function with the arguments of `loss` that gives (value, gradients) or ((value, aux), gradients), for jit or
        outside of it.

    Raises:
        TypeError: when called: an argument to differentiate by is not given by position.
        ValueError: when called: a gather of a differentiated table inside another transformation, with `scale`, or
            begun by `gather_start`; a table whose rows are no floats.

    >>> table = HostTable.from_numpy(np.arange(6.0, dtype=np.float32).reshape(3, 2))
    >>> value, gradient = value_and_grad(lambda table: (table[np.array([1, 1])] ** 2).sum())(table)
    >>> value, gradient.ids, gradient.values
    (Array(26., dtype=float32), Array([1, 1], dtype=int32), Array([[4., 6.],
           [4., 6.]], dtype=float32))
    """
    single = isinstance(argnums, int)

    def wrapped(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        positions = _positions((argnums,) if isinstance(argnums, int) else argnums, len(args))
        leaves, tree = jax.tree.flatten(tuple(args[p] for p in positions), is_leaf=_is_table)
        tables = {k: leaf for k, leaf in enumerate(leaves) if _is_table(leaf)}
        for table in tables.values():
            if not jnp.issubdtype(table.dtype, jnp.floating):
                raise ValueError(f"value_and_grad: only rows of floats have a gradient, {table!r} was given")
        others = [leaf for leaf in leaves if not _is_table(leaf)]

        def call(noter: _Noter, given: list[Any], everything: tuple[Any, ...]) -> tuple[Any, Any]:
            """The loss, with its tables marked."""
            now = jax.tree.flatten(tuple(everything[p] for p in positions), is_leaf=_is_table)[0]
            rest = iter(given)
            full = list(everything)
            with recording(noter, alone=noter.probes is None) as level:
                noter.tables = {k: _marked(now[k], level, k) for k in tables}
                chosen = [noter.tables[k] if k in tables else next(rest) for k in range(len(now))]
                for p, value in zip(positions, jax.tree.unflatten(tree, chosen), strict=True):
                    full[p] = value
                result = loss(*full, **kwargs)
            value, aux = result if has_aux else (result, None)
            return value, _unmarked(aux, level)

        found: list[Any] = []

        def shapes(everything: tuple[Any, ...]) -> None:
            noter = _Noter(None)
            now = jax.tree.flatten(tuple(everything[p] for p in positions), is_leaf=_is_table)[0]
            call(noter, [leaf for leaf in now if not _is_table(leaf)], everything)
            found.extend((k, jax.ShapeDtypeStruct(rows.shape, rows.dtype)) for k, _, rows in noter.noted)

        _shapes_only(shapes, args)
        probes = [jnp.zeros(shape.shape, shape.dtype) for _, shape in found]

        def differentiated(probes: list[Array], given: list[Any]) -> tuple[Any, Any]:
            noter = _Noter(probes)
            value, aux = call(noter, given, args)
            return value, (aux, [ids for _, ids, _ in noter.noted])

        (value, (aux, ids)), (row_gradients, gradients) = jax.value_and_grad(
            differentiated, argnums=(0, 1), has_aux=True
        )(probes, others)
        rest = iter(gradients)
        result = [
            _collected(tables[k], [(ids[i], row_gradients[i]) for i, (which, _) in enumerate(found) if which == k])
            if k in tables
            else next(rest)
            for k in range(len(leaves))
        ]
        by_argument = jax.tree.unflatten(tree, result)
        return ((value, aux) if has_aux else value), by_argument[0] if single else by_argument

    return wrapped


class _Noter:
    """Notes gathers of marked tables as (number, ids, rows), and attaches probes, whose gradients are those of rows."""

    def __init__(self, probes: list[Array] | None) -> None:
        self.tables: dict[int, HostTable | CachedTable] = {}
        self.noted: list[tuple[int, Array, Array]] = []
        self.probes, self._trace = probes, current_trace()

    def __call__(self, number: int, table: HostTable, ids: Array, rows: Array) -> Array:
        known = self.tables.get(number)
        if known is None or table._leaf is not _host(known)._leaf or not inside(self._trace):
            raise ValueError(
                "value_and_grad: the loss gathers a differentiated table inside a function that it compiles, maps or "
                "scans (jit, vmap, scan, cond, checkpoint), or after writing it; gather outside of that and pass the "
                "rows on"
            )
        if self.probes is not None:
            if len(self.noted) == len(self.probes):
                raise ValueError("value_and_grad: the loss gathered more rows than before with the same arguments")
            rows = _attach(rows, self.probes[len(self.noted)])
        self.noted.append((number, ids, rows))
        return rows


def _positions(argnums: Sequence[int], count: int) -> tuple[int, ...]:
    """`argnums` from 0 on, where they are there."""
    for p in argnums:
        if not -count <= p < count:
            raise TypeError(
                f"value_and_grad: argument {p} must be given by position, as the loss is differentiated by it; "
                f"{count} arguments were given so. Call it as f(table, ...), not f(table=table, ...)"
            )
    return tuple(p % count for p in argnums)


def _shapes_only(function: Callable[[tuple[Any, ...]], None], args: tuple[Any, ...]) -> None:
    """Traces `function` with the arrays among the arguments as tracers; other arguments stay what they are."""
    leaves, tree = jax.tree.flatten(args)
    traced = [k for k, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]

    def of_arrays(arrays: list[Any]) -> None:
        full = list(leaves)
        for k, array in zip(traced, arrays, strict=True):
            full[k] = array
        function(jax.tree.unflatten(tree, full))

    jax.eval_shape(of_arrays, [leaves[k] for k in traced])


def _collected(table: HostTable | CachedTable, found: list[tuple[Array, Array]]) -> RowGradient:
    row = table.shape[1:]
    return RowGradient(
        jnp.concatenate([ids.reshape(-1) for ids, _ in found] or [jnp.zeros(0, jnp.int32)]),
        jnp.concatenate([values.reshape(-1, *row) for _, values in found] or [jnp.zeros((0, *row), np.float32)]),
    )


def _is_table(value: Any) -> bool:
    return isinstance(value, HostTable | CachedTable)


def _host(table: HostTable | CachedTable) -> HostTable:
    return table.table if isinstance(table, CachedTable) else table


def _with_marks(table: Any, marks: tuple[tuple[int, int], ...]) -> Any:
    host = _host(table)
    host = HostTable(host._leaf, dataclasses.replace(host._spec, marks=marks))
    return dataclasses.replace(table, table=host) if isinstance(table, CachedTable) else host


def _marked(table: Any, level: int, number: int) -> Any:
    return _with_marks(table, (*_host(table)._spec.marks, (level, number)))


def _unmarked(tree: Any, level: int) -> Any:
    """Tables that leave the loss are those that went in."""

    def without(value: Any) -> Any:
        if not _is_table(value):
            return value
        return _with_marks(value, tuple(mark for mark in _host(value)._spec.marks if mark[0] != level))

    return jax.tree.map(without, tree, is_leaf=_is_table)
