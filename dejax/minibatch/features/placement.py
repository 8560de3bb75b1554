"""Where the features of each node type should lie: a plan from bytes, visits and rates, before training."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from dejax._drive_layout import BLOCK, whole_blocks
from dejax.host_gather import DeviceTable, DriveTable, HostTable, gather
from dejax.minibatch.features.visits import hot_rows

_INDEX_BYTES = 4  # of host memory for each row of a table on a drive
_MEASURED_ROWS = 2048  # that are read at once


@dataclasses.dataclass(frozen=True, slots=True)
class ReadRates:
    """How fast random rows of 4 KiB are read, in bytes per second.

    Attributes:
        device: from device memory.
        host: from host memory, over the bus where there is one.
        drive: from the drive, past the page cache.
    """

    device: float
    host: float
    drive: float

    @classmethod
    def measured(
        cls, path: str | os.PathLike[str], *, seconds: float = 0.5, device: jax.Device | None = None
    ) -> ReadRates:
        """Measures the rates of this machine, which takes about three times `seconds`.

        Args:
            path: a file of at least 8 MiB on the drive that holds the features. A file of some GiB, such as that of the
                features, gives better figures.
            seconds: time in which each of the rates is measured.
            device: the device that reads; by default jax's default device.

        Raises:
            ValueError: the file is too short.
        """
        blocks = os.path.getsize(path) // BLOCK
        if blocks < _MEASURED_ROWS:
            raise ValueError(
                f"ReadRates.measured: {path} must have at least {_MEASURED_ROWS * BLOCK} bytes to measure reads, got "
                f"{os.path.getsize(path)}; give a larger file"
            )
        shape = (min(blocks, 1 << 16), BLOCK)
        stored = DriveTable.from_file(
            path, (blocks, BLOCK), np.uint8, cache_bytes=2 * _MEASURED_ROWS * BLOCK, device=device
        )
        with stored, HostTable.zeros(shape, np.uint8, device=device) as held:
            on_device = DeviceTable.from_numpy(np.zeros(shape, np.uint8), device=device)
            return cls(*(_rate(table, seconds) for table in (on_device, held, stored)))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TypePlacement:
    """Where the rows of one node type should lie.

    Attributes:
        rows, row_bytes: the number of rows of the type, and the bytes of a row.
        place: the place of the rows that are not on the device: "device" if there are none, "host" or "drive".
        on_device: int64[device rows], for `on_device` of `FeatureStore.from_arrays`, or `FeatureStore.cached`.
        cache_bytes: the bytes of the cache of a table on a drive.
        read_bytes: bytes of rows of the type that a step reads from each of "device", "host" and "drive".

    >>> rates = ReadRates(device=2e12, host=5e10, drive=2e9)
    >>> plan = plan_placement({"a": [3, 1]}, {"a": 512}, device_bytes=0, host_bytes=2000, rates=rates)
    >>> plan.types["a"].place
    'host'
    """

    rows: int
    row_bytes: int
    place: str
    on_device: np.ndarray
    cache_bytes: int
    read_bytes: dict[str, float]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PlacementPlan:
    """Where the rows of each node type should lie: on the device, in host memory or on a drive.

    `print` shows the plan as a table with a line for each type.

    Attributes:
        types: for each node type, where its rows lie.
        milliseconds: the time of a step's reads from each of "device", "host" and "drive".

    >>> rates = ReadRates(device=2e12, host=5e10, drive=2e9)
    >>> plan = plan_placement({"a": [3, 1]}, {"a": 512}, device_bytes=0, host_bytes=2000, rates=rates)
    >>> plan.step_milliseconds == plan.milliseconds["host"]
    True
    """

    types: dict[str, TypePlacement]
    milliseconds: dict[str, float]

    @property
    def step_milliseconds(self) -> float:
        """The time of a step's reads in milliseconds. Reads from the drive overlap with reads from memory."""
        return max(self.milliseconds["drive"], self.milliseconds["device"] + self.milliseconds["host"])

    def __str__(self) -> str:
        lines = [
            "| type | rows | bytes | on the device | the others | cache | read a step from device, host, drive |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        for name, each in self.types.items():
            read = ", ".join(_size(each.read_bytes[place]) for place in ("device", "host", "drive"))
            cache = _size(each.cache_bytes) if each.place == "drive" else "-"
            lines.append(
                f"| {name} | {each.rows:,} | {_size(each.rows * each.row_bytes)} | {len(each.on_device):,} rows | "
                f"{each.place} | {cache} | {read} |"
            )
        times = ", ".join(f"{place} {each:.2f} ms" for place, each in self.milliseconds.items())
        return "\n".join([*lines, "", f"reads of a step: {self.step_milliseconds:.2f} ms ({times})"])


def plan_placement(
    visits: Mapping[str, ArrayLike],
    row_bytes: Mapping[str, int],
    *,
    device_bytes: int,
    host_bytes: int,
    rates: ReadRates,
) -> PlacementPlan:
    """Says before training where the rows of each type should lie.

    The most visited rows go to device memory (`hot_rows`). For each type, if all of its other rows fit into host
    memory, they go there. Otherwise they stay in their file on the drive, and host memory caches the most visited
    ones. A batch is expected to read a row with the probability 1 - exp(-visits), and at most once.

    Args:
        visits: real[rows] by type, expected visits of a batch: `expected_visits`.
        row_bytes: bytes of a row by type.
        device_bytes: the bytes of device memory for rows and their slots.
        host_bytes: the bytes of host memory for rows, caches and their index.
        rates: the machine's rates, from `ReadRates.measured`.

    Raises:
        ValueError: as `hot_rows`; less host memory than tables on a drive need: an index of 4 bytes a row, and a cache
            that holds the rows of a batch.

    >>> rates = ReadRates(device=2e12, host=5e10, drive=2e9)
    >>> plan = plan_placement({"a": [3, 0.2, 0.1]}, {"a": 4096}, device_bytes=4108, host_bytes=5000, rates=rates)
    >>> plan.types["a"].place, plan.types["a"].on_device, plan.types["a"].cache_bytes
    ('drive', array([0]), 4988)
    """
    counts = {name: np.asarray(values, np.float64).reshape(-1) for name, values in visits.items()}
    on_device = hot_rows(counts, row_bytes, device_bytes)
    left = {name: values.copy() for name, values in counts.items()}
    for name, ids in on_device.items():
        left[name][ids] = 0
    others = {name: (len(values) - len(on_device[name])) * row_bytes[name] for name, values in counts.items()}
    in_host, cached = _of_host(left, row_bytes, others, host_bytes)
    types, least = {}, {}
    for name, values in counts.items():
        hot = np.zeros(len(values), bool)
        hot[on_device[name]] = True
        held = hot.copy()
        held[cached[name]] = True
        reads = -np.expm1(-values)
        of_drive = 0.0 if name in in_host else float(reads[~held].sum())
        read = {
            "device": float(reads[hot].sum()) * row_bytes[name],
            "host": float(reads[~hot].sum()) * row_bytes[name],  # those of the drive cross the bus, too
            "drive": of_drive * whole_blocks(row_bytes[name]),
        }
        least[name] = max(1, math.ceil(reads[~hot].sum())) * row_bytes[name]
        place = "device" if not others[name] else "host" if name in in_host else "drive"
        cache = cached[name].size * row_bytes[name] if place == "drive" else 0
        types[name] = TypePlacement(len(values), row_bytes[name], place, on_device[name], cache, read)
    types = _with_all_memory(types, least, others, host_bytes)
    seconds = {place: sum(each.read_bytes[place] for each in types.values()) for place in ("device", "host", "drive")}
    return PlacementPlan(types, {place: 1e3 * size / getattr(rates, place) for place, size in seconds.items()})


def _of_host(
    left: Mapping[str, np.ndarray], row_bytes: Mapping[str, int], others: Mapping[str, int], host_bytes: int
) -> tuple[set[str], dict[str, np.ndarray]]:
    """The types whose other rows all lie in host memory, and the rows that a cache should have, by type."""
    if sum(others.values()) <= host_bytes:
        return set(left), {name: np.zeros(0, np.int64) for name in left}
    room = host_bytes - _INDEX_BYTES * sum(len(values) for values in left.values())
    if room <= 0:
        raise ValueError(
            f"plan_placement: `host_bytes` must be more than {host_bytes - room}, the index of tables on a drive, got "
            f"{host_bytes}"
        )
    cached = hot_rows(left, row_bytes, room, slot_bytes=0)
    more = room - sum(ids.size * row_bytes[name] for name, ids in cached.items())
    in_host = set()
    for name in sorted(left, key=lambda name: others[name] - cached[name].size * row_bytes[name]):
        missing = others[name] - cached[name].size * row_bytes[name]
        if missing <= more:
            more -= missing
            in_host.add(name)
    return in_host, cached


def _with_all_memory(
    types: dict[str, TypePlacement], least: Mapping[str, int], others: Mapping[str, int], host_bytes: int
) -> dict[str, TypePlacement]:
    """Caches hold at least the rows of a batch, and share the host memory that is left."""
    drives = {
        name: dataclasses.replace(each, cache_bytes=max(each.cache_bytes, least[name]))
        for name, each in types.items()
        if each.place == "drive"
    }
    if not drives:
        return types
    used = sum(others[name] for name, each in types.items() if each.place == "host")
    used += sum(each.cache_bytes + _INDEX_BYTES * each.rows for each in drives.values())
    if used > host_bytes:
        raise ValueError(
            f"plan_placement: `host_bytes` must be at least {used}, for caches that hold the rows of a batch, got "
            f"{host_bytes}; give more, a smaller batch, or rows in a narrower format"
        )
    share = (host_bytes - used) // len(drives)
    return types | {
        name: dataclasses.replace(each, cache_bytes=min(others[name], each.cache_bytes + share))
        for name, each in drives.items()
    }


def _rate(table: Any, seconds: float) -> float:
    """Bytes per second of random rows."""
    rng, read = np.random.default_rng(0), jax.jit(gather)

    def once() -> None:
        read(table, rng.integers(0, len(table), _MEASURED_ROWS).astype(np.int32)).block_until_ready()

    once()
    begin, calls = time.perf_counter(), 0
    while calls < 3 or time.perf_counter() - begin < seconds:
        once()
        calls += 1
    return calls * _MEASURED_ROWS * BLOCK / (time.perf_counter() - begin)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
