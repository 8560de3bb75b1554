"""Calls on tensors that XLA has divided among devices: each device stores, and fetches, its own shard.

Which part of a tensor a device holds is decided by XLA, as it compiles. So a call is a `custom_partitioning`: XLA asks
for the call on one shard, and tells the sharding of the operand. No device needs what another one holds.

Two things follow from that.

- A tensor must come back with the sharding with which it went. XLA does not see that one call fetches what another one
  stored. Both are in one *sharding group* by the number of their site, and so get the same sharding in a program.
  Where backward is another program, it takes the sharding that forward's compilation left in `_known`.
- A handle has the type of a replicated value, but each device has its own: that of its shard. XLA moves replicated
  values without communication. A handle that came to a device or a shard to which it does not belong is an error:
  stores compare the *layout*, a hash of which device holds which part.

`vmap` over an axis that is divided: each device stores the examples that it holds, one at a time.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning

from dejax import _compat

_WHOLE = 0
"""The layout of a tensor on one device."""
_OWN = 2
"""The layout of tensors inside of the user's own `shard_map`: each device has its own."""

_known: dict[tuple[Any, ...], Any] = {}  # shardings of stored tensors, by site, shape and devices
_known_lock = threading.Lock()
_MOST_KNOWN = 4096


def store(x: Array, call: Callable[[Array, int, float], Array], *, site: int, batch: int = 0) -> Array:
    """The handle of each example in `x`, uint32[*batch axes, 2]; on each device that of its shard.

    Args:
        x: [*batch axes, *shape], divided or not.
        call: a function from one shard of an example, its layout, and its share of the example's elements, to a handle.
        site: number of the call in its program.
        batch: number of batch axes.
    """
    undivided = _OWN if _compat.on_several_devices() else _WHOLE
    shape = x.shape  # JAX keeps `partition` with the program: it holds no tracer

    def whole(x: Array) -> Array:
        return _map(lambda x: call(x, undivided, 1.0), x, batch)

    def partition(mesh: Any, operands: Any, result: Any) -> Any:
        sharding = operands[0].sharding
        _remember(site, shape, sharding)
        counts, layout = _division(sharding, shape)
        share = 1 / math.prod(counts[batch:])

        def on_shard(shard: Array) -> Array:
            with _compat.no_mesh():
                return _map(lambda x: call(x, layout, share), shard, batch)

        return mesh, on_shard, result.sharding, (sharding,)

    # The barrier: Shardy does not tell a group of the sharding that the argument of a loop's body gets.
    x = _compat.sharding_group(jax.lax.optimization_barrier(x), site)
    run = custom_partitioning(whole)
    axes = _axes("x", shape)
    run.def_partition(partition, sharding_rule=_rule([axes], [*axes[:batch], "handle"]))
    return run(x)


def fetch(
    handle: Array, after: Sequence[Array], like: Any, call: Callable[..., Array], *, site: int, batch: int = 0
) -> Array:
    """The tensors of handles, [*batch axes, *like.shape].

    Args:
        handle: a handle from `store`.
        after: the fetch waits for these, however they are divided.
        like: one example's shape and dtype.
        call: a function from a handle, a shard's shape, its layout, and `after`, to that shard.
        site: as in `store`.
        batch: number of batch axes.
    """
    undivided = _OWN if _compat.on_several_devices() else _WHOLE
    shape = (*handle.shape[:batch], *like.shape)

    def whole(handle: Array, *after: Array) -> Array:
        return _map(lambda handle: call(handle, like.shape, undivided, after), handle, batch, reverse=True)

    def partition(mesh: Any, operands: Any, result: Any) -> Any:
        sharding = _recall(site, shape, result.sharding)
        counts, layout = _division(sharding, shape)
        shard_shape = tuple(-(-size // count) for size, count in zip(like.shape, counts[batch:], strict=True))

        def on_shard(handle: Array, *after: Array) -> Array:
            with _compat.no_mesh():
                return _map(lambda handle: call(handle, shard_shape, layout, after), handle, batch, reverse=True)

        return mesh, on_shard, sharding, tuple(operand.sharding for operand in operands)

    run = custom_partitioning(whole)
    axes = _axes("x", shape)
    waited = [_axes(f"after{i}_", x.shape) for i, x in enumerate(after)]
    run.def_partition(partition, sharding_rule=_rule([[*axes[:batch], "handle"], *waited], axes))
    return _compat.sharding_group(run(handle, *after), site)


def guard(x: Array, after: Sequence[Array], call: Callable[..., Array]) -> Array:
    """`call(x, *after)` on each shard of `x`, and `x` on one device; the result is divided as `x` is."""
    undivided = call if _compat.on_several_devices() else lambda x, *after: x

    def partition(mesh: Any, operands: Any, _: Any) -> Any:
        shardings = tuple(operand.sharding for operand in operands)

        def on_shard(x: Array, *after: Array) -> Array:
            with _compat.no_mesh():
                return call(x, *after)

        return mesh, on_shard, shardings[0], shardings

    run = custom_partitioning(undivided)
    axes = _axes("x", x.shape)
    waited = [_axes(f"after{i}_", value.shape) for i, value in enumerate(after)]
    run.def_partition(partition, sharding_rule=_rule([axes, *waited], axes))
    return run(x, *after)


def _map(call: Callable[[Array], Array], xs: Array, batch: int, *, reverse: bool = False) -> Array:
    """Runs `call` on each example, one at a time."""
    if batch == 0:
        return call(xs)
    _, ys = jax.lax.scan(
        lambda count, x: (count + 1, _map(call, x, batch - 1, reverse=reverse)), 0, xs, reverse=reverse
    )
    return ys


def _division(sharding: Any, shape: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Into how many parts each axis is cut, and the layout: equal where all devices hold the same parts of a tensor."""
    counts, parts = _compat.shard_grid(sharding, len(shape))
    digest = hashlib.blake2b(repr((tuple(shape), counts, sorted(parts.items()))).encode(), digest_size=8).digest()
    return counts, (int.from_bytes(digest, "little") >> 1) | 1  # positive, and neither _WHOLE nor _OWN


def _axes(prefix: str, shape: Sequence[int]) -> list[str]:
    return [f"{prefix}{axis}" for axis in range(len(shape))]


def _rule(operands: Sequence[Sequence[str]], result: Sequence[str]) -> SdyShardingRule:
    """Axes with the same name are divided alike, and each apart from all others."""
    return SdyShardingRule(
        tuple(ArrayMapping(*axes) for axes in operands),
        (ArrayMapping(*result),),
        need_replication_factors=("handle",) if any("handle" in axes for axes in [*operands, result]) else (),
    )


def _key(site: int, shape: Sequence[int], sharding: Any) -> tuple[Any, ...]:
    # In the order of the program: a sharding says which place in it, not which device, holds a part.
    return site, tuple(shape), tuple(device.id for device in sharding._device_assignment)


def _remember(site: int, shape: Sequence[int], sharding: Any) -> None:
    with _known_lock:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[_key(site, shape, sharding)] = sharding


def _recall(site: int, shape: Sequence[int], sharding: Any) -> Any:
    with _known_lock:
        return _known.get(_key(site, shape, sharding), sharding)
