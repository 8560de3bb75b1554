"""Long static arrays that are linear in pieces, made on the device by arithmetic.

A constant is a part of the program: XLA reads it in each of its passes. Constants of 90 MB, as a block with a million
receivers had, took longer to compile than all kernels of the step.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from dejax.rgnn.graphs.building.sorting_traced import take

_SHORT = 1 << 16
"""Arrays up to this length stay constants, which need no kernel."""
_MOST_COMPARISONS = 1 << 28


def on_device(*arrays: np.ndarray) -> tuple[Any, ...]:
    """int32 arrays of one length: as they are if they are short or have many pieces, otherwise made on the device.

    One kernel finds the piece of each position for all of them. The rest is arithmetic that XLA fuses with its readers.
    """
    size = arrays[0].shape[0]
    if size <= _SHORT:
        return arrays
    steps = np.stack([np.diff(array.astype(np.int64)) for array in arrays])
    starts = np.concatenate([[0], 1 + np.flatnonzero((steps[:, 1:] != steps[:, :-1]).any(axis=0))])
    if len(starts) * size > _MOST_COMPARISONS:
        return arrays
    position = jnp.arange(size, dtype=jnp.int32)
    piece = jnp.sum(position[None] >= starts[1:, None].astype(np.int32), axis=0, dtype=jnp.int32)
    within = position - take(starts.astype(np.int32), piece)
    found = []
    for array, step in zip(arrays, steps, strict=True):
        first, slope = (take(values.astype(np.int32), piece) for values in (array[starts], step[starts]))
        found.append(first + slope * within)
    return tuple(found)
