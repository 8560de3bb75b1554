"""The static part of a table: shape, dtype and platform; codes of element types, and the integers that carry rows."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dejax._platform import default_device

# dejax/include/element_types.h has the same codes.
ELEMENT_CODES = {
    "float32": 0,
    "float64": 1,
    "bfloat16": 2,
    "float16": 3,
    "float8_e4m3fn": 4,
    "float8_e5m2": 5,
    "int8": 6,
    "uint8": 7,
    "int16": 8,
    "uint16": 9,
    "int32": 10,
    "uint32": 11,
}
RESULT_CODES = {"float32": 0, "bfloat16": 2, "float16": 3}
MOVE_BYTES = -1  # the code of rows that are moved without conversion
_MAX_ROW_BYTES = 1 << 30  # kernels count the bytes of a row in 32 bits


def element_dtype(dtype: Any, what: str) -> np.dtype:
    """`dtype` as a numpy dtype in this machine's byte order. Its elements must have whole bytes."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        raise TypeError(f"{what}: the dtype must be numeric, got {dtype}; use jax.random.key_data for keys")
    found = np.dtype(dtype)
    if found.hasobject or found.names is not None or found.kind in "SUmM":
        raise TypeError(f"{what}: the dtype must be numeric, got {found}")
    if found.type is np.void:
        raise TypeError(
            f"{what}: the dtype must be named, got {found}, as numpy.save leaves of bfloat16 and FP8; give the dtype, "
            "as by array.view(jnp.bfloat16)"
        )
    if found.name.endswith(("int4", "int2", "int1", "e2m1fn")):
        raise TypeError(f"{what}: the dtype must have whole bytes, got {found}; use int8")
    return found.newbyteorder("=")


def word_bits(dtype: np.dtype) -> int:
    """Bits of the unsigned integers that carry elements of `dtype`: wider ones would need jax's 64-bit mode."""
    return 8 * min(dtype.itemsize, 4)


