"""The FFI calls of one update, one after the other, for arrays of state in host memory.

`native/state/pieces.h` says how the copies run. `pieces.py` evaluates the update between the calls. `loop_chain.py`
makes the calls for arrays on disk, and for those of several devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dejax import _compat, _native

BETWEEN, BEGIN, FINISH, LOOP, OPEN, COMMIT = range(6)  # native/state/pieces.h
_sites = itertools.count(1)
NO_LOOP = {
    "slot": np.int64(0),
    "pull_iterations": np.int64(0),
    "sharded": np.int64(0),
    "marks": np.zeros(0, np.int64),
    **dict.fromkeys(("pull_stride", "push_stride", "take_array", "take_offset", "take_stride"), np.zeros(0, np.int64)),
}
"""Attributes of a call that is in no loop, for arrays on one device."""
SEVERAL = (
    "offload.optimizer: `state` must come from this transformation's init, called outside of jax.jit, if it lies on "
    "several devices and dejax copies it, got one that it has not seen; call init on the parameters before the first "
    "update, and restore the state into what it makes, or give streams=False"
)
"""The message where a program of several devices has the calls of one."""


def kept_apart(arrays: Sequence[Any]) -> list[Any]:
    """Operands that a call overwrites, no two of which are the same value.

    XLA for a GPU refuses a call that overwrites one operand twice. It would make one value of two equal ones, such as
    the zeros of both of Adam's moments in a program that also makes its first state. It merges no results of a barrier.
    """
    return list(jax.lax.optimization_barrier(list(arrays)))


def new_site() -> int:
    """The number of a program's chain of calls."""
    return next(_sites)


_STAGED = 256  # alignment of pieces in staging memory, as in native/state/staging.h


