"""The FFI calls of `dejax.offload`: `store` a tensor, which returns a handle; `fetch` a handle's tensor; `guard`.

XLA takes them for functions without side effects. So a tensor that nobody fetches is never stored, `jax.checkpoint`
may recompute them, and data flow orders them: `store` returns a handle, and `fetch` takes it.

A call that XLA makes twice, because it has folded a slice into it, would fail: the tensor's memory is reused once it is
fetched. So each call is behind barriers (`ffi_call`), and a batch of calls has them inside of its loop.

Under `vmap`, a tensor that is not batched is stored and fetched once. A batch is stored one example at a time and
fetched in reverse, so that the last examples never leave the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.interpreters.ad
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax import _compat, _native
from dejax._native import ffi_call
from dejax.offload.activations import shards

HANDLE = jax.ShapeDtypeStruct((2,), jnp.uint32)
DEVICE = -1
"""In place of a binding: the tensor is its own handle and stays, with the same barriers in the program."""


def store(x: Array, *, binding: int, site: int, ring_bytes: int) -> Array:
    """Stores a copy of `x`; returns its handle, uint32[2].

    Args:
        x: at least one element, of a dtype of whole bytes.
        binding: the store's binding, see `current.py`. 0: the current store.
        site: number of the call in its program.
        ring_bytes: size of the device's ring for this program, where the store was given none.
    """
    if binding == DEVICE:
        return jax.lax.optimization_barrier(x)
    _native.extension("offload")

    def on_shard(x: Array, layout: int, share: float) -> Array:
        ring, at, part = np.int64(np.ceil(ring_bytes * share)), np.int64(site), np.int64(layout)
        with jax.named_scope("offload_store"):
            (handle,) = ffi_call(
                "dejax_offload_store", [HANDLE], [x], store=np.int64(binding), site=at, ring=ring, layout=part
            )
        return handle

    return _call(_by_example(lambda batch, x: shards.store(x, on_shard, site=site, batch=batch)), x)


def fetch(handle: Array, like: Any, after: Sequence[Array], *, binding: int, site: int) -> Array:
    """The tensor of a handle.

    Args:
        handle: uint32[2], from `store`.
        like: its shape and dtype.
        after: the fetch waits for these.
        binding: as in `store`.
        site: as in `store`.
    """
    if binding == DEVICE:
        return jax.lax.optimization_barrier(handle)

    def of_shard(handle: Array, shape: tuple[int, ...], layout: int, after: Sequence[Array]) -> Array:
        out = jax.ShapeDtypeStruct(shape, like.dtype)
        operands = [handle, *after]
        with jax.named_scope("offload_fetch"):
            (x,) = ffi_call("dejax_offload_fetch", [out], operands, site=np.int64(site), layout=np.int64(layout))
        return x

    def of_batch(batch: int, handle: Array, *after: Array) -> Array:
        return shards.fetch(handle, after, like, of_shard, site=site, batch=batch)

    # Where `after` alone is batched, the one fetch begins once the cotangents of all examples are there.
    return _sharded_as(_call(_by_example(of_batch), handle, *after), like)


def guard(x: Array, after: Sequence[Array], *, binding: int) -> Array:
    """`x`, or NaN where a store or a fetch of this run has failed on one of several devices.

    The fetches of such a run return NaN, so that no device waits for another one. A dtype without NaN cannot show that:
    then the guard fills the cotangents. On one device a failure ends the step, and `x` needs no guard.

    Args:
        x: floating-point; its memory is reused.
        after: fetched tensors of a dtype without NaN.
        binding: as in `store`.
    """
    if binding == DEVICE:
        return x

    def on_shard(x: Array, *after: Array) -> Array:
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        (x,) = ffi_call("dejax_offload_guard", [out], [x, *after], aliases={0: 0})
        return x

    @jax.custom_batching.custom_vmap
    def batchable(x: Array, *after: Array) -> Array:
        return shards.guard(x, after, on_shard)

    @batchable.def_vmap
    def rule(_: int, batched: Sequence[bool], x: Array, *after: Array) -> tuple[Array, bool]:
        return batchable(x, *after), batched[0]  # a run fails for all examples

    return _call(batchable, x, *after)


def _by_example(run: Callable[..., Array], batch: int = 0) -> Any:
    """`run(batch, *operands)`, where the first operand has `batch` axes in front, one for each surrounding `vmap`."""

    @jax.custom_batching.custom_vmap
    def batchable(*operands: Array) -> Array:
        return run(batch, *operands)

    @batchable.def_vmap
    def rule(_: int, batched: Sequence[bool], *operands: Array) -> tuple[Array, bool]:
        if not batched[0]:
            return batchable(*operands), False
        return _by_example(run, batch + 1)(*operands), True

    return batchable


def _call(fn: Callable[..., Array], *operands: Array) -> Array:
    """Calls `fn(*operands)`. Its derivative raises an error that names the remedy."""
    call = jax.custom_jvp(fn)
    call.defjvp(_no_second_derivative)
    return call(*operands)  # type: ignore[no-any-return]


def _sharded_as(x: Array, like: Any) -> Array:
    """`x` with the sharding of `like`, which is a part of its type on a mesh with explicit axes."""
    sharding: Any = getattr(like, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding) or not any(sharding.spec):
        return x
    if jax.sharding.AxisType.Explicit not in sharding.mesh.axis_types:
        return x
    return jax.sharding.reshard(x, sharding)


def has_nan(dtype: Any) -> bool:
    """Whether a value with all bits set is NaN."""
    return bool(jnp.issubdtype(dtype, jnp.inexact)) and "fnuz" not in np.dtype(dtype).name


def _no_second_derivative(primals: Any, tangents: Any, **params: Any) -> NoReturn:
    raise NotImplementedError(
        "offload: a second derivative was asked for. JAX cannot differentiate through a tensor that comes back from a "
        "store. Use the function without offload there, or jax.checkpoint"
    )


# jax 0.10 drops rules of `custom_jvp` as it differentiates a loop, and comes to the operators inside.
jax.interpreters.ad.primitive_jvps[_compat.sharding_group_p] = _no_second_derivative
