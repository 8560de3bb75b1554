"""Optimizer state in pinned host memory or on disk, brought to the device piece by piece for the update."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dejax import _native
from dejax._optional import optional
from dejax._platform import on_gpu
from dejax.offload._evaluation import inlined
from dejax.offload.state.first_state import first_state, in_place
from dejax.offload.state.meshes import divided, require_one_mesh, why_no_shards
from dejax.offload.state.placements import Placements, Tier, explicit_shardings, is_on_host
from dejax.offload.state.store import StateStore, is_on_disk, store_at
from dejax.offload.state.stream.cut import PIECE_BYTES, StateUpdate, unit_of
from dejax.offload.state.stream.pieces import stream_state

_HOST = jax.memory.Space.Host


def optimizer(
    tx: Any,
    *,
    min_bytes: int = 1 << 16,
    streams: bool | None = None,
    piece_bytes: int = PIECE_BYTES,
    ahead: int = 2,
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | StateStore | None = None,
) -> Any:
    """Wraps an Optax transformation so that its state lies in pinned host memory or on disk between steps.

    The updates are those of `tx`, to rounding. The state of each parameter is copied to the device before its update
    and back afterwards. Values that all parameters share (a count, a norm of all gradients) are computed once. The bus
    limits the time: AdamW moves 8 bytes each way for each float32 parameter.

    Donate the state to a jitted step, and tell `jax.jit` where its arguments and results lie. Without these shardings,
    jax 0.10 to 0.12 may pair a donated array on the host with a result on the device, which ends the process. A step
    that does not donate the state copies it first.

        where = jax.tree.map(lambda x: x.sharding, (params, state))
        step = jax.jit(step, donate_argnums=(0, 1), in_shardings=where, out_shardings=where)

    Call `init` outside of `jax.jit`: it then makes the state one array at a time in its place, and the device never
    holds all of it. The state of sharded parameters is sharded like them. Inside of `jax.jit`, or if `tx.init` cannot
    be traced, the device first holds the whole state.

    For gradient accumulation, wrap it: `optimizer(optax.MultiSteps(tx, 4))`. The other order fails, because
    `MultiSteps` would select between state on the host and state on the device, which XLA refuses.

    Args:
        tx: an `optax.GradientTransformation` whose `update` can be traced.
        min_bytes: smaller arrays of the state stay on the device.
        streams: who copies between host memory and device. True: dejax, in both directions at once and ahead of need.
            If the update of a parameter is elementwise, it is copied in pieces, so that the device never holds a whole
            array of state. Each device copies its own shards. Not under `jax.vmap`. False: XLA, parameter by parameter,
            one direction after the other. None: dejax if it can, else XLA. dejax needs the native extension and GPUs.
            On several GPUs it also needs a state that `init` of this transformation has placed on one mesh outside of
            `jax.jit`, or a mesh with explicit axes; and an update outside of `jax.shard_map`. Make a transformation for
            each mesh.
        piece_bytes: with `streams`: size of a piece of one array. The device holds `2 * (ahead + 1)` pieces of each
            array of state that a parameter has (two for Adam), outside of XLA's memory pool.
        ahead: with `streams`: number of pieces that are copied to the device before they are needed.
        path: keeps the state on disk instead, in files in this folder on a fast drive, in several folders, or in a
            `StateStore`, whose documentation says how long the files live. Host memory then holds only pieces that are
            being read (`ahead` of their update) or written. Call `init` outside of `jax.jit` and `update` inside. State
            of sharded parameters is sharded like them: each device reads and writes its own shards, and of several
            devices with the same shard one writes.

    Returns:
        An `optax.GradientTransformationExtraArgs`. Its state has the structure of the state of `tx`; large arrays lie
        in memory of kind "pinned_host", or are `DiskArray`s with `path`.

    Raises:
        TypeError: `tx` has no `init` and `update`.
        ValueError: `piece_bytes` or `ahead` is not positive, or `path` comes with `streams=False`. By `init`, with
            `streams=True` or `path`: parameters on several devices have no mesh in common; with `path`: the call is
            inside of `jax.jit`. By `update`, with `streams=True` or `path`: the state is divided and the call is inside
            of `jax.shard_map`; with `streams=True`: the state lies on several devices and `init` has not placed it;
            with `path`: the call is outside of `jax.jit`.
        FileNotFoundError, PermissionError: by `init`: `path` cannot be used.
        RuntimeError: by `init`: the drive is full.
        NativeExtensionError: with `streams=True` or `path`: dejax's native extension is missing.
    """
    with optional("optax", of="offload.optimizer"):
        import optax

    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(f"offload.optimizer: `tx` must be an Optax transformation, got {type(tx).__name__}")
    if piece_bytes < 1 or ahead < 1:
        raise ValueError(
            f"offload.optimizer: `piece_bytes` and `ahead` must be at least 1, got {piece_bytes} and {ahead}"
        )
    if path is not None and streams is False:
        raise ValueError("offload.optimizer: `streams` must be True or None with a path, got False: XLA reads no files")
    tx = optax.with_extra_args_support(tx)
    moved = _Moved(min_bytes, path, piece_bytes)
    copies = _Copies(streams)

    def init(params: Any) -> Any:
        if path is not None or streams:
            why = "with streams=True" if path is None else "with a path"
            require_one_mesh(params, "offload.optimizer", why)
        state = first_state(tx.init, params, moved.tiers, moved.put, piece_bytes)
        copies.note(state, params)
        return state

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        traced, others, out_tree = _trace_update(tx, state, (updates, params, extra))
        on_disk = any(map(is_on_disk, traced.state))
        away = [is_on_disk(x) if on_disk else moved.is_large(x) for x in traced.state]
        # Outside of jit operations run one after the other, so nothing could overlap.
        inside = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((traced.state, others)))
        if on_disk and not inside:
            raise ValueError("offload.optimizer: a state on disk must be updated in jax.jit, got arrays outside of it")
        streamed, shardings = copies.of(traced.state, away, inside)
        for var, leaf, is_away, travels in zip(traced.jaxpr.invars, traced.state, away, streamed, strict=False):
            if not travels:
                traced.give(var, leaf, is_away)
        for var, leaf in zip(traced.jaxpr.invars[len(traced.state) :], others, strict=True):
            traced.give(var, leaf, False)
        if any(streamed):
            stream_state(traced, shardings, streamed, piece_bytes, ahead)
        for output in _order(traced, away):
            if traced.outputs[output] is None:
                value, at = traced.value(traced.jaxpr.outvars[output]), traced.state_of(output)
                traced.outputs[output] = value if at is None or not away[at] else jax.device_put(value, _HOST)
        return jax.tree.unflatten(out_tree, traced.outputs)

    return optax.GradientTransformationExtraArgs(init, update)


@dataclass(frozen=True)
class _Moved:
    """Which arrays of the state lie outside of device memory, and where."""

    min_bytes: int
    path: Any
    piece_bytes: int

    @functools.cached_property
    def disk(self) -> StateStore:
        return store_at(self.path)

    def is_large(self, x: Any) -> bool:
        if not (hasattr(x, "dtype") and hasattr(x, "size")) or jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
            return False  # random keys stay on the device
        return x.size * np.dtype(x.dtype).itemsize >= max(1, self.min_bytes)

    def tiers(self, state: Any) -> list[Tier]:
        return [self.tier(x) for x in jax.tree.leaves(state)]

    def tier(self, x: Any) -> Tier:
        if not self.is_large(x) or (self.path is not None and len(x.shape) == 0):
            return "device"
        return "host" if self.path is None else "disk"

    def put(self, x: Any, tier: Tier, sharding: Any) -> Any:
        """Puts an array of the state in its place."""
        if tier == "device":
            return x if sharding is None or not hasattr(x, "dtype") else in_place(x, tier, sharding)
        if tier == "disk" and isinstance(x, jax.core.Tracer):
            raise ValueError("offload.optimizer: `init` must run outside of jax.jit with a path, got traced arrays")
        shape = sharding.shard_shape(tuple(x.shape)) if divided(sharding) else x.shape
        unit = unit_of(shape, x.dtype, self.piece_bytes)
        return in_place(x, tier, sharding, disk=lambda: self.disk, unit_bytes=unit)


class _Copies:
    """Decides whether dejax or XLA copies each array of a state between host memory and devices.

    Args:
        streams: see `optimizer`.
    """

    def __init__(self, streams: bool | None) -> None:
        self._streams = streams
        self._seen = Placements()

    def note(self, state: Any, params: Any) -> None:
        """Remembers how the devices divide a state that `init` has made for parameters on one mesh."""
        leaves, given = jax.tree.leaves(state, is_leaf=is_on_disk), jax.tree.leaves(params)
        if any(isinstance(x, jax.core.Tracer) for x in (*leaves, *given)):
            return
        shardings = [getattr(x, "sharding", None) for x in given]
        if len({getattr(at, "mesh", None) for at in shardings if divided(at)}) <= 1:
            self._seen.note(leaves)

    def of(self, state: Sequence[Any], away: Sequence[bool], inside: bool) -> tuple[list[bool], Sequence[Any]]:
        """For each array of a state, whether dejax copies it, and its sharding if dejax copies it on several devices.

        Args:
            state: its arrays.
            away: which of them do not lie on the device.
            inside: whether the call is inside of `jax.jit`.
        """
        if any(map(is_on_disk, state)):
            return [is_on_disk(x) for x in state], [x.sharding if is_on_disk(x) else None for x in state]
        host = [is_away and x.ndim > 0 and is_on_host(x) for x, is_away in zip(state, away, strict=True)]
        nothing, nowhere = [False] * len(state), [None] * len(state)
        if not inside or not any(host) or not (_by_default() if self._streams is None else self._streams):
            return nothing, nowhere
        if jax.device_count() == 1:
            return host, nowhere
        found = self._known(state, host)
        on_meshes = [at for at in found if any(map(divided, _chosen(at, host)))]
        if self._streams is None:
            can = len(found) == len(on_meshes) == 1
            if can and why_no_shards("`update`", _chosen(state, host), _chosen(found[0], host)) is None:
                return host, found[0]
            return nothing, nowhere
        if not on_meshes:
            return host, nowhere
        if len(found) > 1:
            raise ValueError(
                "offload.optimizer: `state` must be divided as `init` divides every state of these shapes with "
                f"streams=True, got {len(found)} ways; make an optimizer for each"
            )
        return host, found[0]

    def _known(self, state: Sequence[Any], host: Sequence[bool]) -> list[tuple[Any, ...]]:
        """The shardings that the arrays in host memory may have."""
        explicit = explicit_shardings(_chosen(state, host))
        if explicit is None:
            return self._seen.of(state)
        rest = iter(explicit)
        return [tuple(next(rest) if yes else None for yes in host)]


def _chosen(values: Sequence[Any], where: Sequence[bool]) -> list[Any]:
    return [value for value, yes in zip(values, where, strict=True) if yes]


def _by_default() -> bool:
    return on_gpu() and _native.unavailable_reason() is None


def _trace_update(tx: Any, state: Any, others: tuple[Any, Any, Any]) -> tuple[StateUpdate, list[Any], Any]:
    """The update, the leaves of its other arguments, and the tree of its results."""
    state_leaves, state_tree = jax.tree.flatten(state, is_leaf=is_on_disk)
    other_leaves, others_tree = jax.tree.flatten(others)

    def flat(*leaves: Any) -> tuple[Any, Any]:
        state = jax.tree.unflatten(state_tree, leaves[: len(state_leaves)])
        updates, params, extra = jax.tree.unflatten(others_tree, leaves[len(state_leaves) :])
        return tx.update(updates, state, params, **extra)

    def shape(x: Any) -> Any:
        if is_on_disk(x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype)
        aval = jax.typeof(x)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))

    closed, out = jax.make_jaxpr(flat, return_shape=True)(*map(shape, (*state_leaves, *other_leaves)))
    num_updates = len(jax.tree.leaves(out[0]))
    return StateUpdate(inlined(closed), state_leaves, num_updates), other_leaves, jax.tree.structure(out)


def _order(update: StateUpdate, away: Sequence[bool]) -> list[int]:
    """An order of the outputs in which outputs that need the same arrays in host memory follow one another."""
    needs = update.needs([i for i, is_away in enumerate(away) if is_away])
    last = update.num_updates
    first: dict[int, int] = {}  # for each array, the first update that needs it
    for output in range(last):
        for need in needs[output]:
            first.setdefault(need, output)

    def place(output: int) -> tuple[int, int]:
        if output < last:
            return (output, 0)
        return (min((first.get(need, last) for need in needs[output]), default=last), 1)

    return sorted(range(len(needs)), key=place)