def staging_bytes(sizes: Sequence[int], ahead: int, count: int) -> int:
    """Size of the device's memory for arrays on their way: so many calls' pieces, each way, as are on it at one time.

    Args:
        sizes: bytes of the pieces of one call.
        ahead: number of calls whose pieces are on their way to the device. One more has arrived.
        count: of the calls.
    """
    return 2 * min(ahead + 1, count) * sum(-(-size // _STAGED) * _STAGED for size in sizes)


@dataclass(slots=True)
class Group:
    """Arrays of state that are needed together.

    Attributes:
        state: their numbers.
        outputs: numbers of the update's outputs that depend on them.
        equations: the elementwise equations that compute these outputs; unused where the group is one piece.
        tails: for outputs that are updates: the last equations, which are evaluated for all pieces at once.
        shape: of its arrays as they are cut, along the first axis.
    """

    state: list[int]
    outputs: list[int]
    equations: list[Any] = field(default_factory=list)
    tails: dict[int, list[Any]] = field(default_factory=dict)
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `begin` to `end` of a group's arrays, or all of them (`whole`)."""

    group: Group
    begin: int
    end: int
    whole: bool

    def span(self, array: Any) -> tuple[int, int]:
        """Offset and size in bytes of the piece of one of the group's arrays."""
        itemsize = np.dtype(array.dtype).itemsize
        if self.whole:
            return 0, array.size * itemsize
        row = int(np.prod(self.group.shape[1:], dtype=np.int64)) * itemsize
        return self.begin * row, (self.end - self.begin) * row


def staging_of(pieces: Sequence[Piece], arrays: Any, ahead: int) -> int:
    """`staging_bytes` for calls that have a piece each; `arrays`: by the numbers that the pieces' groups have."""
    largest = max(([piece.span(arrays[i])[1] for i in piece.group.state] for piece in pieces), key=sum)
    return staging_bytes(largest, ahead, len(pieces))


class Chain:
    """The FFI calls of one update, one after the other."""

    def __init__(self, arrays: dict[int, Any], staging_bytes: int) -> None:
        _native.extension("offload.optimizer")
        self.arrays = dict(arrays)
        self._staging_bytes = staging_bytes
        self._site = new_site()
        self._ticket: Any = jnp.zeros((2,), jnp.uint32)
        self._given = 0
        self._pulls: list[tuple[int, int, int]] = []
        self._pushes: list[tuple[int, int, Any]] = []
        self._after: list[Any] = []

    def pull(self, piece: Piece) -> None:
        """The next call begins to copy the piece to the device."""
        self._pulls += [(i, *piece.span(self.arrays[i])) for i in piece.group.state]

    def taken(self, pieces: Sequence[Piece], ahead: int) -> Iterator[tuple[Piece, dict[int, Any]]]:
        """Each piece with its arrays by number, while the `ahead` pieces after it are copied to the device."""
        for piece in pieces[:ahead]:
            self.pull(piece)
        self.call()
        for number, piece in enumerate(pieces):
            if number + ahead < len(pieces):
                self.pull(pieces[number + ahead])
            yield piece, dict(zip(piece.group.state, self.call(take=piece), strict=True))

    def push(self, i: int, piece: Piece, value: Any) -> None:
        """The next call begins to copy a piece of array i's new value to the host."""
        self._pushes.append((i, piece.span(self.arrays[i])[0], value))

    def wait_for(self, value: Any) -> Any:
        """`value`, computed before the next call: XLA might otherwise keep its operands until the end."""
        value = jax.lax.optimization_barrier(value)
        self._after.append(value)
        return value

    def begin(self) -> None:
        """Makes the host arrays the program's own."""
        self._ticket = _compat.on_one_device(self._ticket, SEVERAL)
        numbers = sorted(self.arrays)
        mine = self._ffi(BEGIN, numbers, [jax.typeof(self.arrays[i]) for i in numbers])(
            *kept_apart([self.arrays[i] for i in numbers])
        )
        self.arrays.update(zip(numbers, mine, strict=True))

    def call(self, take: Piece | None = None) -> list[Any]:
        """Makes the next call; returns the arrays of the piece to take, which was pulled `ahead` calls before."""
        numbers = sorted({i for i, *_ in (*self._pulls, *self._pushes)})
        results: list[Any] = [jax.typeof(self._ticket)]
        if take is not None:
            for i in take.group.state:
                array = self.arrays[i]
                shape = array.shape if take.whole else (take.end - take.begin, *take.group.shape[1:])
                results.append(jax.ShapeDtypeStruct(shape, array.dtype))
        ffi = self._ffi(BETWEEN, numbers, results)
        self._ticket, *taken = ffi(self._ticket, *(self.arrays[i] for i in numbers), *self._operands())
        self._given += len(taken)
        return list(jax.lax.optimization_barrier(taken))  # as in _operands

    def finish(self) -> None:
        """Makes the last call, which waits for all copies."""
        numbers = sorted(self.arrays)
        ffi = self._ffi(FINISH, numbers, [jax.typeof(self.arrays[i]) for i in numbers])
        done = ffi(*(self.arrays[i] for i in numbers), self._ticket, *self._operands())
        self.arrays.update(zip(numbers, done, strict=True))

    def _operands(self) -> list[Any]:
        values = [*(value for *_, value in self._pushes), *self._after]
        self._pulls, self._pushes, self._after = [], [], []
        # XLA folds slices into calls that take or return them, and jax 0.11 keeps the replaced call where it has side
        # effects: it would run twice. XLA does not look through barriers.
        return list(jax.lax.optimization_barrier(values))

    def _ffi(self, mode: int, numbers: list[int], results: list[Any]) -> Any:
        at = {number: position for position, number in enumerate(numbers)}
        through = 1 if mode == BETWEEN else len(numbers)
        ffi = jax.ffi.ffi_call(
            "dejax_offload_pieces",
            tuple(results),
            has_side_effect=True,
            input_output_aliases={k: k for k in range(through)},
        )
        attributes = {
            "site": np.int64(self._site),
            "mode": np.int64(mode),
            "first_tag": np.int64(self._given),
            "staging_bytes": np.int64(self._staging_bytes),
            "arrays": np.array(numbers, np.int64),
            "pull_array": np.array([at[i] for i, *_ in self._pulls], np.int64),
            "pull_offset": np.array([offset for _, offset, _ in self._pulls], np.int64),
            "pull_bytes": np.array([nbytes for *_, nbytes in self._pulls], np.int64),
            "push_array": np.array([at[i] for i, *_ in self._pushes], np.int64),
            "push_offset": np.array([offset for _, offset, _ in self._pushes], np.int64),
            **NO_LOOP,
        }

        def call(*operands: Any) -> Any:
            with jax.named_scope("offload_pieces"):
                return ffi(*operands, **attributes)

        return call
