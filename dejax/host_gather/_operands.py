"""The interface between tables and the functions that read them.

`gather` accepts any `ReadableTable`. `HostTable` and `CachedTable` implement it, and call `gather` for `table[ids]`.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from dejax.host_gather._spec import TableSpec


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TableOperands:
    """The arrays that a gather reads.

    Attributes:
        spec: the table's static part, with marks.
        leaf: uint[rows, words], the rows in host memory.
        cache: uint[cached, words], rows that also lie on the device; [0] where none do.
        slots: int32[rows], the row of `cache` that holds each row of the table, -1 for none; [0] without a cache.
    """

    spec: TableSpec
    leaf: Array
    cache: Array
    slots: Array

    @classmethod
    def of_leaf(cls, spec: TableSpec, leaf: Array) -> TableOperands:
        """The operands of a table without a cache."""
        return cls(spec, leaf, slots=jnp.zeros((0,), jnp.int32), cache=jnp.zeros((0,), spec.leaf.dtype))


class ReadableTable(abc.ABC):
    """A table that `gather` and the functions above it can read."""

    __slots__ = ()

    @abc.abstractmethod
    def _operands(self, what: str) -> TableOperands:
        """The table's arrays, checked.

        Args:
            what: the caller's name, for the error.

        Raises:
            TableClosedError: the table was closed, donated, or inherited by a forked child.
            ValueError: the table was sliced or reshaped.
            TypeError: a function that jax compiles closes over the table.
        """


def operands_of(what: str, table: Any) -> TableOperands:
    """The operands of `table`, which must be a HostTable or a CachedTable."""
    if not isinstance(table, ReadableTable):
        raise TypeError(f"{what}: `table` must be a HostTable, got {type(table).__name__}; see HostTable.from_numpy")
    return table._operands(what)
