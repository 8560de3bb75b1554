"""Arrays in host memory or on disk whose rows travel through the device in a loop: the state of a stack of layers.

`native/offload/pieces.h` says how the copies run. A row is a layer's part of an array [layers, ...]. Row `t + ahead` is
copied to the device while the program works on row `t`, and changed rows are copied back meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax import _compat, _native
from dejax.offload._chain import BEGIN, BETWEEN, COMMIT, FINISH, LOOP, OPEN, new_site
from dejax.offload._state_store import is_on_disk

_EMPTY = np.zeros(0, np.int64)
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


class HostRows:
    """The calls of one step, in the order in which they are made.

    Args:
        arrays: in host memory or on disk, [rows, ...], all with as many rows.
        staging_bytes: cap of staging memory on the device.
        marks: of the calls of one device of several, whose arrays are its shards: how each array on disk is divided.
    """

    def __init__(self, arrays: Sequence[Any], staging_bytes: int, marks: Sequence[int] | None = None) -> None:
        _native.extension("offload.stack_step")
        self.arrays = list(arrays)
        self._near = [k for k, x in enumerate(arrays) if not is_on_disk(x)]
        self._on_disk = [k for k, x in enumerate(arrays) if is_on_disk(x)]
        self._changed: set[int] = set()  # of those on disk
        self._rows = [math.prod(x.shape[1:]) * np.dtype(x.dtype).itemsize for x in arrays]
        self._staging_bytes = staging_bytes
        self._marks = marks
        self._site = new_site()
        self._slots = 0

    def begin(self, *, changes: bool = True, place: Any = None) -> Array:
        """Makes the arrays the program's own if it changes them; returns the ticket that the next call takes.

        Args:
            changes: whether the program changes arrays.
            place: of this device in the mesh, where the arrays are shards.
        """
        near = [self.arrays[k] for k in self._near]
        if changes and near:
            near = list(
                self._ffi(BEGIN, list(map(jax.typeof, near)), {k: k for k in range(len(near))}, self._near)(*near)
            )
            for k, array in zip(self._near, near, strict=True):
                self.arrays[k] = array
        ticket = jnp.zeros((2,), jnp.uint32)
        if self._marks is None:
            ticket = _compat.on_one_device(ticket, _SEVERAL)
        ticket = self._ffi(BETWEEN, [jax.typeof(ticket)], {0: 0}, self._near)(ticket, *near)[0]
        if not self._on_disk:
            return ticket
        sizes = {"pull_bytes": np.array([self.arrays[k].nbytes for k in self._on_disk], np.int64)}
        tickets = jnp.stack([self.arrays[k].ticket for k in self._on_disk])
        if self._marks is not None:
            sizes["marks"] = np.array(self._marks, np.int64)
            own = jnp.full((len(self._on_disk), 1), jnp.asarray(place, jnp.uint32))
            tickets = jnp.concatenate((tickets, own), axis=1)
        return self._ffi(OPEN, [jax.typeof(ticket)], {0: 0}, self._on_disk, sizes)(ticket, tickets)[0]

    def first_rows(self, ticket: Array, walk: Walk) -> Array:
        """Begins to copy the rows of the first iterations to the device."""
        for t in range(min(walk.ahead, walk.length)):
            offsets = [walk.offset(t, self._rows[i]) for i in walk.arrays]
            ticket, _ = self._loop(ticket, pulls=(walk.arrays, offsets, [0] * len(offsets)), pull_iterations=1)
        return ticket

    def take(self, ticket: Array, walk: Walk) -> tuple[Array, list[Array]]:
        """In the body of a loop: the iteration's rows; begins to copy later ones."""
        rows = [self._rows[i] for i in walk.arrays]
        strides = [walk.stride(row) for row in rows]
        later = [walk.offset(walk.ahead, row) for row in rows]
        return self._loop(
            ticket,
            takes=(walk.arrays, [walk.offset(0, row) for row in rows], strides),
            pulls=(walk.arrays, later, strides),
            pull_iterations=max(0, walk.length - walk.ahead),
        )

    def put(self, ticket: Array, walk: Walk, arrays: Sequence[int], values: Sequence[Array]) -> Array:
        """In the body of a loop: begins to copy new values of the iteration's rows of some arrays to the host."""
        self._changed.update(i for i in arrays if is_on_disk(self.arrays[i]))
        rows = [self._rows[i] for i in arrays]
        pushes = (arrays, [walk.offset(0, row) for row in rows], [walk.stride(row) for row in rows])
        return self._loop(ticket, pushes=pushes, values=values)[0]

    def finish(self, ticket: Array, after: Sequence[Array] = ()) -> list[Any]:
        """Waits for all copies; returns the arrays, in the memory that they came in."""
        if self._changed:
            ticket = self._commit(ticket)
        near = [self.arrays[k] for k in self._near]
        through = {k: k for k in range(len(near))}
        waited = jax.lax.optimization_barrier([ticket, *after])
        if not near:
            self._finish_disk(self._ffi(FINISH, [jax.typeof(ticket)], {0: 0}, ())(*waited)[0])
            return self.arrays
        near = list(self._ffi(FINISH, list(map(jax.typeof, near)), through, self._near)(*near, *waited))
        for k, array in zip(self._near, near, strict=True):
            self.arrays[k] = array
        self._finish_disk(ticket)
        return self.arrays

    def _commit(self, ticket: Array) -> Array:
        committed: Array = self._ffi(COMMIT, [jax.typeof(ticket)], {0: 0}, sorted(self._changed))(ticket)[0]
        return committed

    def _finish_disk(self, ticket: Array) -> None:
        """The next tickets of changed arrays, after the chain's last call: a step that fails gives none."""
        for k in self._changed:
            # The chain's ticket holds zeros, which XLA does not know. A barrier with one used result would not wait.
            self.arrays[k] = self.arrays[k].next_version(self.arrays[k].ticket + ticket[0])

    def finish_reading(self, ticket: Array, after: Sequence[Array] = ()) -> None:
        """Ends a program that only reads: the call has side effects, so it runs although nothing uses its result."""
        self._ffi(FINISH, [jax.typeof(ticket)], {0: 0}, ())(ticket, *after)

    def _loop(
        self,
        ticket: Array,
        *,
        takes: tuple[Sequence[int], Sequence[int], Sequence[int]] = ((), (), ()),
        pulls: tuple[Sequence[int], Sequence[int], Sequence[int]] = ((), (), ()),
        pushes: tuple[Sequence[int], Sequence[int], Sequence[int]] = ((), (), ()),
        values: Sequence[Array] = (),
        pull_iterations: int = 0,
    ) -> tuple[Array, list[Array]]:
        results = [jax.typeof(ticket)]
        results += [jax.ShapeDtypeStruct(self.arrays[i].shape[1:], self.arrays[i].dtype) for i in takes[0]]
        attributes: dict[str, Any] = {"slot": np.int64(self._slots), "pull_iterations": np.int64(pull_iterations)}
        self._slots += 1
        for name, (numbers, offsets, strides) in (("take", takes), ("pull", pulls), ("push", pushes)):
            attributes[f"{name}_array"] = np.array(numbers, np.int64)
            attributes[f"{name}_offset"] = np.array(offsets, np.int64)
            attributes[f"{name}_stride"] = np.array(strides, np.int64)
        attributes["pull_bytes"] = np.array([self._rows[i] for i in pulls[0]], np.int64)
        call = self._ffi(LOOP, results, {0: 0}, (), attributes)
        # XLA folds slices into calls that take or return them; it does not look through barriers.
        ticket, *taken = call(*jax.lax.optimization_barrier([ticket, *values]))
        return ticket, list(jax.lax.optimization_barrier(taken))

    def _ffi(
        self,
        mode: int,
        results: Sequence[Any],
        aliases: dict[int, int],
        numbers: Sequence[int],
        attributes: dict[str, Any] | None = None,
    ) -> Any:
        ffi = jax.ffi.ffi_call(
            "dejax_offload_pieces", tuple(results), has_side_effect=True, input_output_aliases=aliases
        )
        names = [f"{name}_{what}" for name in ("take", "pull", "push") for what in ("array", "offset", "stride")]
        given = {
            "site": np.int64(self._site),
            "mode": np.int64(mode),
            "first_tag": np.int64(0),
            "staging_bytes": np.int64(self._staging_bytes),
            "slot": np.int64(0),
            "pull_iterations": np.int64(0),
            "sharded": np.int64(0 if self._marks is None else 2),
            "marks": _EMPTY,
            "arrays": np.array(list(numbers), np.int64),
            "pull_bytes": _EMPTY,
            **dict.fromkeys(names, _EMPTY),
            **(attributes or {}),
        }

        def call(*operands: Array) -> Any:
            with jax.named_scope("offload_rows"):
                return ffi(*operands, **given)

        return call
