"""Other ways to bring rows of host memory to the device: each is a function from ids to rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Rows = Callable[[np.ndarray], Any]


def numpy_take(view: np.ndarray) -> Rows:
    """`numpy.take` on one thread, then `jax.device_put` of ordinary memory."""
    return lambda ids: jax.block_until_ready(jax.device_put(np.take(view, ids, axis=0)))


def torch_select(view: np.ndarray, most: int) -> Rows | None:
    """torch's gather with all threads into pinned memory, then a copy; None without torch."""
    try:
        import torch
    except ImportError:
        return None
    on_gpu = torch.cuda.is_available() and jax.default_backend() == "gpu"
    source, staging = torch.from_numpy(view), torch.empty((most, view.shape[1]), pin_memory=on_gpu)

    def rows(ids: np.ndarray) -> Any:
        part = staging[: len(ids)]
        torch.index_select(source, 0, torch.from_numpy(ids.astype(np.int64)), out=part)
        if not on_gpu:
            return part
        moved = part.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        return moved

    return rows


def host_compute(leaf: jax.Array) -> Rows:
    """`jnp.take` of the same pinned array under `compute_on("device_host")`."""
    from jax.experimental.compute_on import compute_on

    host = leaf.sharding
    device = jax.sharding.SingleDeviceSharding(next(iter(leaf.devices())), memory_kind="device")

    def found(table: jax.Array, ids: jax.Array) -> jax.Array:
        return jnp.take(table, ids, axis=0)

    @jax.jit
    def take(table: jax.Array, ids: jax.Array) -> jax.Array:
        if "compute_type" in inspect.signature(compute_on).parameters and jax.__version_info__ >= (0, 11):
            on_host = compute_on(found, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)
            return jax.device_put(on_host(table, ids), device)
        with compute_on("device_host"):
            rows = found(table, ids)
        return jax.device_put(rows, device)

    return lambda ids: jax.block_until_ready(take(leaf, jax.device_put(ids, host)))


def device_view(table: Any) -> Rows:
    """`jnp.take` of the pinned memory, which jax takes for device memory (`kDLCUDA`)."""
    from dejax.host_gather import _spec
    from dejax.host_gather.tables import _memory

    memory, spec = _memory.memory_of(table._leaf), table._spec

    class Exporter:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

        def __dlpack__(self, **_: Any) -> Any:
            return memory.dlpack(list(spec.leaf.shape), _spec.word_bits(spec.dtype), 2, 0)

    array = jax.dlpack.from_dlpack(Exporter())
    take = jax.jit(lambda array, ids: jnp.take(array, ids, axis=0))
    return lambda ids: jax.block_until_ready(take(array, jnp.asarray(ids)))