def words_per_row(row: tuple[int, ...], dtype: np.dtype) -> int:
    """Unsigned integers in one row."""
    return math.prod(row) * max(1, dtype.itemsize // 4)


def store_unit(row_bytes: int) -> int:
    """Bytes that a kernel can store at once: the largest power of two up to 16 that divides the bytes of a row."""
    return min(16, row_bytes & -row_bytes) if row_bytes else 16


@dataclasses.dataclass(frozen=True, slots=True)
class TableSpec:
    """The static part of a table. It belongs to jit's cache key."""

    rows: int
    row: tuple[int, ...]
    dtype: np.dtype
    platform: str  # "cpu" or "cuda": the platform whose handlers read the table
    read_only: bool = False
    shared: bool = False  # among several devices: readable only inside shard_map
    sharers: int = 1  # devices of a process that share one memory; 1 also where each device has a copy
    # (level, number) pairs set by `value_and_grad`: which call of it records gathers of this table, under which number.
    marks: tuple[tuple[int, int], ...] = ()
    # Rows of the leaf, where the others lie in the device's memory (`SplitTable`); None where all lie in the leaf.
    leaf_rows: int | None = None
    peers: int = 0  # memory blocks of a `PeerTable`, over which the rows beside those of the leaf are divided
    on_device: bool = False  # the leaf lies in the device's memory (`DeviceTable`)
    on_drive: bool = False  # the rows lie in files; the leaf is the number of their reader (`DriveTable`)

    @property
    def plain(self) -> TableSpec:
        """The spec without marks, for handlers and kernels."""
        return dataclasses.replace(self, marks=()) if self.marks else self

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, *self.row)

    @property
    def row_bytes(self) -> int:
        return math.prod(self.row) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def is_split(self) -> bool:
        return self.leaf_rows is not None

    @property
    def host_part(self) -> TableSpec:
        """The spec of the rows in host memory as a table of their own."""
        if self.leaf_rows is None:
            return self
        return dataclasses.replace(self, rows=self.leaf_rows, leaf_rows=None, peers=0)

    def device_part(self, rows: int) -> TableSpec:
        """The spec of `rows` rows in device memory as a table of their own."""
        return dataclasses.replace(self, rows=rows, leaf_rows=None, on_device=True, on_drive=False, sharers=1)

    def with_peers(self, rows: int, peers: int) -> TableSpec:
        """The spec of a read-only table with these rows in host memory, and others in `peers` blocks on devices."""
        return dataclasses.replace(self, rows=rows, leaf_rows=self.rows, peers=peers, read_only=True)

    @property
    def host_bytes(self) -> int:
        """Bytes of the rows in host memory."""
        return 0 if self.on_device or self.on_drive else self._leaf_rows * self.row_bytes

    @property
    def _leaf_rows(self) -> int:
        return self.rows if self.leaf_rows is None else self.leaf_rows

    @property
    def leaf(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the leaf array: unsigned integers, so that jax never asks for a derivative of a table."""
        if self.on_drive:
            return jax.ShapeDtypeStruct((2,), np.dtype(np.uint32))
        return jax.ShapeDtypeStruct((self._leaf_rows, *self.words.row), self.words.dtype)

    def to_words(self, rows: np.ndarray) -> np.ndarray:
        """Rows [n, *row] as the unsigned integers [n, words] that carry them."""
        words = self.words
        # A view of one axis: of several, numpy could not see the words of a row without elements.
        flat = np.ascontiguousarray(rows, self.dtype).reshape(-1).view(words.dtype)
        return flat.reshape(len(rows), *words.row)

    def to_rows(self, words: np.ndarray) -> np.ndarray:
        """The rows [n, *row] that unsigned integers [n, words] carry; a view where they are contiguous."""
        return np.ascontiguousarray(words).reshape(-1).view(self.dtype).reshape(len(words), *self.row)

    @property
    def words(self) -> TableSpec:
        """The spec of the same memory as a table of unsigned integers."""
        row, dtype = (words_per_row(self.row, self.dtype),), np.dtype(f"uint{word_bits(self.dtype)}")
        return dataclasses.replace(self, row=row, dtype=dtype)


def table_spec(shape: Any, dtype: Any, device: jax.Device | None, what: str) -> TableSpec:
    try:
        shape = tuple(operator.index(size) for size in (shape if np.iterable(shape) else [shape]))
    except TypeError:
        raise TypeError(f"{what}: the shape must be integers [rows, *row], got {shape!r}") from None
    if not shape or min(shape) < 0:
        raise ValueError(f"{what}: the shape must be [rows, *row], got {shape}")
    spec = TableSpec(shape[0], shape[1:], element_dtype(dtype, what), platform_of(device_or_default(device)))
    if spec.row_bytes > _MAX_ROW_BYTES:
        raise ValueError(f"{what}: rows must have at most {_MAX_ROW_BYTES} bytes, got {spec.row_bytes}; split them")
    return spec


def device_or_default(device: jax.Device | None) -> Any:
    if device is not None:
        if not hasattr(device, "platform"):
            raise TypeError(f"HostTable: `device` must be one of jax.devices(), got {device!r}")
        return device
    return default_device()


def platform_of(device: jax.Device) -> str:
    if device.platform == "cpu":
        return "cpu"
    if device.platform in ("gpu", "cuda") and "rocm" not in getattr(device.client, "platform_version", "").lower():
        return "cuda"
    raise ValueError(
        f"HostTable: `device` must be a CPU or an NVIDIA GPU, got {device.platform}, which cannot read host memory in "
        "place"
    )


def ordinal_of(spec: TableSpec, device: jax.Device | None) -> int | None:
    """The CUDA driver's number of the table's device; None for a table that is not pinned."""
    return device_or_default(device).local_hardware_id if spec.platform == "cuda" else None
