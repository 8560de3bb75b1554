"""The cost model that decides whether ids are sorted before a gather, and whether a loop reads ahead.

A random read of a large table is bound by address translation, not by the bus: each row pays for the page that it lies
in. Pages are about 64 KiB, whatever the operating system's page size. Ascending ids that are read in strict order pay
once per page. The constants are measured on one H200 on PCIe 5: docs/performance/host_gather.md.
"""

from __future__ import annotations

import bisect
import math

GIB = 1 << 30
BUS = 51.3e9  # bytes per second that kernels read, in lines of 128 bytes: 0.924 of the copy engine's rate
LINE = 128
LINES_PER_SECOND = 6.3e8  # requests of kernels, however few bytes of each line are used
PAGE = 64 << 10
PAGES_PER_SECOND = 42.5e6
# Random rows per second, by the table's size in GiB.
RANDOM_ROWS = ((1, 105e6), (2, 56e6), (4, 40e6), (8, 33.6e6), (16, 30.5e6), (24, 29.3e6), (80, 27.9e6))
SORT_LATENCY = 58e-6  # of jax.lax.sort of (id, position) pairs in a jitted step: fifteen launches
SORT_PER_ID = 3.9e-11
# An array that a loop passes to its next iteration, with the launches that this takes: steps of R-GAT on MAG's and AM's
# counts with reads ahead and without them give 9.0 and 8.8 us on an H200; MAG's on an H100 give 14.4 us.
ARRAY_PASSED = 14.4e-6
SORTED_ROWS = 5e9  # rows per second, however many share a line


def random_seconds(table_bytes: int, row_bytes: int, ids: int) -> float:
    """Predicted time of a gather of random ids in the order given."""
    gib = table_bytes / GIB
    sizes = [size for size, _ in RANDOM_ROWS]
    at = bisect.bisect_left(sizes, gib)
    if at == 0:
        rate = RANDOM_ROWS[0][1]
    elif at == len(sizes):
        rate = RANDOM_ROWS[-1][1]
    else:
        (low, slow), (high, fast) = RANDOM_ROWS[at - 1], RANDOM_ROWS[at]
        part = math.log(gib / low) / math.log(high / low)
        rate = slow ** (1 - part) * fast**part
    pages_a_row = max(1.0, row_bytes / PAGE)
    return max(ids * row_bytes / BUS, ids * pages_a_row / rate)


def _touched(parts: float, draws: float) -> float:
    """Expected number of `parts` equal parts that `draws` random draws touch."""
    return parts * -math.expm1(-draws / parts) if parts else 0.0


def sorted_seconds(table_bytes: int, row_bytes: int, ids: int) -> float:
    """Predicted time of sorting random ids and gathering in their order, equal ones once."""
    distinct = _touched(table_bytes / row_bytes if row_bytes else 0.0, ids)
    lines = _touched(table_bytes / LINE, ids * max(1.0, row_bytes / LINE))
    pages = _touched(max(1.0, table_bytes / PAGE), ids * max(1.0, row_bytes / PAGE))
    read = max(distinct * row_bytes / BUS, ids / SORTED_ROWS, lines / LINES_PER_SECOND, pages / PAGES_PER_SECOND)
    return read + SORT_LATENCY + SORT_PER_ID * ids


def sorting_pays(table_bytes: int, row_bytes: int, ids: int) -> bool:
    """Whether sorting is faster for uniformly random ids. For distinct ids the sort is a loss: 2 % at 262,144 rows."""
    return sorted_seconds(table_bytes, row_bytes, ids) < random_seconds(table_bytes, row_bytes, ids)


def reading_ahead_pays(ids: int, arrays: int) -> bool:
    """Whether reads of a few bytes for each id take longer than a loop takes to pass arrays on."""
    return ids / LINES_PER_SECOND > arrays * ARRAY_PASSED
