"""The static part of a `ShardedTable`, and how its blocks are made."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dejax.datasets.files._narrow_rows import Encoder, block_rows
from dejax.distributed._placing import on_mesh
from dejax.host_gather._ids import distinct_ids
from dejax.host_gather._spec import TableSpec, platform_of
from dejax.minibatch.features._formats import result_dtype, table_dtype, times_scales
from dejax.minibatch.features._node_features import table_builder

MULTIPLE = 64
"""Rows are padded to a multiple of it, so that checkpoints have one shape on 1, 2, 4, ... 64 devices."""


@dataclasses.dataclass(frozen=True, slots=True)
class ShardSpec:
    """The static part of a `ShardedTable`.

    Attributes:
        rows: the number of rows of the whole table.
        row: shape of a row.
        dtype: the dtype of the elements.
        devices: along `axis`.
        block: rows of each device, padding included.
        axis: the name of the mesh axis.
        memory: "host" or "device".
        platform: "cpu" or "cuda".
    """

    rows: int
    row: tuple[int, ...]
    dtype: np.dtype
    devices: int
    block: int
    axis: str
    memory: str
    platform: str

    @property
    def row_bytes(self) -> int:
        return math.prod(self.row) * self.dtype.itemsize

    @property
    def local(self) -> TableSpec:
        """The spec of one device's block."""
        return TableSpec(self.block, self.row, self.dtype, self.platform, on_device=self.memory == "device")

    def rows_of(self, words: Array, row_scale: Array | None, column_scale: Array | None, dtype: Any) -> Array:
        """[n, *row] from unsigned integers [n, words], times their scales."""
        if self.dtype.itemsize == 8:
            if not jax.config.values["jax_enable_x64"]:
                raise TypeError(
                    f"ShardedTable.gather: `dtype` must be of 32 bits or fewer without jax's 64-bit mode, got rows of "
                    f"{self.dtype}; switch it on: jax.config.update('jax_enable_x64', True)"
                )
            words = words.reshape(words.shape[0], -1, 2)
        rows = jax.lax.bitcast_convert_type(words, self.dtype).reshape(words.shape[0], *self.row)
        scaled = row_scale is not None or column_scale is not None
        kept = self.dtype if self.dtype == np.float64 and not scaled else result_dtype(self.dtype, scaled)
        return times_scales(rows, kept if dtype is None else np.dtype(dtype), row_scale, column_scale)


def make_shards(
    what: str, given: Any, mesh: Mesh, axis: str, dtype: Any, scale: str | None, memory: str, hot: Any
) -> tuple[dict[str, Any], ShardSpec]:
    """The arrays of a `ShardedTable`, of which this process makes its devices' blocks, and its spec.

    `given` has a shape and a dtype, and gives blocks of rows: a numpy array, or rows that are made when they are read.
    """
    if given.ndim == 0:
        raise ValueError(f"{what}: the array must be [rows, *row], got a scalar")
    if memory not in ("host", "device"):
        raise ValueError(f"{what}: `memory` must be 'host' or 'device', got {memory!r}")
    encoder = Encoder.of(what, given, table_dtype(what, given.dtype if dtype is None else dtype), scale)
    devices = mesh.shape[axis]
    multiple = math.lcm(MULTIPLE, devices)
    block = max(1, math.ceil(len(given) / multiple)) * multiple // devices
    platform = platform_of(mesh.devices.flat[0])
    spec = ShardSpec(len(given), given.shape[1:], encoder.dtype, devices, block, axis, memory, platform)
    blocks, scales = _blocks(encoder, given, spec, mesh)
    divided = NamedSharding(mesh, PartitionSpec(axis))
    kind = "pinned_host" if memory == "host" and platform == "cuda" else None
    words_at = NamedSharding(mesh, PartitionSpec(axis), memory_kind=kind) if kind else divided
    width = spec.local.leaf.shape[1]
    words = jax.make_array_from_single_device_arrays((devices * block, width), words_at, blocks)
    hot_ids = np.sort(distinct_ids(what, "hot", hot, len(given)))
    everywhere = PartitionSpec()
    column_scale = encoder.column_scale
    parts = {
        "words": words,
        "row_scale": jax.make_array_from_single_device_arrays((devices * block,), divided, scales) if scales else None,
        "column_scale": None if column_scale is None else on_mesh(column_scale, mesh, everywhere),
        "hot_ids": None,
        "hot_words": None,
        "hot_scale": None,
    }
    if len(hot_ids):
        hot_rows, hot_scale = encoder(_rows_at(given, hot_ids))
        parts["hot_ids"] = on_mesh(hot_ids.astype(np.int32), mesh, everywhere)
        parts["hot_words"] = on_mesh(spec.local.to_words(hot_rows), mesh, everywhere)
        parts["hot_scale"] = None if hot_scale is None else on_mesh(hot_scale, mesh, everywhere)
    return parts, spec


def _blocks(encoder: Encoder, given: Any, spec: ShardSpec, mesh: Mesh) -> tuple[list[Array], list[Array]]:
    """For each device of this process the words of its rows, and their scales."""
    shape = (spec.devices * spec.block,)
    places = NamedSharding(mesh, PartitionSpec(spec.axis)).addressable_devices_indices_map(shape)
    blocks, scales = [], []
    for device, index in (places or {}).items():
        first = (index[0].start or 0) if index else 0
        last = max(first, min(first + spec.block, spec.rows))  # what follows is padding
        own, on_device = (spec.block, *spec.row), spec.memory == "device"
        builder = table_builder("ShardedTable", own, spec.dtype, on_device, device)
        scale = np.ones(spec.block, np.float32)
        step = block_rows(given)
        for start in range(first, last, step):
            stop = min(start + step, last)
            encoded, own_scale = encoder(np.asarray(given[start:stop]))
            builder.write(start - first, encoded)
            if own_scale is not None:
                scale[start - first : stop - first] = own_scale
        builder.write(last - first, np.zeros((first + spec.block - last, *spec.row), spec.dtype))
        blocks.append(builder.table()._leaf)
        scales.append(jax.device_put(scale, device))
    return blocks, scales if encoder.by_row else []


def _rows_at(given: Any, ids: np.ndarray) -> np.ndarray:
    """Some rows, by ascending ids, of a numpy array, or of rows that are made when they are read."""
    if isinstance(given, np.ndarray):
        return np.asarray(given[ids])
    step = block_rows(given)
    blocks = [(int(number) * step, ids[ids // step == number]) for number in np.unique(ids // step)]
    return np.concatenate([given[first : first + step][some - first] for first, some in blocks])
