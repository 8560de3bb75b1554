"""The interface between tables and the functions that read and write them: it holds for tables of every placement.

`gather`, `gather_start`, `prefetched_scan`, the writes, the optimizers and `FeatureStore` call a `Table`, and tell no
placements apart. The tables are above these functions, and call them for the rows that one device can read.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import numpy as np
from jax import Array

from dejax.host_gather._spec import TableSpec


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TableOperands:
    """The arrays that a gather reads.

    Attributes:
        spec: the table's static part, with marks.
        leaf: uint[rows, words], the rows in host memory; of a table on the device its rows there.
        cache: uint[cached, words], rows that lie on the device as well, or instead; [0] where none do.
        slots: int32[rows], the row of `cache` that holds each row of the table, below 0 for none; [0] without a cache.
    """

    spec: TableSpec
    leaf: Array
    cache: Array
    slots: Array


class Table(abc.ABC):
    """A table [rows, *row] of any placement: of one device, or divided over the devices of a mesh."""

    __slots__ = ()
    _is_divided: ClassVar[bool] = False  # over devices: then the table has its scales itself

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]: ...

    @property
    @abc.abstractmethod
    def dtype(self) -> np.dtype: ...

    @property
    @abc.abstractmethod
    def placement(self) -> str:
        """Where the rows lie, in words."""

    @abc.abstractmethod
    def numpy(self) -> np.ndarray:
        """The rows in host memory, outside of jitted functions."""

    @property
    def read_only(self) -> bool:
        """Whether steps may not write the table."""
        return False

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows; copies of rows do not count."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def _rows_ahead(self) -> Any:
        """`RowsAhead` of the rows on a drive; None where none can be read before a gather asks for them."""
        return None

    @property
    def _scales(self) -> tuple[Array | None, Array | None]:
        """The scales of rows and of columns that the table itself multiplies its rows by."""
        return None, None

    def _operands(self, what: str) -> TableOperands | None:
        """The arrays that a kernel of one device reads, checked; None where rows come from other devices.

        Args:
            what: the caller's name, for the error.

        Raises:
            TableClosedError: the table was closed, donated, or inherited by a forked child.
            ValueError: the table was sliced or reshaped.
            TypeError: a function that jax compiles closes over the table.
        """
        del what
        return None

    @abc.abstractmethod
    def _read(self, what: str, ids: Any, options: Any, capacity: int | None = None) -> tuple[Array, Array | int]:
        """Rows by ids, and how many ids of this device did not fit.

        Args:
            what: the caller's name, for errors.
            ids: int[...].
            options: the `GatherOptions`.
            capacity: for a divided table, the most rows that a device asks of another one; None: all.
        """

    @abc.abstractmethod
    def _begin(self, what: str, ids: Any, before: Any, options: Any) -> tuple[Any, Any]:
        """PendingRows and `before`: see `gather_start`."""

    @abc.abstractmethod
    def _write(self, what: str, write: Callable[[Any, Any, Any], Any], ids: Any, rows: Any) -> Any:
        """The table after `write(table of one device, ids, rows)`, which the devices that hold the rows call."""

    @abc.abstractmethod
    def _new_state(self, optimizer: Any) -> Any:
        """The optimizer's state of the table."""

    @abc.abstractmethod
    def _after(
        self, optimizer: Any, gradient: Any, state: Any, capacity: int | None = None
    ) -> tuple[Any, Any, Array | int]:
        """The table and the state after a step, and how many rows of this device did not fit."""

    def __iter__(self) -> NoReturn:
        # Without it Python would ask for rows 0, 1, ... for ever: ids out of range give rows of zeros, no IndexError.
        raise TypeError(
            "HostTable: iterating over a table would call gather for each row. Use `for row in table.numpy()` outside "
            "of jit, or table[jnp.arange(len(table))]"
        )

    def __contains__(self, value: Any) -> NoReturn:
        raise TypeError("HostTable: `in` would read the whole table; use `value in table.numpy()` outside of jit")


def table_of(what: str, table: Any) -> Table:
    """`table`, which must be a table of this package."""
    if not isinstance(table, Table):
        raise TypeError(f"{what}: `table` must be a HostTable, got {type(table).__name__}; see HostTable.from_numpy")
    return table


def check_whole(table: Table, capacity: int | None) -> None:
    """Refuses the bound of an exchange for a table of which one device reads all rows."""
    if capacity is not None:
        raise ValueError(f"`capacity` must be of a table that is divided over devices, got one on: {table.placement}")
