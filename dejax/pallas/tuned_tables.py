"""Tuned schedules: tables on disk, the choice between a tuner, a table and the heuristic, and what a tuner tries.

A table is the user's own (`rgnn.Program.tune` writes it), or the one under `tuned/` for the device.
"""

from __future__ import annotations

import contextvars
import functools
import json
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from dejax.pallas._shapes import next_power_of_two

TUNED = Path(__file__).parent / "tuned"


def cache_file() -> Path:
    """Where schedules tuned on this machine's device are kept: `$DEJAX_CACHE_DIR`, or the user's cache folder."""
    folder = os.environ.get("DEJAX_CACHE_DIR")
    if folder is None:
        folder = str(Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "dejax")
    return Path(folder) / f"schedules_{device_name()}.json"


@functools.cache
def device_name() -> str:
    """The default device, as part of a file's name: `nvidia_h200`."""
    return re.sub(r"[^a-z0-9]+", "_", jax.devices()[0].device_kind.lower()).strip("_")


def read_table(path: Path) -> dict[str, dict[str, Any]]:
    """`{kernel: {key: fields of a schedule}}` from a file; empty where there is none, or none that can be read."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return {kernel: {key: dict(fields) for key, fields in schedules.items()} for kernel, schedules in table.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        warnings.warn(f"{path} holds no table of schedules ({error}); delete it or tune again", stacklevel=2)
        return {}


@functools.cache
def _tables() -> tuple[dict[str, dict[str, Any]], ...]:
    """The user's table, then the one that dejax ships for the device; none where there is no GPU."""
    if jax.default_backend() not in ("gpu", "cuda"):
        return ()
    return read_table(cache_file()), read_table(TUNED / f"{device_name()}.json")


def forget_tables() -> None:
    """Files are read again at the next kernel."""
    _tables.cache_clear()


def lookup(kernel: str, key: str) -> dict[str, Any] | None:
    """Fields of the tuned schedule of `kernel` (`gemm`, `outer` or `traversal`) for `key`; None if there is none."""
    for table in _tables():
        if key in table.get(kernel, {}):
            return dict(table[kernel][key])
    return None


# Asked before the tables: (kernel, key, fields by the heuristic, other fields to try, call with fields) -> fields.
Chooser = Callable[[str, str, dict[str, Any], list[dict[str, Any]], Callable[[dict[str, Any]], Any]], dict[str, Any]]
chooser: contextvars.ContextVar[Chooser | None] = contextvars.ContextVar("dejax_schedule_chooser", default=None)


def choose(
    kernel: str,
    key: str,
    heuristic: dict[str, Any],
    candidates: Callable[[], list[dict[str, Any]]],
    call: Callable[[dict[str, Any]], Any],
) -> dict[str, Any]:
    """Fields of the schedule for a kernel: from a tuner at work, else from a table, else the heuristic's.

    Args:
      kernel: `gemm`, `outer` or `traversal`.
      key: what is alike in shape shares a key.
      heuristic: the fields by the heuristic.
      candidates: gives other fields to try.
      call: runs the kernel with given fields, for a tuner to time.
    """
    tuner = chooser.get()
    if tuner is not None:
        return tuner(kernel, key, heuristic, candidates(), call)
    return lookup(kernel, key) or heuristic


def bucket(count: float) -> int:
    """A power of two for counts that are alike."""
    return next_power_of_two(max(1, round(count)))


def _sides(width: int) -> list[int]:
    """Sides of a tile to try for an axis of `width`."""
    padded = max(16, next_power_of_two(width))
    return sorted({min(padded, 64), min(padded, 128)})


def gemm_candidates(k: int, n: int) -> list[dict[str, Any]]:
    """Tiles, warps and stages to try for a grouped GEMM; `block` is the rows of a tile."""
    found = []
    for block in (32, 64, 128):
        for block_k in _sides(k):
            for block_n in _sides(n):
                for warps in (2, 4, 8):
                    if block * block_n // (32 * warps) > 128:
                        continue
                    tile = {"block": block, "block_k": block_k, "block_n": block_n, "num_warps": warps}
                    if next_power_of_two(k) > block_k:  # what the pipeline loads ahead: steps, or else tiles
                        found += [tile | {"num_stages": stages} for stages in (1, 2, 3)]
                        continue
                    found.append(tile | {"num_stages": 1})
                    if warps > 2:
                        found += [
                            tile | {"num_stages": stages, "tiles_per_program": tiles}
                            for tiles, stages in ((4, 2), (4, 3), (8, 4))
                        ]
    return found


def weight_gradient_candidates(k: int, n: int) -> list[dict[str, Any]]:
    """Tiles, warps and stages to try for grouped weight gradients."""
    return [
        {"block_rows": rows, "block_k": block_k, "block_n": block_n, "num_warps": warps, "num_stages": stages}
        for rows in (32, 64, 128)
        for block_k in _sides(k)
        for block_n in _sides(n)
        for warps in (4, 8)
        for stages in (1, 2)
        if block_k * block_n // (32 * warps) <= 128
    ]


def traversal_candidates(width: int) -> list[dict[str, Any]]:
    """Rows and entries of a step, and warps, to try for a traversal with tiles of `width`."""
    least = 4 if width > 8 else 1  # elements a thread; traversals of scalars alone were the fastest with two
    return [
        {"rows_per_program": rows, "entries_per_step": entries, "num_warps": warps, "num_stages": 1}
        for warps in (1, 2, 4)
        for rows in (1, 2, 4, 8, 16, 32, 64)
        for entries in (1, 2, 4, 8)
        if least <= rows * entries * width // (32 * warps) <= 32
    ]
