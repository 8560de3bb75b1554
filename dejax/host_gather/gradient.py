"""Gradients of the rows that a loss gathers: row-sparse, never of the table's size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax._pytrees import pytree
from dejax.host_gather._tracing import current_trace, inside, recording
from dejax.host_gather.tables.table import LocalTable


@pytree
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RowGradient:
    """The gradient of a table as a list of rows: `values[i]` belongs to row `ids[i]`, and rows of equal ids add up.

    Attributes:
        ids: int[n]; ids out of range are ignored.
        values: float[n, *row].
    """

    ids: Array
    values: Array


def value_and_grad(
    loss: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """`jax.value_and_grad` for functions that read tables: the gradient of a table is a `RowGradient` of the rows read.

    Args:
        loss: a function of tables and arrays that returns a scalar, or (scalar, aux). It must gather from
            differentiated tables directly, not inside of a function that it compiles, maps or scans: gather first and
            pass the rows on. Tables that are not differentiated may be used in any way.
        argnums: positions of the arguments to differentiate: tables, arrays, or pytrees of both.
        has_aux: whether `loss` returns (scalar, aux).

    Returns:
        A function with the arguments of `loss` that returns (value, gradients) or ((value, aux), gradients). It may be
        jitted.

    Raises:
        TypeError: when called: a differentiated argument is not passed by position.
        ValueError: when called: a differentiated table is gathered inside of another transformation, with `scale`, or
            by `gather_start`; or its rows are not floats.

    >>> from dejax.host_gather import HostTable
    >>> table = HostTable.from_numpy(np.arange(6.0, dtype=np.float32).reshape(3, 2))
    >>> value, gradient = value_and_grad(lambda table: (table[np.array([1, 1])] ** 2).sum())(table)
    >>> value, gradient.ids, gradient.values
    (Array(26., dtype=float32), Array([1, 1], dtype=int32), Array([[4., 6.],
           [4., 6.]], dtype=float32))
    """

    def wrapped(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        positions = _positions((argnums,) if isinstance(argnums, int) else argnums, len(args))
        marked = _MarkedLoss(loss, positions, args, kwargs, has_aux)
        gathers = marked.find_gathers()
        probes = [jnp.zeros(rows.shape, rows.dtype) for _, rows in gathers]

        def differentiated(probes: list[Array], arrays: list[Any]) -> tuple[Any, Any]:
            recorder = _Recorder(probes)
            value, aux = marked(recorder, arrays, args)
            return value, (aux, [ids for _, ids, _ in recorder.gathers])

        (value, (aux, ids)), (row_gradients, gradients) = jax.value_and_grad(
            differentiated, argnums=(0, 1), has_aux=True
        )(probes, marked.arrays_of(args))
        numbers = [number for number, _ in gathers]
        by_argument = marked.gradients(list(zip(numbers, ids, row_gradients, strict=True)), iter(gradients))
        return ((value, aux) if has_aux else value), by_argument[0] if isinstance(argnums, int) else by_argument

    return wrapped


class _MarkedLoss:
    """A loss whose differentiated tables are marked, so that a recorder gets their gathers.

    Differentiated arguments are flattened into leaves; a table is a leaf, known by its number among them.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        positions: tuple[int, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        has_aux: bool,
    ) -> None:
        self.loss, self.positions, self.args, self.kwargs, self.has_aux = loss, positions, args, kwargs, has_aux
        leaves, self.tree = jax.tree.flatten(tuple(args[p] for p in positions), is_leaf=_is_table)
        self.num_leaves = len(leaves)
        self.tables = {k: leaf for k, leaf in enumerate(leaves) if _is_table(leaf)}  # by number
        for table in self.tables.values():
            if not jnp.issubdtype(table.dtype, jnp.floating):
                raise ValueError(f"value_and_grad: rows of a differentiated table must be floats, got {table!r}")

    def arrays_of(self, args: tuple[Any, ...]) -> list[Any]:
        """The differentiated leaves that are no tables."""
        return [leaf for leaf in self._leaves_of(args) if not _is_table(leaf)]

    def _leaves_of(self, args: tuple[Any, ...]) -> list[Any]:
        return jax.tree.leaves(tuple(args[p] for p in self.positions), is_leaf=_is_table)

    def __call__(self, recorder: _Recorder, arrays: list[Any], args: tuple[Any, ...]) -> tuple[Any, Any]:
        """(value, aux) of the loss at `args`, with `arrays` in place of the differentiated arrays."""
        leaves, rest, full = self._leaves_of(args), iter(arrays), list(args)
        with recording(recorder, alone=recorder.probes is None) as level:
            recorder.tables = {k: _marked(leaves[k], level, k) for k in self.tables}
            chosen = [recorder.tables[k] if k in self.tables else next(rest) for k in range(self.num_leaves)]
            for p, value in zip(self.positions, jax.tree.unflatten(self.tree, chosen), strict=True):
                full[p] = value
            result = self.loss(*full, **self.kwargs)
        value, aux = result if self.has_aux else (result, None)
        return value, _unmarked(aux, level)

    def find_gathers(self) -> list[tuple[int, jax.ShapeDtypeStruct]]:
        """The gathers of marked tables in order: the table's number, and the shape and dtype of the rows."""
        found: list[tuple[int, jax.ShapeDtypeStruct]] = []

        def trial(args: tuple[Any, ...]) -> None:
            recorder = _Recorder(None)
            self(recorder, self.arrays_of(args), args)
            found.extend((k, jax.ShapeDtypeStruct(rows.shape, rows.dtype)) for k, _, rows in recorder.gathers)

        _shapes_only(trial, self.args)
        return found

    def gradients(self, by_gather: list[tuple[int, Array, Array]], of_arrays: Iterator[Any]) -> Any:
        """The gradients by argument, from (table's number, ids, gradient of the rows) of each gather."""
        leaves = [
            _collected(self.tables[k], [(ids, rows) for number, ids, rows in by_gather if number == k])
            if k in self.tables
            else next(of_arrays)
            for k in range(self.num_leaves)
        ]
        return jax.tree.unflatten(self.tree, leaves)


