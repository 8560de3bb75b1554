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


@jax.custom_vjp
def _attach(rows: Array, probe: Array) -> Array:
    del probe
    return rows


_attach.defvjp(lambda rows, probe: (rows, None), lambda _, cotangent: (None, cotangent))


def value_and_grad(
    loss: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """As `jax.value_and_grad`, where the gradient of a `HostTable` argument is a `RowGradient`.

    Args:
        loss: a function of tables and arrays that gives a scalar, or (scalar, aux). It must gather directly, not
            inside a
            function that it compiles, maps or scans itself: gather first and pass the rows on.
        argnums: positions of the arguments to differentiate by; tables and ordinary pytrees may be mixed.
        has_aux: whether `loss` gives aux beside the scalar.

    Returns:
        A function with the arguments of `loss` that gives (value, gradients) or ((value, aux), gradients), for jit or
        outside of it.

    Raises:
        ValueError: when called: a gather of a differentiated table inside another transformation; a table whose rows
            are no floats.

    >>> table = HostTable.from_numpy(np.arange(6.0, dtype=np.float32).reshape(3, 2))
    >>> value, gradient = value_and_grad(lambda table: (table[np.array([1, 1])] ** 2).sum())(table)
    >>> value, gradient.ids, gradient.values
    (Array(26., dtype=float32), Array([1, 1], dtype=int32), Array([[4., 6.],
           [4., 6.]], dtype=float32))
    """
    single = isinstance(argnums, int)
    positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def wrapped(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        tables = [p for p in positions if isinstance(args[p], HostTable)]
        others = [p for p in positions if p not in tables]
        for p in tables:
            if not jnp.issubdtype(args[p].dtype, jnp.floating):
                raise ValueError(
                    f"value_and_grad: argument {p} is a table of {args[p].dtype}; only rows of floats have one"
                )

        def run(
            probes: list[Array] | None, given: list[Any], rest: tuple[Any, ...]
        ) -> tuple[Any, tuple[Any, list[Any]]]:
            """The loss with each gather noted, as (table position, ids, rows)."""
            full = list(rest)
            for p, value in zip(others, given, strict=True):
                full[p] = value
            noted: list[tuple[int, Array, Array]] = []
            known = [value._leaf for value in jax.tree.leaves(full, is_leaf=_is_table) if _is_table(value)]

            def recorder(table: HostTable, ids: Array, rows: Array) -> Array:
                for p in tables:
                    if table._leaf is full[p]._leaf:
                        if probes is not None:
                            rows = _attach(rows, probes[len(noted)])
                        noted.append((p, ids, rows))
                        return rows
                if not any(table._leaf is leaf for leaf in known) and any(table._spec == args[p]._spec for p in tables):
                    raise ValueError(
                        "value_and_grad: the loss gathers a differentiated table inside a function that it "
                        "compiles, maps or "
                        "scans; gather outside of that and pass the rows on"
                    )
                return rows

            with recording(recorder):
                result = loss(*full, **kwargs)
            value, aux = result if has_aux else (result, None)
            return value, (aux, noted)

        shapes: list[tuple[int, Any]] = []

        def shape_pass(rest: tuple[Any, ...]) -> None:
            _, (_, noted) = run(None, [rest[p] for p in others], rest)
            shapes.extend((p, jax.ShapeDtypeStruct(rows.shape, rows.dtype)) for p, _, rows in noted)

        jax.eval_shape(shape_pass, args)
        probes = [jnp.zeros(shape.shape, shape.dtype) for _, shape in shapes]

        def differentiated(probes: list[Array], given: list[Any]) -> tuple[Any, Any]:
            value, (aux, noted) = run(probes, given, args)
            return value, (aux, [ids for _, ids, _ in noted])

        (value, (aux, ids)), (row_gradients, other_gradients) = jax.value_and_grad(
            differentiated, argnums=(0, 1), has_aux=True
        )(probes, [args[p] for p in others])
        found: dict[int, Any] = dict(zip(others, other_gradients, strict=True))
        for p in tables:
            row = args[p].shape[1:]
            mine = [k for k, (q, _) in enumerate(shapes) if q == p]
            found[p] = RowGradient(
                jnp.concatenate([ids[k].reshape(-1) for k in mine] or [jnp.zeros(0, jnp.int32)]),
                jnp.concatenate(
                    [row_gradients[k].reshape(-1, *row) for k in mine] or [jnp.zeros((0, *row), np.float32)]
                ),
            )
        gradients = tuple(found[p] for p in positions)
        return ((value, aux) if has_aux else value), gradients[0] if single else gradients

    return wrapped


def _is_table(value: Any) -> bool:
    return isinstance(value, HostTable)
