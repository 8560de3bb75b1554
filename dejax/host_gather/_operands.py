"""What the tables of all placements share: the interface between tables and the functions that read and write them.

`gather` accepts any `ReadableTable`. The tables are above `gather`, and call it for `table[ids]`.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn

import jax.numpy as jnp
import numpy as np
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


class Table(abc.ABC):
    """A table [rows, *row] of any placement, also one that is divided over the devices of a mesh."""

    __slots__ = ()
    _is_divided: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]: ...

    @property
    @abc.abstractmethod
    def dtype(self) -> np.dtype: ...

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Of the rows, without copies."""

    @property
    @abc.abstractmethod
    def placement(self) -> str:
        """Where the rows lie, in words."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def numpy(self) -> np.ndarray:
        """The rows in host memory, outside of jitted functions."""

    @property
    def read_only(self) -> bool:
        """Whether steps may not write the table."""
        return False

    @property
    def _scales(self) -> tuple[Array | None, Array | None]:
        """The scales of rows and of columns that the table itself multiplies its rows by."""
        return None, None

    @abc.abstractmethod
    def _read(self, ids: Any, *, capacity: int | None, **options: Any) -> tuple[Array, Array | int]:
        """Rows by ids, and how many ids of this device did not fit: `options` are those of `gather`.

        Args:
            ids: int[...].
            capacity: of a divided table, the most rows that a device asks of another one; None: all.
            options: of `gather`.
        """

    @abc.abstractmethod
    def _begin(self, ids: Any, before: Any, **options: Any) -> tuple[Any, Any]:
        """As `gather_start`: what will have the rows, or the rows themselves where reading ahead gains nothing."""

    @abc.abstractmethod
    def _new_state(self, optimizer: Any) -> Any:
        """The optimizer's state of the table."""

    @abc.abstractmethod
    def _after(self, optimizer: Any, gradient: Any, state: Any, capacity: int | None) -> tuple[Any, Any, Array | int]:
        """The table and the state after a step, and how many rows of this device did not fit."""


class ReadableTable(Table):
    """A table of one device that `gather` and the functions above it can read, wherever its rows lie."""

    __slots__ = ()
    _differentiable: ClassVar[bool] = False  # whether `value_and_grad` gives its gradient

    @property
    @abc.abstractmethod
    def _spec(self) -> TableSpec: ...

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

    @property
    def shape(self) -> tuple[int, ...]:
        return self._spec.shape

    @property
    def dtype(self) -> np.dtype:
        return self._spec.dtype

    @property
    def ndim(self) -> int:
        return len(self._spec.shape)

    @property
    def size(self) -> int:
        return math.prod(self._spec.shape)

    @property
    def nbytes(self) -> int:
        """Of the rows, without cached copies."""
        return self._spec.nbytes

    @property
    def read_only(self) -> bool:
        return self._spec.read_only

    def __len__(self) -> int:
        return self._spec.rows

    # -------------------------------------------------------------------------------------------- writing

    def _parts(self) -> tuple[Any, ...]:
        """The rows as tables of one array each, for writes: `HostTable`s and `DeviceTable`s."""
        return (self,)

    def _ids_in_parts(self, ids: Array) -> tuple[Array, ...]:
        """For each part the row there of each id; -1 where another part has the row."""
        return (ids,)

    def _of_parts(self, parts: Sequence[Any], ids: Array) -> Any:
        """The table after its parts were written at `ids`."""
        del ids
        (part,) = parts
        return part

    @abc.abstractmethod
    def _moment(self, what: str, value: float) -> Any:
        """A float32 table of the same shape, which lies where the rows lie, with one value in all elements."""

    def __iter__(self) -> NoReturn:
        # Without it Python would ask for rows 0, 1, ... for ever: ids out of range give rows of zeros, no IndexError.
        raise TypeError(
            "HostTable: iterating over a table would call gather for each row. Use `for row in table.numpy()` outside "
            "of jit, or table[jnp.arange(len(table))]"
        )

    def __contains__(self, value: Any) -> NoReturn:
        raise TypeError("HostTable: `in` would read the whole table; use `value in table.numpy()` outside of jit")


def operands_of(what: str, table: Any) -> TableOperands:
    """The operands of `table`, which must be a table of this package."""
    if not isinstance(table, ReadableTable):
        raise TypeError(f"{what}: `table` must be a HostTable, got {type(table).__name__}; see HostTable.from_numpy")
    return table._operands(what)
