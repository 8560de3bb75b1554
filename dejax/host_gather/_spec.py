"""What is static about a table: shape, dtype and the platform whose handlers read it."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import jax
import numpy as np

from dejax.host_gather import _types

_MAX_ROW_BYTES = 1 << 30  # kernels count bytes of a row in 32 bits


@dataclasses.dataclass(frozen=True, slots=True)
class TableSpec:
    """What is static about a table: part of the jit cache key."""

    rows: int
    row: tuple[int, ...]
    dtype: np.dtype
    platform: str  # "cpu" or "cuda": which handlers read it
    read_only: bool = False
    shared: bool = False  # by several devices: read only inside shard_map
    marks: tuple[tuple[int, int], ...] = ()  # of `value_and_grad`: who notes gathers, and under which number

    @property
    def plain(self) -> TableSpec:
        """Without marks: what handlers and kernels go by."""
        return dataclasses.replace(self, marks=()) if self.marks else self

    @property
    def row_bytes(self) -> int:
        return math.prod(self.row) * self.dtype.itemsize

    @property
    def leaf(self) -> jax.ShapeDtypeStruct:
        """The array inside: rows as unsigned integers, so that no derivative of a table is ever asked for."""
        words = _types.words_per_row(self.row, self.dtype)
        return jax.ShapeDtypeStruct((self.rows, words), np.dtype(f"uint{_types.word_bits(self.dtype)}"))


def table_spec(shape: Any, dtype: Any, device: jax.Device | None, what: str) -> TableSpec:
    try:
        shape = tuple(operator.index(size) for size in (shape if np.iterable(shape) else [shape]))
    except TypeError:
        raise TypeError(f"{what}: a shape [rows, *row] of integers is needed, {shape!r} was given") from None
    if not shape or min(shape) < 0:
        raise ValueError(f"{what}: a shape [rows, *row] is needed, {shape} was given")
    spec = TableSpec(shape[0], shape[1:], _types.element_dtype(dtype, what), platform_of(device_or_default(device)))
    if spec.row_bytes > _MAX_ROW_BYTES:
        raise ValueError(f"{what}: a row may have {_MAX_ROW_BYTES} bytes, {spec.row_bytes} were given; split the rows")
    return spec


def device_or_default(device: jax.Device | None) -> Any:
    if device is not None:
        if not hasattr(device, "platform"):
            raise TypeError(f"HostTable: `device` must be one of jax.devices(), {device!r} was given")
        return device
    default = jax.config.values["jax_default_device"]
    return default if isinstance(default, jax.Device) else jax.local_devices(backend=default)[0]


def platform_of(device: jax.Device) -> str:
    if device.platform == "cpu":
        return "cpu"
    if device.platform in ("gpu", "cuda") and "rocm" not in getattr(device.client, "platform_version", "").lower():
        return "cuda"
    raise ValueError(
        f"HostTable: {device.platform} devices cannot read host memory in place; use a CPU or an NVIDIA GPU"
    )


def ordinal_of(spec: TableSpec, device: jax.Device | None) -> int | None:
    """The number by which the CUDA driver knows the table's device; None for a table that is not pinned."""
    return device_or_default(device).local_hardware_id if spec.platform == "cuda" else None
