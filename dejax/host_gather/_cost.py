"""Whether ids are sorted before a gather, from figures of one H200 on PCIe 5 (docs/host_gather.md has the
measurements).

Reading a large table at random is bound by address translation, not by the bus: each row pays for the page it lies in,
where a page is about 64 KiB whatever the operating system's. Ascending ids that are read in strict order pay once for
each page that has any of them.
"""

from __future__ import annotations

import bisect
import math

GIB = 1 << 30
BUS = 51.4e9  # bytes per second that kernels read, 0.92 of the copy engine's rate
PAGE = 64 << 10
PAGES_PER_SECOND = 42.5e6  # 24 GiB: 191 k pages in 4.47 ms; 80 GiB: 238 k in 5.62 ms
# Rows per second of random ids, by the table's size in GiB.
RANDOM_ROWS = ((1, 105e6), (2, 56e6), (4, 40e6), (8, 33.6e6), (16, 30.5e6), (24, 29.3e6), (80, 27.9e6))
SORT_LATENCY = 60e-6  # jax.lax.sort of (id, position) pairs, in a jitted step
SORT_PER_ID = 5.5e-11
SORTED_ROWS = 6e8  # rows per second, however short


def random_seconds(table_bytes: int, row_bytes: int, ids: int) -> float:
    """Predicted time of a gather in the order given, for random ids."""
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


def sorted_seconds(table_bytes: int, row_bytes: int, ids: int) -> float:
    """Predicted time of sorting random ids and gathering in their order."""
    pages = max(1.0, table_bytes / PAGE)
    touched = pages * -math.expm1(-ids * max(1.0, row_bytes / PAGE) / pages)
    return max(ids * row_bytes / BUS, ids / SORTED_ROWS, touched / PAGES_PER_SECOND) + SORT_LATENCY + SORT_PER_ID * ids


def sorting_pays(table_bytes: int, row_bytes: int, ids: int) -> bool:
    """Whether to sort: for random ids without many duplicates, which nobody knows beforehand."""
    return sorted_seconds(table_bytes, row_bytes, ids) < random_seconds(table_bytes, row_bytes, ids)
