"""Arrays in host memory or on disk whose rows travel through the device in a loop: the state of a stack of layers.

A row is a layer's part of an array [layers, ...]. Row `t + ahead` is copied to the device while the program works on
row `t`, and changed rows are copied back meanwhile. Where a mesh divides the arrays, each device copies the rows of its
own shards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from dejax.offload.state.meshes import divided, shard_bytes, why_no_rows
from dejax.offload.state.stream.calls import ArrayPiece, Stream, StreamUse, staging_bytes

_USE = StreamUse(
    feature="offload.stack_step",
    scope="offload_rows",
    several="stack_step: `state` must come from this step's init if it lies on several devices, got one that the step "
    "has not seen; place parameters and batches on one mesh, make the state by init, and call step.jit(state)",
    sharded=2,
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


class HostRows(Stream):
    """The calls of one step, in the order in which they are made.

    Args:
        arrays: the arrays, in host memory or on disk, [rows, ...], all with as many rows.
        shardings: the sharding of each array; what is no `NamedSharding` on several devices is on one device.
        ahead: number of rows that are on their way to the device. Staging memory holds as many, and one more, each way.

    Raises:
        ValueError: not all arrays are on one mesh, or the mesh divides rows from one another.
    """

    def __init__(self, arrays: Sequence[Any], shardings: Sequence[Any], ahead: int) -> None:
        if any(map(divided, shardings)) and (why := why_no_rows(arrays, shardings)):
            raise ValueError(f"stack_step: {why}")
        pairs = zip(arrays, shardings, strict=True)
        row = [shard_bytes(at, x.shape, x.dtype) // x.shape[0] for x, at in pairs]
        super().__init__(_USE, arrays, shardings, staging_bytes(row, ahead, arrays[0].shape[0]))

    def first_rows(self, ticket: Array, walk: Walk) -> Array:
        """Begins to copy the rows of the first iterations to the device."""

        def calls(ticket: Array) -> tuple[Array, list[Array]]:
            for t in range(min(walk.ahead, walk.length)):
                ticket, _ = self.call(ticket, pull=self._rows(walk, walk.arrays, t, in_loop=False))
            return ticket, []

        return self.run(calls, ticket)[0]

    def take(self, ticket: Array, walk: Walk) -> tuple[Array, list[Array]]:
        """The rows of this iteration, in the body of a loop; begins to copy the rows of later iterations."""

        def calls(ticket: Array) -> tuple[Array, list[Array]]:
            return self.call(
                ticket,
                take=self._rows(walk, walk.arrays, 0),
                pull=self._rows(walk, walk.arrays, walk.ahead),
                pull_iterations=max(0, walk.length - walk.ahead),
            )

        return self.run(calls, ticket, results=self._row_specs(walk.arrays))

    def put(self, ticket: Array, walk: Walk, arrays: Sequence[int], values: Sequence[Array]) -> Array:
        """Begins to copy new values of this iteration's rows of some arrays to the host, in the body of a loop."""

        def calls(ticket: Array, *values: Array) -> tuple[Array, list[Array]]:
            return self.call(ticket, push=self._rows(walk, arrays, 0), values=values)

        return self.run(calls, ticket, values, self._row_specs(arrays))[0]

    def finish_step(self, ticket: Array, results: Sequence[tuple[Array, Any]]) -> list[Any]:
        """Ends a step; returns the arrays, in the memory that they came in.

        Args:
            ticket: the ticket of the last call.
            results: the results of the step, each with its sharding.
        """
        return self.finish(ticket, *self._waited(results))

    def finish_loss(self, ticket: Array, loss: Array) -> None:
        """Ends a program that only reads."""
        self.finish_reading(ticket, *self._waited([(loss, None)]))

    def _rows(self, walk: Walk, arrays: Sequence[int], iteration: int, *, in_loop: bool = True) -> list[ArrayPiece]:
        """The rows of some arrays in an iteration; in a loop, those of the iteration `ahead` steps later."""
        pieces = []
        for i in arrays:
            piece = ArrayPiece(i, 0, tuple(self.shards[i].shape[1:]), self.shards[i].dtype)
            offset = (walk.length - 1 - iteration if walk.reverse else iteration) * piece.nbytes
            stride = (-piece.nbytes if walk.reverse else piece.nbytes) if in_loop else 0
            pieces.append(dataclasses.replace(piece, offset=offset, stride=stride))
        return pieces

    def _waited(self, results: Sequence[tuple[Array, Any]]) -> tuple[list[Array], list[PartitionSpec]]:
        """Values that the last call waits for, and how they are divided.

        The CPU's devices run what does not depend on one another in orders of their own. If a call raised on one of
        them too early, another one would wait for it in a collective operation. So on CPUs the last call raises what
        any call refuses, and it waits for all of the step's results. A GPU's devices run programs in one order: there
        a call raises at once.
        """
        if self.mesh is None or self.mesh.devices.flat[0].platform != "cpu":
            return [], []
        values = [
            (x, at.spec if isinstance(at, NamedSharding) and at.mesh == self.mesh else PartitionSpec())
            for x, at in results
            if x.size and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
        ]
        return [x for x, _ in values], [spec for _, spec in values]

    def _row_specs(self, arrays: Sequence[int]) -> list[PartitionSpec]:
        return [PartitionSpec(*self.specs[i][1:]) for i in arrays]
