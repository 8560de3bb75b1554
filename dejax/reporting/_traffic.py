"""Bytes over the bus and to the disk, and waits for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dejax.host_gather._cost import random_seconds, sorted_seconds
from dejax.reporting._hlo import Module
from dejax.reporting._owners import TABLES, Leaf


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one call of a step moves between memories: a row in a report's table.

    Attributes:
        what: which rows or tensors are moved.
        nbytes: bytes in one call.
        direction: "to the device", "to the host", "to disk" or "from disk".
        predicted_ms: time that the cost model predicts for one H200 on PCIe 5; None if the model does not apply.
        note: how the bytes were found.

    >>> import dejax, jax, jax.numpy as jnp, numpy as np
    >>> from dejax.host_gather import HostTable, gather
    >>> table = HostTable.from_numpy(np.ones((100, 64), np.float32))
    >>> page = dejax.report(jax.jit(lambda table, ids: gather(table, ids).sum()), table, jnp.arange(10), calls=0)
    >>> [(moved.nbytes, moved.direction) for moved in page.traffic]
    [(2560, 'to the device')]
    """

    what: str
    nbytes: int
    direction: str
    predicted_ms: float | None = None
    note: str = ""


def of_tables(module: Module, leaves: Sequence[Leaf], *, on_gpu: bool) -> list[Traffic]:
    """The rows that calls read from and write to tables, from the compiled program."""
    sizes = {leaf.shape.partition("[")[2].partition(",")[0]: leaf for leaf in leaves if leaf.owner == TABLES}
    shapes = {i.name: i.shapes for body in module.computations.values() for i in body}
    found = []
    for instruction, times in module.instructions():
        if instruction.target in ("dejax_table_gather", "dejax_table_gather_start") and instruction.shapes:
            rows = instruction.shapes[0]
            operand = shapes.get(instruction.operands[0], ()) if instruction.operands else ()
            table = sizes.get(operand[0].text.partition("[")[2].partition(",")[0]) if operand else None
            count = int(rows.text.partition("[")[2].rstrip("]").split(",")[0] or 1)
            predicted = None
            if table is not None and count and on_gpu:
                seconds = [f(table.nbytes, rows.nbytes // count, count) for f in (random_seconds, sorted_seconds)]
                predicted = times * min(seconds) * 1e3
            name = f"{table.path}: {count:,} rows" if table else f"{count:,} rows of a table"
            where = module.line(instruction)
            found.append(
                Traffic(
                    name + (f", {where}" if where else "") + (f", {times} times" if times > 1 else ""),
                    rows.nbytes * times,
                    "to the device",
                    predicted,
                    "rows that are asked for; equal ids are read once where ids are sorted",
                )
            )
        elif instruction.target == "dejax_table_update":
            operands = [shapes[name][0].nbytes for name in instruction.operands[1:] if shapes.get(name)]
            found.append(Traffic("updates of table rows", sum(operands) * times, "to the host"))
        elif instruction.target == "dejax_offload_pieces":
            found.append(Traffic("pieces of offloaded state", instruction.nbytes * times, "to the device"))
    return found


def of_drives(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], calls: int) -> list[Traffic]:
    """The rows of tables on a drive, by place: bytes that came from it, with the part of the rows that did not."""
    found = []
    for then, now in zip(before, after, strict=True):
        rows = {place: (now[f"{place}_rows"] - then[f"{place}_rows"]) / calls for place in ("device", "cache", "drive")}
        total = sum(rows.values())
        if not total:
            continue
        places = ", ".join(f"{count:,.0f} from the {place}" for place, count in rows.items())
        found.append(
            Traffic(
                f"{total:,.0f} rows of a table on a drive: {places}",
                int((now["read_bytes"] - then["read_bytes"]) / calls),
                "from disk",
                note=f"counted by the reader; {1 - rows['drive'] / total:.1%} of the rows did not come from the drive",
            )
        )
    return found


def of_store(before: Any, after: Any, calls: int) -> tuple[list[Traffic], dict[str, float]]:
    """What a store moved in `calls` calls, and the seconds that one call waited."""
    names = {
        "copied_out_bytes": ("stored tensors", "to the host"),
        "prefetched_bytes": ("stored tensors, ahead of their use", "to the device"),
        "demand_bytes": ("stored tensors, on demand", "to the device"),
        "written_bytes": ("stored tensors", "to disk"),
        "read_bytes": ("stored tensors", "from disk"),
    }
    moved = []
    for name, (what, direction) in names.items():
        nbytes = (getattr(after, name) - getattr(before, name)) // calls
        if nbytes:
            moved.append(Traffic(what, nbytes, direction, None, "counted by the store"))
    waits = {
        "launches waited for room in the store": "store_stall_seconds",
        "launches waited for tensors": "fetch_stall_seconds",
        "the device waited to store": "device_store_stall_seconds",
        "the device waited for tensors": "device_fetch_stall_seconds",
    }
    stalls = {what: (getattr(after, name) - getattr(before, name)) / calls for what, name in waits.items()}
    return moved, {what: seconds for what, seconds in stalls.items() if seconds > 1e-6}


def idle_share(events: Sequence[Any]) -> float | None:
    """Share of the time between the first and the last event in which the device did nothing."""
    if not events:
        return None
    spans = sorted((event.start_ns, event.start_ns + event.duration_ns) for event in events)
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    whole = end - spans[0][0]
    return 1 - busy / whole if whole else None


def total(traffic: Sequence[Traffic]) -> Mapping[str, int]:
    """Bytes by direction."""
    found: dict[str, int] = {}
    for entry in traffic:
        found[entry.direction] = found.get(entry.direction, 0) + entry.nbytes
    return found
