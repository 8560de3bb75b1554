"""Tables in host memory that compiled steps read and write in place. Not in this release yet.

What it will be: a `HostTable` that wraps a `jax.Array` in pinned host memory, and `gather`, `scatter` and neighbour
sampling on it inside `jax.jit`, without a copy of the table on the device and without a host callback.
"""

from typing import NoReturn

_PLANNED = ("CachedTable", "HostTable", "gather", "prefetched_scan", "sample_neighbors", "scatter", "scatter_add")


def __getattr__(name: str) -> NoReturn:
    # ImportError for a planned name: `from dejax.host_gather import gather` would lose an AttributeError's message.
    error = ImportError if name in _PLANNED else AttributeError
    raise error(
        f"dejax.host_gather.{name}: dejax.host_gather is not in this release yet. Until it is, keep the table in "
        "device memory and index it with `table[ids]`."
    )
