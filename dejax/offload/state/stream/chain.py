"""The FFI calls by which one device copies arrays in host memory or on disk, one call after the other.

`native/state/pieces.h` says how the copies run. Arrays in host memory are operands of the first and the last calls
alone, and arrays on disk of none: the calls between name them by their numbers. So these calls may be in a loop, or in
the bodies of several `shard_map`s.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax import _compat, _native
from dejax._ffi import ffi_call
from dejax.offload.state.store import is_on_disk

REGISTER, BEGIN, FINISH, LOOP, OPEN, COMMIT = range(6)  # native/state/pieces.h
_STAGED = 256  # alignment of pieces in staging memory, as in native/state/staging.h
_EMPTY = np.zeros(0, np.int64)
_sites = itertools.count(1)
Spans = tuple[Sequence[int], Sequence[int], Sequence[int]]  # numbers of arrays, offsets, strides
_NONE: Spans = ((), (), ())


def staging_bytes(sizes: Sequence[int], ahead: int, count: int) -> int:
    """Size of the device's memory for arrays on their way: so many calls' pieces, each way, as are on it at one time.

    Args:
        sizes: bytes of the pieces of one call.
        ahead: number of calls whose pieces are on their way to the device. One more has arrived.
        count: of the calls.
    """
    return 2 * min(ahead + 1, count) * sum(-(-size // _STAGED) * _STAGED for size in sizes)


@dataclass(frozen=True, slots=True)
class ChainUse:
    """What a chain of calls is made for.

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


class Chain:
    """The calls, in the order in which they are made.

    Args:
        use: what they are made for.
        arrays: in host memory or on disk.
        staging_bytes: cap of staging memory on the device.
        marks: of the calls of one device of several, whose arrays are its shards: how each array on disk is divided.
    """

    def __init__(
        self, use: ChainUse, arrays: Sequence[Any], staging_bytes: int, marks: Sequence[int] | None = None
    ) -> None:
        _native.extension(use.feature)
        self.arrays = list(arrays)
        self._use = use
        self._on_host = [k for k, x in enumerate(arrays) if not is_on_disk(x)]
        self._on_disk = [k for k, x in enumerate(arrays) if is_on_disk(x)]
        self._changed: set[int] = set()  # of those on disk
        self._staging_bytes = staging_bytes
        self._marks = marks
        self._site = next(_sites)
        self._calls = 0

    def begin(self, *, changes: bool = True, place: Any = None) -> Array:
        """Makes the arrays the program's own if it changes them; returns the ticket that the next call takes.

        Args:
            changes: whether the program changes arrays.
            place: of this device in the mesh, where the arrays are shards.
        """
        on_host = [self.arrays[k] for k in self._on_host]
        if changes and on_host:
            # Not fixed: XLA for a GPU refuses a call that overwrites one operand twice. It would make one value of two
            # equal ones, such as the zeros of both of Adam's moments in a program that also makes its first state. It
            # merges no results of a barrier.
            on_host = self._call(BEGIN, on_host, self._on_host, through=len(on_host))
            self._set(on_host)
        ticket = jnp.zeros((2,), jnp.uint32)
        if self._marks is None:
            ticket = _compat.on_one_device(ticket, self._use.several)
        (ticket,) = self._call(REGISTER, [ticket, *on_host], self._on_host, fixed=range(1, 1 + len(on_host)))
        if not self._on_disk:
            return ticket
        sizes = {"pull_bytes": np.array([self.arrays[k].nbytes for k in self._on_disk], np.int64)}
        tickets = jnp.stack([self.arrays[k].ticket for k in self._on_disk])
        if self._marks is not None:
            sizes["marks"] = np.array(self._marks, np.int64)
            own = jnp.full((len(self._on_disk), 1), jnp.asarray(place, jnp.uint32))
            tickets = jnp.concatenate((tickets, own), axis=1)
        return self._call(OPEN, [ticket, tickets], self._on_disk, attributes=sizes)[0]

    def loop(
        self,
        ticket: Array,
        *,
        takes: Spans = _NONE,
        results: Sequence[Any] = (),
        pulls: Spans = _NONE,
        pull_bytes: Sequence[int] = (),
        pull_iterations: int = 1,
        pushes: Spans = _NONE,
        values: Sequence[Array] = (),
        after: Sequence[Array] = (),
    ) -> tuple[Array, list[Array]]:
        """A call between the first and the last one, which may be in the body of a loop.

        Args:
            ticket: of the call before.
            takes: pieces that it returns, which an earlier call has begun to copy.
            results: their shapes and dtypes.
            pulls: pieces that it begins to copy to the device.
            pull_bytes: their sizes.
            pull_iterations: it does so in the first iterations alone.
            pushes: pieces of which it begins to copy new values to the host.
            values: the new values.
            after: what it only waits for.
        """
        self._changed.update(i for i in pushes[0] if is_on_disk(self.arrays[i]))
        attributes: dict[str, Any] = {"call": np.int64(self._calls), "pull_iterations": np.int64(pull_iterations)}
        self._calls += 1
        for name, (numbers, offsets, strides) in (("take", takes), ("pull", pulls), ("push", pushes)):
            attributes[f"{name}_array"] = np.array(numbers, np.int64)
            attributes[f"{name}_offset"] = np.array(offsets, np.int64)
            attributes[f"{name}_stride"] = np.array(strides, np.int64)
        attributes["pull_bytes"] = np.array(pull_bytes, np.int64)
        ticket, *taken = self._call(LOOP, [ticket, *values, *after], results=results, attributes=attributes)
        return ticket, taken

    def finish(self, ticket: Array, after: Sequence[Array] = ()) -> list[Any]:
        """Waits for all copies; returns the arrays, in the memory that they came in."""
        if self._changed:
            (ticket,) = self._call(COMMIT, [ticket], sorted(self._changed))
        on_host = [self.arrays[k] for k in self._on_host]
        if on_host:
            count = len(on_host)
            self._set(self._call(FINISH, [*on_host, ticket, *after], self._on_host, through=count, fixed=range(count)))
        else:
            (ticket,) = self._call(FINISH, [ticket, *after])
        # The next tickets of changed arrays come after the chain's last call: a step that fails gives none.
        for k in self._changed:
            # The chain's ticket holds zeros, which XLA does not know. A barrier with one used result would not wait.
            self.arrays[k] = self.arrays[k].next_version(self.arrays[k].ticket + ticket[0])
        return self.arrays

    def _set(self, on_host: Sequence[Any]) -> None:
        """What a call has returned of the arrays in host memory."""
        for k, array in zip(self._on_host, on_host, strict=True):
            self.arrays[k] = array

    def finish_reading(self, ticket: Array, after: Sequence[Array] = ()) -> None:
        """Ends a program that only reads: the call has side effects, so it runs although nothing uses its result."""
        self._call(FINISH, [ticket, *after])

    def _call(
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
        """A call of the chain.

        Args:
            mode: see native/state/pieces.h.
            operands: of the call.
            numbers: of the arrays that it names.
            through: so many first operands are results, too, in their memory.
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
            "sharded": np.int64(0 if self._marks is None else self._use.sharded),
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
