"""The FFI calls of one update for arrays on disk, which are no operands: the calls name them by their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dejax.offload._chain import COMMIT, FINISH, LOOP, NO_LOOP, OPEN, Chain, Piece


class DiskChain(Chain):
    """A `Chain` for arrays on disk.

    Args:
        arrays: by their numbers.
        staging_bytes: cap of staging memory on the device.
        marks: of the chain of one device of several, whose arrays are its shards: how each array is divided.
    """

    def __init__(self, arrays: dict[int, Any], staging_bytes: int, marks: dict[int, int] | None = None) -> None:
        super().__init__(arrays, staging_bytes)
        self._slots = 0
        self._marks = marks

    def begin(self, place: Any = None) -> None:
        """Names the arrays and the versions that the update goes on from.

        Args:
            place: of this device in the mesh, where the arrays are shards.
        """
        numbers = sorted(self.arrays)
        tickets = jnp.stack([self.arrays[i].ticket for i in numbers])
        sizes = np.array([self.arrays[i].nbytes for i in numbers], np.int64)
        attributes = {"arrays": np.array(numbers, np.int64), "pull_bytes": sizes}
        if self._marks is not None:
            attributes["marks"] = np.array([self._marks[i] for i in numbers], np.int64)
            own = jnp.full((len(numbers), 1), jnp.asarray(place, jnp.uint32))
            tickets = jnp.concatenate((tickets, own), axis=1)
        self._ticket = self._call(OPEN, attributes, tickets)[0]

    def call(self, take: Piece | None = None) -> list[Any]:
        taken = [] if take is None else [(i, *take.span(self.arrays[i])) for i in take.group.state]
        results = []
        for i, *_ in taken:
            assert take is not None
            array = self.arrays[i]
            shape = array.shape if take.whole else (take.end - take.begin, *take.group.shape[1:])
            results.append(jax.ShapeDtypeStruct(shape, array.dtype))
        attributes: dict[str, Any] = {"slot": np.int64(self._slots), "pull_iterations": np.int64(1)}
        self._slots += 1
        places: dict[str, Sequence[Any]] = {
            "take": [x[:2] for x in taken],
            "pull": [x[:2] for x in self._pulls],
            "push": self._pushes,
        }
        for name, some in places.items():
            attributes[f"{name}_array"] = np.array([x[0] for x in some], np.int64)
            attributes[f"{name}_offset"] = np.array([x[1] for x in some], np.int64)
            attributes[f"{name}_stride"] = np.zeros(len(some), np.int64)
        attributes["pull_bytes"] = np.array([x[2] for x in self._pulls], np.int64)
        self._ticket, *values = self._call(LOOP, attributes, *self._operands(), results=results)
        return list(jax.lax.optimization_barrier(values))

    def flush(self) -> None:
        """Begins what the next call would begin."""
        if self._pulls or self._pushes or self._after:
            self.call()

    def finish(self) -> None:
        """Makes the last calls; the arrays then have the tickets of their next version."""
        self.flush()
        self._ticket = self._call(COMMIT, {"arrays": np.array(sorted(self.arrays), np.int64)})[0]
        self._ticket = self._call(FINISH, {})[0]
        for i, array in self.arrays.items():
            # The chain's ticket holds zeros, which XLA does not know. A barrier with one used result would not wait.
            self.arrays[i] = array.next_version(array.ticket + self._ticket[0])

    def _call(self, mode: int, attributes: dict[str, Any], *operands: Any, results: Sequence[Any] = ()) -> Any:
        ffi = jax.ffi.ffi_call(
            "dejax_offload_pieces",
            (jax.typeof(self._ticket), *results),
            has_side_effect=True,
            input_output_aliases={0: 0},
        )
        empty = np.zeros(0, np.int64)
        given = {
            "site": np.int64(self._site),
            "mode": np.int64(mode),
            "first_tag": np.int64(0),
            "staging_bytes": np.int64(self._staging_bytes),
            "arrays": empty,
            **dict.fromkeys(("pull_array", "pull_offset", "pull_bytes", "push_array", "push_offset"), empty),
            **NO_LOOP,
            "sharded": np.int64(self._marks is not None),
            **attributes,
        }
        with jax.named_scope("offload_pieces"):
            return ffi(self._ticket, *operands, **given)
