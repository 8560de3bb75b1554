"""The FFI calls of `dejax.offload`: store a tensor for a handle, fetch a handle's tensor, guard what depends on it.

Neither has a side effect in XLA's eyes. What nobody fetches is then never stored, `jax.checkpoint` may go around, and
order follows from data: a handle comes from its store, and a fetch takes a handle.

XLA on GPUs folds slices into the calls that they are operands or results of. jax 0.11 then kept the call that it
replaced where its result was used elsewhere too: a tensor was fetched twice, which fails where its memory was used
again. It does not look through barriers, so each call has one on both sides; a batch of calls has them inside of its
loop.

Under `vmap`, what is not batched is stored and fetched once. A batch is stored one example at a time and fetched in
reverse, the order that a store serves best.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax import _native

HANDLE = jax.ShapeDtypeStruct((2,), jnp.uint32)
DEVICE = -1
"""In place of a binding: the tensor is its own handle and stays, between the same cuts in the program."""


def store(x: Array, *, store_id: int, site: int, ring_bytes: int) -> Array:
    """Takes a copy of `x` and gives its handle, uint32[2].

    Args:
        x: at least one element, of a dtype of whole bytes.
        store_id: which store, as programs carry it: a binding of `_current.py`. 0: the current one.
        site: which call of the program this is.
        ring_bytes: that the device's ring should have for this program, where the store was given no size.
    """
    if store_id == DEVICE:
        return jax.lax.optimization_barrier(x)
    _native.extension("offload")

    @jax.custom_batching.custom_vmap
    def batchable(x: Array) -> Array:
        x = jax.lax.optimization_barrier(x)
        with jax.named_scope("offload_store"):
            ffi = jax.ffi.ffi_call("dejax_offload_store", HANDLE)
            return ffi(x, store=np.int64(store_id), site=np.int64(site), ring=np.int64(ring_bytes))

    @batchable.def_vmap
    def rule(_: int, batched: Sequence[bool], x: Array) -> tuple[Array, bool]:
        return jax.lax.map(batchable, x), True

    call = jax.custom_jvp(batchable)
    call.defjvp(_no_second_derivative)
    return call(x)


def fetch(handle: Array, like: Any, after: Sequence[Array], *, store_id: int, site: int) -> Array:
    """The tensor of a handle.

    Args:
        handle: uint32[2], from `store`.
        like: its shape and dtype.
        after: the fetch comes after these are computed.
        store_id: as it was stored with.
        site: as it was stored with.
    """
    if store_id == DEVICE:
        return jax.lax.optimization_barrier(handle)

    @jax.custom_batching.custom_vmap
    def batchable(handle: Array, *after: Array) -> Array:
        handle, *after = jax.lax.optimization_barrier((handle, *after))
        with jax.named_scope("offload_fetch"):
            out = jax.ShapeDtypeStruct(like.shape, like.dtype)
            ffi = jax.ffi.ffi_call("dejax_offload_fetch", out)
            x = ffi(handle, *after, store=np.int64(store_id), site=np.int64(site))
        return jax.lax.optimization_barrier(x)

    @batchable.def_vmap
    def rule(_: int, batched: Sequence[bool], handle: Array, *after: Array) -> tuple[Array, bool]:
        if not batched[0]:  # not before any example is where this may begin
            return batchable(handle, *after), False
        _, xs = jax.lax.scan(lambda count, handle: (count + 1, batchable(handle, *after)), 0, handle, reverse=True)
        return xs, True

    call = jax.custom_jvp(batchable)
    call.defjvp(_no_second_derivative)
    return _sharded_as(call(handle, *after), like)


def guard(x: Array, after: Sequence[Array], *, store_id: int) -> Array:
    """`x`, or NaN where a fetch of this run was foreseen wrongly.

    A tensor that was fetched wrongly is NaN itself, unless its dtype has none: then this goes around what it is used
    with.

    Args:
        x: floating-point; its memory is used again.
        after: fetched tensors of a dtype without NaN.
        store_id: as they were stored with.
    """
    if store_id == DEVICE:
        return x

    @jax.custom_batching.custom_vmap
    def batchable(x: Array, *after: Array) -> Array:
        x, *after = jax.lax.optimization_barrier((x, *after))
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        ffi = jax.ffi.ffi_call("dejax_offload_guard", out, input_output_aliases={0: 0})
        return jax.lax.optimization_barrier(ffi(x, *after, store=np.int64(store_id)))

    @batchable.def_vmap
    def rule(_: int, batched: Sequence[bool], x: Array, *after: Array) -> tuple[Array, bool]:
        return batchable(x, *after), batched[0]  # a run has failed for all examples

    call = jax.custom_jvp(batchable)
    call.defjvp(_no_second_derivative)
    return call(x, *after)


def _sharded_as(x: Array, like: Any) -> Array:
    """`x` with the sharding that is a part of its type on a mesh with explicit axes."""
    sharding: Any = getattr(like, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding) or not any(sharding.spec):
        return x
    if jax.sharding.AxisType.Explicit not in sharding.mesh.axis_types:
        return x
    return jax.sharding.reshard(x, sharding)


def has_nan(dtype: Any) -> bool:
    """Whether a value with all bits set is NaN."""
    return bool(jnp.issubdtype(dtype, jnp.inexact)) and "fnuz" not in np.dtype(dtype).name


def _no_second_derivative(primals: Any, tangents: Any) -> NoReturn:
    raise NotImplementedError(
        "offload: a second derivative was asked for. What is offloaded comes back as a number without history, so only "
        "first derivatives are right. Use the function without offload there, or take jax.checkpoint"
    )
