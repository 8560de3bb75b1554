"""The FFI calls of one update for arrays that are no operands of most of them: `host_arrays.py` says why."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from dejax.offload.state.store import is_on_disk
from dejax.offload.state.stream.chain import Chain, Piece
from dejax.offload.state.stream.host_arrays import HostArrays, Spans


class LoopChain(Chain):
    """A `Chain` for arrays on disk, and for the shards of one device of several.

    Args:
        arrays: by their numbers; on disk, or, of one device of several, also in host memory.
        staging_bytes: cap of staging memory on the device.
        marks: of the chain of one device of several, whose arrays are its shards: how each array on disk is divided.
    """

    def __init__(self, arrays: dict[int, Any], staging_bytes: int, marks: dict[int, int] | None = None) -> None:
        super().__init__(arrays, staging_bytes)
        self._at = {number: position for position, number in enumerate(sorted(arrays))}
        on_disk = [i for i in self._at if is_on_disk(arrays[i])]
        own = None if marks is None else [marks[i] for i in on_disk]
        self._calls = HostArrays(self._in_order(), staging_bytes, own)

    def begin(self, place: Any = None) -> None:
        """Makes the host arrays the program's own; names those on disk, and the versions that the update goes on from.

        Args:
            place: of this device in the mesh, where the arrays are shards.
        """
        self._calls.arrays = self._in_order()
        self._ticket = self._calls.begin(place=place)
        self.arrays.update(zip(self._at, self._calls.arrays, strict=True))

    def call(self, take: Piece | None = None) -> list[Any]:
        taken: list[tuple[int, int]] = []
        results = []
        for i in () if take is None else take.group.state:
            assert take is not None
            array = self.arrays[i]
            taken.append((i, take.span(array)[0]))
            shape = array.shape if take.whole else (take.end - take.begin, *take.group.shape[1:])
            results.append(jax.ShapeDtypeStruct(shape, array.dtype))
        pulls, pushes, after = self._pulls, self._pushes, self._after
        self._pulls, self._pushes, self._after = [], [], []
        self._ticket, values = self._calls.loop(
            self._ticket,
            takes=self._spans(taken),
            results=results,
            pulls=self._spans([(i, offset) for i, offset, _ in pulls]),
            pull_bytes=[nbytes for *_, nbytes in pulls],
            pushes=self._spans([(i, offset) for i, offset, _ in pushes]),
            values=[value for *_, value in pushes],
            after=after,
        )
        return values

    def flush(self) -> None:
        """Begins what the next call would begin."""
        if self._pulls or self._pushes or self._after:
            self.call()

    def finish(self) -> None:
        """Makes the last calls; arrays on disk then have the tickets of their next version."""
        self.flush()
        self._calls.arrays = self._in_order()
        self.arrays.update(zip(self._at, self._calls.finish(self._ticket), strict=True))

    def _in_order(self) -> list[Any]:
        return [self.arrays[i] for i in self._at]

    def _spans(self, pieces: list[tuple[int, int]]) -> Spans:
        numbers = [self._at[i] for i, _ in pieces]
        return numbers, [offset for _, offset in pieces], np.zeros(len(pieces), np.int64).tolist()
