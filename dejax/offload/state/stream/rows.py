"""Arrays in host memory or on disk whose rows travel through the device in a loop: the state of a stack of layers.

`host_arrays.py` has the calls. A row is a layer's part of an array [layers, ...]. Row `t + ahead` is
copied to the device while the program works on row `t`, and changed rows are copied back meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array

from dejax.offload.state.stream.host_arrays import HostArrays

_SEVERAL = (
    "stack_step: `state` must come from this step's init if it lies on several devices, got one that the step has not "
    "seen; place parameters and batches on one mesh, make the state by init, and call step.jit(state)"
)


@dataclass(frozen=True, slots=True)
class Walk:
    """A loop over the rows of some arrays.

    Attributes:
        arrays: numbers of the arrays whose rows are read.
        length: number of rows.
        reverse: the last row comes first.
        ahead: number of rows that are on their way.
    """

    arrays: tuple[int, ...]
    length: int
    reverse: bool
    ahead: int

    def offset(self, iteration: int, row_bytes: int) -> int:
        """Of the row of an iteration."""
        return (self.length - 1 - iteration if self.reverse else iteration) * row_bytes

    def stride(self, row_bytes: int) -> int:
        """From one iteration's row to the next one's."""
        return -row_bytes if self.reverse else row_bytes


class HostRows(HostArrays):
    """The calls of one step, in the order in which they are made.

    Args:
        arrays: in host memory or on disk, [rows, ...], all with as many rows.
        staging_bytes: cap of staging memory on the device.
        marks: of the calls of one device of several, whose arrays are its shards: how each array on disk is divided.
    """

    FEATURE = "offload.stack_step"
    SCOPE = "offload_rows"
    SEVERAL = _SEVERAL
    SHARDED = 2

    def __init__(self, arrays: Sequence[Any], staging_bytes: int, marks: Sequence[int] | None = None) -> None:
        super().__init__(arrays, staging_bytes, marks)
        self._rows = [math.prod(x.shape[1:]) * np.dtype(x.dtype).itemsize for x in arrays]

    def first_rows(self, ticket: Array, walk: Walk) -> Array:
        """Begins to copy the rows of the first iterations to the device."""
        for t in range(min(walk.ahead, walk.length)):
            offsets = [walk.offset(t, self._rows[i]) for i in walk.arrays]
            pulls = (walk.arrays, offsets, [0] * len(offsets))
            ticket, _ = self.loop(ticket, pulls=pulls, pull_bytes=[self._rows[i] for i in walk.arrays])
        return ticket

    def take(self, ticket: Array, walk: Walk) -> tuple[Array, list[Array]]:
        """In the body of a loop: the iteration's rows; begins to copy later ones."""
        rows = [self._rows[i] for i in walk.arrays]
        strides = [walk.stride(row) for row in rows]
        later = [walk.offset(walk.ahead, row) for row in rows]
        return self.loop(
            ticket,
            takes=(walk.arrays, [walk.offset(0, row) for row in rows], strides),
            results=[jax.ShapeDtypeStruct(self.arrays[i].shape[1:], self.arrays[i].dtype) for i in walk.arrays],
            pulls=(walk.arrays, later, strides),
            pull_bytes=rows,
            pull_iterations=max(0, walk.length - walk.ahead),
        )

    def put(self, ticket: Array, walk: Walk, arrays: Sequence[int], values: Sequence[Array]) -> Array:
        """In the body of a loop: begins to copy new values of the iteration's rows of some arrays to the host."""
        rows = [self._rows[i] for i in arrays]
        pushes = (arrays, [walk.offset(0, row) for row in rows], [walk.stride(row) for row in rows])
        return self.loop(ticket, pushes=pushes, values=values)[0]
