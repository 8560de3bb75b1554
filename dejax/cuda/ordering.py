"""Sorts, sums and numbers integers, each by one kernel of a GPU or one call on a CPU.

XLA takes four to twelve kernels of a GPU, and compiles a dozen loops for a CPU. The kernels are in `ordering.cu`, the
calls in `native/ordering`. Results are XLA's, bit for bit.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax import _compat, _native
from dejax._native import ffi_call
from dejax._platform import default_device, described_device, platform
from dejax.cuda.nvrtc import KernelError, compiled, nvrtc
from dejax.pallas.machine import compute_capability

_SOURCE = Path(__file__).parent / "ordering.cu"
_THREADS, _BINS = 1024, 256
# Blocks of a cluster, which work on a row. All GPUs with clusters run eight, those of data centres sixteen, too, which
# sort more entries than these faster.
_CLUSTERS_SINCE, _OF_DATA_CENTRES = 90, (90, 100, 103)  # compute capabilities
_PARTS, _MORE_PARTS = 8, 16
_MORE_TO_SORT = 1 << 13
_MULTIPROCESSORS = 100  # a GPU with fewer is a part of one, or a small one
LONGEST = 1 << 17
"""Rows of more entries stay with XLA's kernels, which use the whole GPU (docs/performance/calls.md)."""
MOST_TYPES = 64


@functools.cache
def _compiles() -> bool:
    if _native.unavailable_reason() is not None:
        return False
    try:
        nvrtc()
    except KernelError:
        return False
    return True


def available(size: int) -> bool:
    """Whether programs that are traced now may have kernels of a GPU for rows of this size."""
    capability = compute_capability()
    return capability is not None and capability >= _CLUSTERS_SINCE and 0 < size <= LONGEST and _compiles()


def by_platform(
    size: int, on_gpu: Callable[..., Any], on_cpu: Callable[..., Any], by_xla: Callable[..., Any], *operands: Any
) -> Any:
    """The result of `on_gpu` or `on_cpu`, or of `by_xla` where the platform has no calls for rows of this size."""
    if available(size):
        return jax.lax.platform_dependent(*operands, cuda=on_gpu, default=by_xla)
    if platform() == "cpu" and _native.unavailable_reason() is None:
        return jax.lax.platform_dependent(*operands, cpu=on_cpu, default=by_xla)  # exported for a GPU it has no calls
    return by_xla(*operands)


def _parts_of_sort(size: int) -> int:
    """How many blocks sort a row."""
    described = described_device()
    cores = getattr(default_device(), "core_count", 0) if described is None else described.num_cores
    whole = (cores or 0) >= _MULTIPROCESSORS
    return _MORE_PARTS if size > _MORE_TO_SORT and whole and compute_capability() in _OF_DATA_CENTRES else _PARTS


@functools.cache
def _kernel(name: str, parts: int, capability: int) -> tuple[int, str]:
    """The key of a kernel among those that a process has loaded, and its machine code in base64."""
    definitions = tuple(sorted({name.removeprefix("dejax_").upper(): 1, "PARTS": parts, "THREADS": _THREADS}.items()))
    source = _SOURCE.read_text(encoding="utf-8")
    image = compiled(_SOURCE.name, source, definitions, divmod(capability, 10))
    return int.from_bytes(hashlib.sha256(image).digest()[:8], "little", signed=True), base64.b64encode(image).decode()


def _call(
    name: str,
    operands: Sequence[Array],
    sizes: Sequence[int],
    results: Sequence[Any],
    scratch: Sequence[Any],
    rows: int,
    parts: int,
) -> list[Array]:
    """The results of a kernel that gets `operands`, `sizes`, `results` and `scratch`: `parts` blocks work on a row."""
    capability = compute_capability()
    assert capability is not None
    key, image = _kernel(name, parts, capability)
    found = ffi_call(
        "dejax_kernel",
        [*results, *scratch],
        [*operands, jnp.asarray(np.array(sizes, np.int32))],
        fixed=[len(operands)],
        fixed_results=range(len(results), len(results) + len(scratch)),
        key=np.int64(key),
        image=image,
        name=name,
        programs=np.int64(rows * parts),
        threads=np.int64(_THREADS),
        shared_bytes=np.int64(0),
    )
    return found[: len(results)]


def _like(operands: Sequence[Array], shapes: Sequence[tuple[int, ...]], dtype: Any = jnp.int32) -> list[Any]:
    """Types of results of these shapes, which vary over the axes of a mesh over which an operand does."""
    return [_compat.varying_result(shape, dtype, *map(jax.typeof, operands)) for shape in shapes]