class _Recorder:
    """Records gathers of marked tables as (number, ids, rows), and attaches a probe to each.

    The gradient of a probe is the gradient of the rows. Without probes it only records.
    """

    def __init__(self, probes: list[Array] | None) -> None:
        self.tables: dict[int, LocalTable] = {}
        self.gathers: list[tuple[int, Array, Array]] = []
        self.probes, self._trace = probes, current_trace()

    def __call__(self, number: int, leaf: Array, ids: Array, rows: Array) -> Array:
        known = self.tables.get(number)
        if known is None or leaf is not known._leaf or not inside(self._trace):
            raise ValueError(
                "value_and_grad: the loss gathers a differentiated table inside a function that it compiles, maps or "
                "scans (jit, vmap, scan, cond, checkpoint), or after writing it; gather outside of that and pass the "
                "rows on"
            )
        if self.probes is not None:
            if len(self.gathers) == len(self.probes):
                raise ValueError(
                    "value_and_grad: the loss must gather the same numbers of rows in each call with the same "
                    "arguments, got more; make the number of gathers depend on arguments alone"
                )
            rows = _attach(rows, self.probes[len(self.gathers)])
        self.gathers.append((number, ids, rows))
        return rows


@jax.custom_jvp
def _attach(rows: Array, probe: Array) -> Array:
    """The rows, with the derivative of `rows + probe`. Adding zeros would turn -0 into 0."""
    del probe
    return rows


@_attach.defjvp
def _attach_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return _attach(*primals), tangents[0] + tangents[1]


def _positions(argnums: Sequence[int], count: int) -> tuple[int, ...]:
    """`argnums` as positions from 0 on."""
    for p in argnums:
        if not -count <= p < count:
            raise TypeError(
                f"value_and_grad: argument {p} must be given by position, since the loss is differentiated by it; got "
                f"{count} positional arguments. Call it as f(table, ...), not f(table=table, ...)"
            )
    return tuple(p % count for p in argnums)


def _shapes_only(function: Callable[[tuple[Any, ...]], None], args: tuple[Any, ...]) -> None:
    """Traces `function` without computing. Arrays among the arguments become tracers, others stay what they are."""
    leaves, tree = jax.tree.flatten(args)
    traced = [k for k, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]

    def of_arrays(arrays: list[Any]) -> None:
        full = list(leaves)
        for k, array in zip(traced, arrays, strict=True):
            full[k] = array
        function(jax.tree.unflatten(tree, full))

    jax.eval_shape(of_arrays, [leaves[k] for k in traced])


def _collected(table: LocalTable, found: list[tuple[Array, Array]]) -> RowGradient:
    """One gradient from (ids, gradient of the rows) of several gathers."""
    row = table.shape[1:]
    return RowGradient(
        jnp.concatenate([ids.reshape(-1) for ids, _ in found] or [jnp.zeros(0, jnp.int32)]),
        jnp.concatenate([rows.reshape(ids.size, *row) for ids, rows in found] or [jnp.zeros((0, *row), np.float32)]),
    )


# -------------------------------------------------------------------------------------------- marks


def _is_table(value: Any) -> bool:
    return isinstance(value, LocalTable)


def _marked(table: Any, level: int, number: int) -> Any:
    return table._with_marks((*table._spec.marks, (level, number)))


def _unmarked(tree: Any, level: int) -> Any:
    """The tree with the marks of `level` taken off its tables: the loss returns the tables that it got."""

    def without(value: Any) -> Any:
        if not _is_table(value):
            return value
        return value._with_marks(tuple(mark for mark in value._spec.marks if mark[0] != level))

    return jax.tree.map(without, tree, is_leaf=_is_table)
