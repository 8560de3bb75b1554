"""Sorts, sums and numbers integers on a GPU, each by one kernel (`ordering.cu`) where XLA takes four to twelve."""

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

from dejax import _native
from dejax._ffi import ffi_call
from dejax.cuda.nvrtc import KernelError, compiled, nvrtc
from dejax.pallas.machine import compute_capability

_SOURCE = Path(__file__).parent / "ordering.cu"
_PARTS, _THREADS = 8, 1024  # blocks of a cluster, which work on one row, and threads of a block
_BINS = 256
_CLUSTERS_SINCE = 90  # the first compute capability whose blocks form clusters
LONGEST = 1 << 18
"""Up to so many entries the eight blocks take no longer than XLA's kernels, which use the whole GPU."""
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
    """Whether programs that are traced now may have the kernels of this module, for rows of this size."""
    capability = compute_capability()
    return capability is not None and capability >= _CLUSTERS_SINCE and 0 < size <= LONGEST and _compiles()


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
) -> list[Array]:
    """The results of a kernel that gets `operands`, `sizes`, `results` and `scratch`, with a cluster for each row."""
    capability = compute_capability()
    assert capability is not None
    key, image = _kernel(name, _PARTS, capability)
    found = ffi_call(
        "dejax_kernel",
        [*results, *scratch],
        [*operands, jnp.asarray(np.array(sizes, np.int32))],
        fixed=[len(operands)],
        fixed_results=range(len(results), len(results) + len(scratch)),
        key=np.int64(key),
        image=image,
        name=name,
        programs=np.int64(rows * _PARTS),
        threads=np.int64(_THREADS),
        shared_bytes=np.int64(0),
    )
    return found[: len(results)]


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
        found = mapped(*(x.reshape(size * rows, -1) for x in many))
        found = jax.tree.map(lambda x: x.reshape(size, rows, -1), found)
        return found, jax.tree.map(lambda _: True, found)

    return mapped


@_by_rows
def _row_sums(x: Array) -> Array:
    rows, size = x.shape
    scratch = jax.ShapeDtypeStruct((rows, _PARTS), jnp.int32)
    (found,) = _call("dejax_sums", [x], [size], [jax.ShapeDtypeStruct(x.shape, jnp.int32)], [scratch], rows)
    return found


def sums(x: Array) -> Array:
    """int32[..., size]: sums along the last axis, up to each entry and with it."""
    return _row_sums(x.reshape(-1, x.shape[-1])).reshape(x.shape)


def sort_pairs(key: Array, values: Array | None, bits: int) -> tuple[Array, Array]:
    """Keys and values in the stable order by key.

    Args:
        key: uint32[size] or int32[size], not negative.
        values: int32[size]; None: the positions.
        bits: of a key.
    """

    @_by_rows
    def of_rows(key: Array, *values: Array) -> tuple[Array, Array]:
        rows, size = key.shape
        pair = [jax.ShapeDtypeStruct(key.shape, dtype) for dtype in (key.dtype, jnp.int32)]
        scratch = [*pair, jax.ShapeDtypeStruct((rows, _PARTS * _BINS), jnp.uint32)]
        sizes = [size, max(bits, 1), len(values)]
        found = _call("dejax_sort_pairs", [key, *(values or [key])], sizes, pair, scratch, rows)
        return found[0], found[1]

    given = [key] if values is None else [key, values]
    sorted_key, sorted_values = of_rows(*(x[None] for x in given))
    return sorted_key[0], sorted_values[0]


def number(
    keys: Array,
    known: int,
    first_keys: Sequence[int],
    none: int,
    first_numbers: Sequence[int],
    counts: Sequence[int],
    places: int,
) -> tuple[Array, Array, Array]:
    """The numbers of nodes of several types; `number_found` of `dejax.minibatch` says what they are.

    Args:
        keys: int32[size], of known nodes, then of found ones: the first key of the type plus the node, or `none`.
        known: how many known nodes there are.
        first_keys: of each type.
        none: the number of nodes of all types.
        first_numbers, counts: of new nodes of each type.
        places: of known and new nodes.

    Returns:
        int32[places], the node of each number, -1 for none; int32[found], the number of each found node, -1 for none;
        int32[types], how many new nodes there are, those that did not fit included.
    """
    size, types = keys.shape[0], len(first_keys)
    assert types <= MOST_TYPES
    ends = [first + count for first, count in zip(first_numbers, counts, strict=True)]
    sizes = [size, none.bit_length(), known, none, places, types, *first_keys, *first_numbers, *ends]
    results = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (places, size - known, types)]
    scratch = [jax.ShapeDtypeStruct((n,), jnp.uint32) for n in (size, size, size, size, _PARTS * _BINS)]
    nodes, numbers, added = _call("dejax_number", [keys], sizes, results, scratch, 1)
    return nodes, numbers, added
