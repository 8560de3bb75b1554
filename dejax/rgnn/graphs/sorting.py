"""Sorting and grouping of many small integers by numpy.

Sorting is by int64 words with the position in their low bits. The position makes `np.sort` stable, and `np.sort` of
int64 is vectorised: 0.23 s for 21 M words with AVX-512 instead of 2.8 s for `np.argsort(kind="stable")`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import numpy as np

_T = TypeVar("_T")

# From this many elements on, tables are made in threads: numpy sorts and copies without Python's lock.
_MANY_ENTRIES, _MOST_THREADS = 1 << 20, 16
# Elements per block of element-wise steps, whose temporaries then stay in the cache.
_BLOCK = 1 << 17


def stable_argsort(keys: Sequence[np.ndarray], bounds: Sequence[int]) -> np.ndarray:
    """The stable order by `keys`, the most significant first.

    Args:
        keys: arrays of one length with non-negative integers.
        bounds: for each key an exclusive upper bound of its values, at most 2^31.

    Returns:
        int32[size]: positions in sorted order.
    """
    size = keys[0].shape[0]
    position_bits = max(size - 1, 0).bit_length()
    mask = (1 << position_bits) - 1
    blocks = [slice(start, min(start + _BLOCK, size)) for start in range(0, size, _BLOCK)]
    packed = np.empty(size, np.int64)
    order: np.ndarray | None = None
    remaining = list(zip(keys, bounds, strict=True))
    while remaining:
        # Least significant digit first: as many keys at once as fit in 63 bits with the position. One key always fits.
        digits = []
        shift = position_bits
        while remaining and shift + max(remaining[-1][1] - 1, 0).bit_length() <= 63:
            key, bound = remaining.pop()
            digits.append((key, shift))
            shift += max(bound - 1, 0).bit_length()
        in_threads([partial(_pack, packed, digits, order, block) for block in blocks], size)
        packed.sort()
        step = np.empty(size, np.int32)
        in_threads([partial(_unpack, packed, order, step, mask, block) for block in blocks], size)
        order = step
    assert order is not None
    return order


def _pack(words: np.ndarray, digits: list[tuple[np.ndarray, int]], order: np.ndarray | None, block: slice) -> None:
    """Writes the words of a block: each key at its shift, and the position."""
    word = np.arange(block.start, block.stop, dtype=np.int64)
    for key, shift in digits:
        part = key[block] if order is None else key[order[block]]
        word |= part.astype(np.int64) << shift
    words[block] = word


def _unpack(words: np.ndarray, order: np.ndarray | None, out: np.ndarray, mask: int, block: slice) -> None:
    """Writes the position in each word of a block, mapped by `order` where there is one."""
    step = words[block] & mask
    out[block] = step if order is None else order[step]


def in_threads(makers: Sequence[Callable[[], _T]], num_elements: int) -> list[_T]:
    """Calls functions that spend their time in numpy, in threads where there are many elements.

    On 21 M edges and two cores `RelGraph.from_edges` takes 10.0 s instead of 11.9 s.
    """
    if num_elements < _MANY_ENTRIES:
        return [make() for make in makers]
    with ThreadPoolExecutor(min(len(makers), os.cpu_count() or 1, _MOST_THREADS)) as pool:
        return [future.result() for future in [pool.submit(make) for make in makers]]


def offsets_of(index: np.ndarray, num_rows: int) -> np.ndarray:
    """int32[rows + 1]: where each row begins once sorted by `index`; entries with the row `num_rows` are padding."""
    offsets = np.zeros(num_rows + 1, np.int32)
    np.cumsum(np.bincount(index, minlength=num_rows)[:num_rows], out=offsets[1:])
    return offsets


def offsets_of_sorted(index: np.ndarray, num_rows: int) -> np.ndarray:
    """As `offsets_of`, for an ascending `index` with few rows: one search per row instead of a pass over `index`."""
    return np.searchsorted(index, np.arange(num_rows + 1, dtype=index.dtype)).astype(np.int32)


def runs_of(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Runs of equal `(first, second)`: the run of each entry (int32), and where each run starts (int32[runs])."""
    if first.shape[0] == 0:
        return np.zeros(0, np.int32), np.zeros(0, np.int32)
    new = np.empty(first.shape[0], bool)
    new[0] = True
    np.not_equal(first[1:], first[:-1], out=new[1:])
    new[1:] |= second[1:] != second[:-1]
    run = np.cumsum(new, dtype=np.int32)
    run -= 1
    return run, np.flatnonzero(new).astype(np.int32)


def expand(rows: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The positions of all entries of `rows`: the ranges `offsets[r]` to `offsets[r + 1]` joined.

    Returns:
        int32[entries], the positions, and int32[rows + 1], where each row of `rows` begins among them.
    """
    counts = offsets[rows + 1] - offsets[rows]
    begins = np.zeros(rows.shape[0] + 1, np.int32)
    np.cumsum(counts, out=begins[1:])
    positions = np.repeat(offsets[rows] - begins[:-1], counts)
    positions += np.arange(positions.shape[0], dtype=np.int32)
    return positions, begins
