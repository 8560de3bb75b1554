"""The FFI calls by which devices copy arrays in host memory or on disk, one call after the other.

`native/state/pieces.h` says how the copies run. Arrays in host memory are operands of the first and the last calls
alone, and arrays on disk of none: the calls between name them by their numbers. So these calls may be in a loop.

Each device of a mesh makes the calls for its own shards. On several devices the calls are in the bodies of
`shard_map`s, and their ticket has a row on each device. So devices wait for one another only where the arithmetic
between the calls does. One device is a mesh of one, whose calls need no `shard_map`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from dejax import _compat, _native
from dejax._native import ffi_call
from dejax.offload.state import disk_shards
from dejax.offload.state.meshes import divided, placed_as
from dejax.offload.state.store import DiskArray, is_on_disk

REGISTER, BEGIN, FINISH, LOOP, OPEN, COMMIT = range(6)  # native/state/pieces.h
_STAGED = 256  # alignment of pieces in staging memory, as in native/state/staging.h
_EMPTY = np.zeros(0, np.int64)
_sites = itertools.count(1)


def staging_bytes(sizes: Sequence[int], ahead: int, count: int) -> int:
    """Size of the device's staging memory: the pieces of all calls that are under way at one time, in each direction.

    Args:
        sizes: bytes of the pieces of one call.
        ahead: number of calls whose pieces are on their way to the device. One more has arrived.
        count: the number of calls.
    """
    return 2 * min(ahead + 1, count) * sum(-(-size // _STAGED) * _STAGED for size in sizes)


@dataclass(frozen=True, slots=True)
class StreamUse:
    """The properties of a stream.

    Attributes:
        feature: the function of the user, in messages.
        scope: the calls' name in profiles.
        several: the message where several devices run a program of one.
        sharded: the attribute `sharded` in native/state/pieces.h, where the arrays are shards.
    """

    feature: str
    scope: str
    several: str
    sharded: int


@dataclass(frozen=True, slots=True)
class ArrayPiece:
    """A part of one array, or of a device's shard, that is copied at once.

    Attributes:
        array: number of the array in its stream.
        offset: in bytes, where it begins.
        shape, dtype: the shape and dtype of the part.
        stride: in a loop: bytes from one iteration's part to the next one's.
    """

    array: int
    offset: int
    shape: tuple[int, ...]
    dtype: Any
    stride: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Stream:
    """The calls of a program, on all devices, in the order in which they are made.

    Args:
        use: what they are made for.
        arrays: the arrays, in host memory or on disk.
        shardings: the sharding of each array, on one mesh; on one device anything that names no several devices.
        staging_bytes: cap of staging memory on each device.

    Attributes:
        mesh: the mesh of the devices; None: one device.
        shards: one device's shard of each array, without values where a mesh divides them.
    """

    def __init__(self, use: StreamUse, arrays: Sequence[Any], shardings: Sequence[Any], staging_bytes: int) -> None:
        _native.extension(use.feature)
        self.arrays = list(arrays)
        self.shards = shapes_of_shards(arrays, shardings)
        self.mesh = shardings[0].mesh if any(map(divided, shardings)) else None
        self.specs = [PartitionSpec() if self.mesh is None else sharding.spec for sharding in shardings]
        self._each = PartitionSpec(() if self.mesh is None else self.mesh.axis_names)
        self._use = use
        self._in_host = [k for k, x in enumerate(arrays) if not is_on_disk(x)]
        self._on_disk = [k for k, x in enumerate(arrays) if is_on_disk(x)]
        self._changed: set[int] = set()  # numbers of the arrays on disk that the program changes
        self._staging_bytes = staging_bytes
        self._site = next(_sites)
        self._calls = 0

    def begin(self, *, changes: bool = True) -> Array:
        """Begins a program: makes the arrays that it changes its own; returns the ticket that the next call takes.

        Args:
            changes: whether the program changes arrays.
        """

        def body(_: Any, *operands: Any) -> tuple[Array, list[Any]]:
            own = self._own(operands)
            in_host = [own[k] for k in self._in_host]
            if changes and in_host:
                # Not fixed: XLA for a GPU refuses a call that overwrites one operand twice. It would make one value of
                # two equal ones, such as the zeros of both of Adam's moments in a program that also makes its first
                # state. It merges no results of a barrier.
                in_host = self._ffi(BEGIN, in_host, self._in_host, through=len(in_host))
            ticket = jnp.zeros((2,), jnp.uint32)
            if self.mesh is None:
                ticket = _compat.on_one_device(ticket, self._use.several)
            fixed = range(1, 1 + len(in_host))
            (ticket,) = self._ffi(REGISTER, [ticket, *in_host], self._in_host, fixed=fixed)
            return self._opened(ticket, [own[k] for k in self._on_disk]), in_host

        first = None if self.mesh is None else jnp.zeros((self.mesh.size, 2), jnp.uint32)
        specs = [self.specs[k] for k in self._in_host]
        ticket, in_host = self.run(body, first, self._operands(), self._operand_specs(), specs)
        for k, array in zip(self._in_host, in_host, strict=True):
            self.arrays[k] = array
        return ticket

    def _opened(self, ticket: Array, on_disk: Sequence[DiskArray]) -> Array:
        """Opens the arrays on disk, in `begin`, on one device; returns the ticket for the next call."""
        if not on_disk:
            return ticket
        sizes = {"pull_bytes": np.array([x.nbytes for x in on_disk], np.int64)}
        tickets = jnp.stack([x.ticket for x in on_disk])
        if self.mesh is not None:
            whole = [self.arrays[k] for k in self._on_disk]
            sizes["marks"] = np.array([disk_shards.mark_of(x.sharding, x.shape) for x in whole], np.int64)
            place = jax.lax.axis_index(self.mesh.axis_names)
            own = jnp.full((len(on_disk), 1), jnp.asarray(place, jnp.uint32))
            tickets = jnp.concatenate((tickets, own), axis=1)
        return self._ffi(OPEN, [ticket, tickets], self._on_disk, attributes=sizes)[0]

    def call(
        self,
        ticket: Array,
        *,
        take: Sequence[ArrayPiece] = (),
        pull: Sequence[ArrayPiece] = (),
        pull_iterations: int = 1,
        push: Sequence[ArrayPiece] = (),
        values: Sequence[Array] = (),
        after: Sequence[Array] = (),
    ) -> tuple[Array, list[Array]]:
        """Makes a call between the first and the last one, in `run`; it may be in the body of a loop.

        Args:
            ticket: the ticket of the previous call.
            take: pieces that it returns, which an earlier call has begun to copy.
            pull: pieces that it begins to copy to the device.
            pull_iterations: it does so in the first iterations alone.
            push: pieces of which it begins to copy new values to the host.
            values: the new values.
            after: what it only waits for.
        """
        self._changed.update(piece.array for piece in push if is_on_disk(self.arrays[piece.array]))
        attributes: dict[str, Any] = {"call": np.int64(self._calls), "pull_iterations": np.int64(pull_iterations)}
        self._calls += 1
        for name, pieces in (("take", take), ("pull", pull), ("push", push)):
            attributes[f"{name}_array"] = np.array([piece.array for piece in pieces], np.int64)
            attributes[f"{name}_offset"] = np.array([piece.offset for piece in pieces], np.int64)
            attributes[f"{name}_stride"] = np.array([piece.stride for piece in pieces], np.int64)
        attributes["pull_bytes"] = np.array([piece.nbytes for piece in pull], np.int64)
        results = [jax.ShapeDtypeStruct(piece.shape, piece.dtype) for piece in take]
        ticket, *taken = self._ffi(LOOP, [ticket, *values, *after], results=results, attributes=attributes)
        return ticket, taken

    def finish(self, ticket: Array, after: Sequence[Array] = (), given: Sequence[PartitionSpec] = ()) -> list[Any]:
        """Waits for all copies; returns the arrays, in the memory that they came in.

        Args:
            ticket: the ticket of the last call.
            after: values that are computed before the last call.
            given: how they are divided.
        """
        specs = self._operand_specs()
        count = len(specs)

        def body(ticket: Array, *values: Any) -> tuple[Array, list[Any]]:
            own, after = self._own(values[:count]), values[count:]
            if self._changed:
                (ticket,) = self._ffi(COMMIT, [ticket], sorted(self._changed))
            if in_host := [own[k] for k in self._in_host]:
                fixed = range(len(in_host))
                operands = [*in_host, ticket, *after]
                in_host = self._ffi(FINISH, operands, self._in_host, through=len(in_host), fixed=fixed)
                for k, array in zip(self._in_host, in_host, strict=True):
                    own[k] = array
            else:
                (ticket,) = self._ffi(FINISH, [ticket, *after])
            # The next tickets of changed arrays come after the last call: a step that fails gives none.
            for k in self._changed:
                # The stream's ticket holds zeros, which XLA does not know. A barrier with one used result would not
                # wait.
                own[k] = own[k].next_version(own[k].ticket + ticket[0])
            return ticket, [x.ticket[None] if self.mesh is not None and is_on_disk(x) else x for x in own]

        _, arrays = self.run(body, ticket, [*self._operands(), *after], [*specs, *given], specs)
        if self.mesh is not None:
            arrays = [x.with_ticket(y) if is_on_disk(x) else y for x, y in zip(self.arrays, arrays, strict=True)]
        self.arrays = list(arrays)
        return self.arrays

    def finish_reading(self, ticket: Array, after: Sequence[Array] = (), given: Sequence[PartitionSpec] = ()) -> None:
        """Ends a program that only reads: the call has side effects, so it runs although nothing uses its result."""

        def body(ticket: Array, *after: Array) -> tuple[Array, list[Any]]:
            self._ffi(FINISH, [ticket, *after])
            return ticket, []

        self.run(body, ticket, after, given)

    def run(
        self,
        calls: Callable[..., tuple[Array, Sequence[Any]]],
        ticket: Any,
        values: Sequence[Any] = (),
        given: Sequence[PartitionSpec] = (),
        results: Sequence[PartitionSpec] = (),
    ) -> tuple[Array, list[Any]]:
        """Makes calls on every device, `calls(ticket, *shards of values)`; returns the ticket and the results.

        Args:
            calls: a function that returns a ticket and a list of arrays.
            ticket: the tickets of all devices.
            values: divided as `given` says.
            given: shardings of the values.
            results: shardings of the results.
        """
        if self.mesh is None:
            ticket, made = calls(ticket, *values)
            return ticket, list(made)

        def body(ticket: Array, *shards: Any) -> Any:
            ticket, made = calls(ticket[0], *shards)
            return ticket[None], list(made)

        specs = (self._each, *given)
        mapped = jax.shard_map(
            body, mesh=self.mesh, in_specs=specs, out_specs=(self._each, list(results)), check_vma=False
        )
        ticket, made = mapped(*placed_as(self.mesh, (ticket, *values), specs))
        return ticket, made

    def _operands(self) -> list[Any]:
        """The operands by which a body gets the arrays; on several devices, arrays on disk are passed as tickets."""
        return [x.ticket if self.mesh is not None and is_on_disk(x) else x for x in self.arrays]

    def _operand_specs(self) -> list[PartitionSpec]:
        return [self._each if is_on_disk(x) else spec for x, spec in zip(self.arrays, self.specs, strict=True)]

    def _own(self, operands: Sequence[Any]) -> list[Any]:
        """The device's own shards, from `_operands`, inside of a body."""
        if self.mesh is None:
            return list(operands)
        return [
            x.shard(operand[0]) if is_on_disk(x) else operand for x, operand in zip(self.arrays, operands, strict=True)
        ]

    def _ffi(
        self,
        mode: int,
        operands: Sequence[Array],
        numbers: Sequence[int] = (),
        *,
        through: int = 1,
        fixed: Collection[int] = (),
        results: Sequence[Any] = (),
        attributes: dict[str, Any] | None = None,
    ) -> list[Array]:
        """Makes a native call on one device.

        Args:
            mode: see native/state/pieces.h.
            operands: the operands of the call.
            numbers: the numbers of the arrays that it names.
            through: this number of first operands are results, too, in the same memory.
            fixed: positions of operands that no barrier may stand before.
            results: shapes and dtypes of the further ones.
            attributes: in place of those that say nothing.
        """
        names = [f"{name}_{what}" for name in ("take", "pull", "push") for what in ("array", "offset", "stride")]
        given = {
            "site": np.int64(self._site),
            "mode": np.int64(mode),
            "staging_bytes": np.int64(self._staging_bytes),
            "call": np.int64(0),
            "pull_iterations": np.int64(0),
            "sharded": np.int64(0 if self.mesh is None else self._use.sharded),
            "marks": _EMPTY,
            "arrays": np.array(list(numbers), np.int64),
            "pull_bytes": _EMPTY,
            **dict.fromkeys(names, _EMPTY),
            **(attributes or {}),
        }
        with jax.named_scope(self._use.scope):
            return ffi_call(
                "dejax_offload_pieces",
                [*map(jax.typeof, operands[:through]), *results],
                operands,
                fixed=fixed,
                fixed_results=range(through),
                aliases={k: k for k in range(through)},
                has_side_effect=True,
                **given,
            )


def shapes_of_shards(arrays: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """The shape and dtype of one device's shard of each array; an array on one device is its own shard."""
    if not any(map(divided, shardings)):
        return list(arrays)
    return [
        x.shard(None) if is_on_disk(x) else jax.ShapeDtypeStruct(sharding.shard_shape(x.shape), x.dtype)
        for x, sharding in zip(arrays, shardings, strict=True)
    ]