def _by_rows(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` of arrays [rows, size], of which `vmap` makes more rows."""
    mapped = jax.custom_batching.custom_vmap(call)

    @mapped.def_vmap
    def _(size: int, batched: Sequence[bool], *arrays: Array) -> Any:
        many = [
            x if is_mapped else jnp.broadcast_to(x[None], (size, *x.shape))
            for x, is_mapped in zip(arrays, batched, strict=True)
        ]
        rows = many[0].shape[1]
        found = mapped(*(x.reshape(size * rows, *x.shape[2:]) for x in many))
        found = jax.tree.map(lambda x: x.reshape(size, rows, *x.shape[1:]), found)
        return found, jax.tree.map(lambda _: True, found)

    return mapped


@_by_rows
def _row_sums(x: Array) -> Array:
    rows, size = x.shape
    result, scratch = _like([x], [x.shape]), _like([x], [(rows, _PARTS)])
    (found,) = _call("dejax_sums", [x], [size], result, scratch, rows, _PARTS)
    return found


@_by_rows
def _row_sums_on_cpu(x: Array) -> Array:
    (found,) = ffi_call("dejax_sums", _like([x], [x.shape]), [x])
    return found


def sums(x: Array, by_xla: Callable[[Array], Array]) -> Array:
    """int32[..., size]: sums of int32 along the last axis, up to each entry and with it."""

    def of_rows(call: Callable[[Array], Array], x: Array) -> Array:
        return call(x.reshape(-1, x.shape[-1])).reshape(x.shape)

    on_gpu, on_cpu = (functools.partial(of_rows, call) for call in (_row_sums, _row_sums_on_cpu))
    return by_platform(x.shape[-1], on_gpu, on_cpu, by_xla, x)


def sort_pairs(
    key: Array, values: Array | None, bits: int, by_xla: Callable[..., tuple[Array, Array]]
) -> tuple[Array, Array]:
    """Keys and values in the stable order by key.

    Args:
        key: uint32[size] or int32[size], not negative.
        values: int32[size]; None: the positions.
        bits: of a key.
        by_xla: the same of `key` and the values, if there are any.
    """
    given = [key] if values is None else [key, values]

    def pair(*given: Array) -> list[Any]:
        shape = given[0].shape
        return [*_like(given, [shape], key.dtype), *_like(given, [shape])]

    def of_rows(call: Callable[..., Sequence[Array]], *given: Array) -> tuple[Array, Array]:
        sorted_key, sorted_values = _by_rows(call)(*(x[None] for x in given))
        return sorted_key[0], sorted_values[0]

    def on_gpu(key: Array, *values: Array) -> Sequence[Array]:
        rows, size = key.shape
        parts = _parts_of_sort(size)
        scratch = _like([key, *values], [(rows, n) for n in (2 * size, 2 * size, parts * _BINS)])
        sizes = [size, bits, len(values)]
        return tuple(
            _call("dejax_sort_pairs", [key, *(values or [key])], sizes, pair(key, *values), scratch, rows, parts)
        )

    def on_cpu(key: Array, *values: Array) -> Sequence[Array]:
        return tuple(ffi_call("dejax_sort_pairs", pair(key, *values), [key, *values], bits=np.int64(bits)))

    calls = (functools.partial(of_rows, call) for call in (on_gpu, on_cpu))
    found: tuple[Array, Array] = by_platform(key.shape[0], *calls, by_xla, *given)
    return found


def number(
    keys: Array,
    known: int,
    first_keys: Sequence[int],
    none: int,
    first_numbers: Sequence[int],
    counts: Sequence[int],
    places: int,
    by_xla: Callable[[Array], tuple[Array, Array, Array]],
) -> tuple[Array, Array, Array]:
    """The numbers of nodes of several types; `number_found` of `dejax.minibatch` says what they are.

    Args:
        keys: int32[size], of known nodes, then of found ones: the first key of the type plus the node, or `none`.
        known: how many known nodes there are.
        first_keys: of each type.
        none: the number of nodes of all types.
        first_numbers, counts: of new nodes of each type.
        places: of known and new nodes.
        by_xla: the same of `keys`.

    Returns:
        int32[places], the node of each number, -1 for none; int32[found], the number of each found node, -1 for none;
        int32[types], how many new nodes there are, those that did not fit included.
    """
    size, types = keys.shape[0], len(first_keys)
    ends = [first + count for first, count in zip(first_numbers, counts, strict=True)]
    of_types = [*first_keys, *first_numbers, *ends]
    lengths = places, size - known, types

    def rows_of(keys: Array, lengths: Sequence[int]) -> list[Any]:
        return _like([keys], [(keys.shape[0], n) for n in lengths])

    def of_rows(call: Callable[[Array], Any], keys: Array) -> tuple[Array, ...]:
        return tuple(x[0] for x in _by_rows(call)(keys[None]))

    def on_gpu(keys: Array) -> Sequence[Array]:
        rows, parts = keys.shape[0], _parts_of_sort(size)
        sizes = [size, none.bit_length(), known, none, places, types, *of_types]
        scratch = rows_of(keys, (2 * size, 2 * size, size, parts * _BINS))
        return tuple(_call("dejax_number", [keys], sizes, rows_of(keys, lengths), scratch, rows, parts))

    def on_cpu(keys: Array) -> Sequence[Array]:
        sizes = np.array([known, none, *of_types], np.int64)
        return tuple(ffi_call("dejax_number", rows_of(keys, lengths), [keys], sizes=sizes))

    calls = (functools.partial(of_rows, call) for call in (on_gpu, on_cpu))
    found: tuple[Array, Array, Array] = by_platform(size if types <= MOST_TYPES else 0, *calls, by_xla, keys)
    return found
