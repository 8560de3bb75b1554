"""An optimizer's update for state on disk that is divided among the devices of a mesh.

Each device updates its own shard, by a chain of calls of its own: the calls are in the bodies of `jax.shard_map`. What
is elementwise is cut into pieces there, as `_pieces.py` does it on one device. What is not (Adafactor's means of rows)
is read whole, shard by shard, and XLA divides its computation among the devices, as it does without offload.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import PartitionSpec

from dejax import _compat
from dejax.offload import _disk_shards
from dejax.offload._chain import Group, Piece
from dejax.offload._disk_chain import DiskChain
from dejax.offload._evaluation import Demand
from dejax.offload._pieces import (
    evaluate,
    groups_of,
    is_elementwise,
    joined,
    shape_on_disk,
    tail_of,
    wide_of,
    with_tail,
)
from dejax.offload._state_store import DiskArray


def stream_shards(
    evaluation: Demand,
    state: Sequence[Any],
    streamed: Sequence[bool],
    num_updates: int,
    outputs: list[Any],
    ahead: int,
) -> None:
    """`stream_state` for divided arrays on disk."""
    numbers = [i for i, yes in enumerate(streamed) if yes]
    groups = groups_of(evaluation.jaxpr, numbers, num_updates, len(state))
    arrays = {i: state[i] for group in groups for i in group.state}
    mesh = _mesh_of(list(arrays.values()))
    local = {i: array.shard(None) for i, array in arrays.items()}
    near: list[Piece] = []  # of elementwise groups
    far: list[Piece] = []
    for group in groups:
        pieces = _cut(evaluation, group, local, {arrays[i].sharding.spec for i in group.state}, num_updates)
        (far if pieces[0].whole else near).extend(pieces)
    largest = max(sum(piece.span(local[i])[1] for i in piece.group.state) for piece in (*near, *far))
    chain = _Chains(arrays, mesh, staging_bytes=2 * (ahead + 1) * largest)
    if near:
        _update_in_pieces(evaluation, near, chain, num_updates, outputs, ahead, alone=len(groups) == 1)
    for piece in far:
        _update_whole(evaluation, piece, chain, num_updates, outputs)
    for i, array in chain.finish().items():
        outputs[num_updates + i] = array


class _Chains:
    """The chains of all devices, as one.

    Args:
        arrays: divided ones, by their numbers.
        mesh: of all of them.
        staging_bytes: cap of staging memory on each device.
    """

    def __init__(self, arrays: dict[int, DiskArray], mesh: Any, staging_bytes: int) -> None:
        self.arrays = arrays
        self._mesh = mesh
        self._each = PartitionSpec(mesh.axis_names)
        marks = {i: _disk_shards.mark_of(x.sharding, x.shape) for i, x in arrays.items()}
        self._chain = DiskChain({i: x.shard(None) for i, x in arrays.items()}, staging_bytes, marks)
        self._ticket = jnp.zeros((mesh.size, 2), jnp.uint32)
        self._with_tickets(lambda chain: chain.begin(jax.lax.axis_index(mesh.axis_names)))

    def specs(self, group: Group) -> list[PartitionSpec]:
        return [self.arrays[i].sharding.spec for i in group.state]

    def run(
        self,
        calls: Callable[..., Any],
        values: Sequence[Any] = (),
        given: Sequence[PartitionSpec] = (),
        results: Sequence[PartitionSpec] = (),
    ) -> Any:
        """Makes calls of the chain on every device, `calls(chain, *shards of values)`; returns its results.

        Args:
            calls: to a list of arrays.
            values: divided as `given` says.
            given: of the values.
            results: of the results.
        """

        def body(ticket: Any, *shards: Any) -> Any:
            self._chain._ticket = ticket[0]
            made = calls(self._chain, *shards)
            self._chain.flush()
            return self._chain._ticket[None], made

        specs = (self._each, *given)
        mapped = jax.shard_map(
            body, mesh=self._mesh, in_specs=specs, out_specs=(self._each, list(results)), check_vma=False
        )
        self._ticket, made = mapped(*_disk_shards.placed_as(self._mesh, (self._ticket, *values), specs))
        return made

    def finish(self) -> dict[int, DiskArray]:
        """The arrays with the tickets of their next version."""
        tickets = self._with_tickets(lambda chain: chain.finish())
        return {
            i: DiskArray(ticket, x.shape, x.dtype, x.unit_bytes, x.store, x.sharding)
            for (i, x), ticket in zip(self.arrays.items(), tickets, strict=True)
        }

    def _with_tickets(self, calls: Callable[[DiskChain], Any]) -> Any:
        def with_tickets(chain: DiskChain, *tickets: Any) -> list[Any]:
            for (i, array), ticket in zip(self.arrays.items(), tickets, strict=True):
                chain.arrays[i] = array.shard(ticket[0])
            calls(chain)
            return [chain.arrays[i].ticket[None] for i in self.arrays]

        each = [self._each] * len(self.arrays)
        return self.run(with_tickets, [array.ticket for array in self.arrays.values()], each, each)


class _Shards:
    """What `evaluate` reads of an update inside of a `shard_map`."""

    def __init__(self, jaxpr: core.Jaxpr, known: dict[Any, Any]) -> None:
        self.jaxpr = jaxpr
        self._known = known

    def value(self, var: Any) -> Any:
        return var.val if isinstance(var, core.Literal) else self._known[var]


def _cut(
    evaluation: Demand, group: Group, local: dict[int, DiskArray], specs: set[PartitionSpec], num_updates: int
) -> list[Piece]:
    """Pieces of every device's shard, or one that is whole where the update is not elementwise."""
    group.tails = {o: tail_of(evaluation, evaluation.jaxpr.outvars[o]) for o in group.outputs if o < num_updates}
    shards = [local[i] for i in group.state]
    alike = len(specs) == 1 and len({(x.shape, x.unit_bytes // x.dtype.itemsize) for x in shards}) == 1
    if not alike or not is_elementwise(evaluation, group, num_updates):
        return [Piece(group, 0, shards[0].shape[0], whole=True)]
    group.shape, rows = shape_on_disk(shards)
    length = group.shape[0]
    return [Piece(group, at, min(length, at + rows), whole=False) for at in range(0, length, rows)]


def _update_in_pieces(
    evaluation: Demand,
    pieces: Sequence[Piece],
    chain: _Chains,
    num_updates: int,
    outputs: list[Any],
    ahead: int,
    alone: bool,
) -> None:
    groups = list({id(piece.group): piece.group for piece in pieces}.values())
    spec = {id(group): chain.specs(group)[0] for group in groups}
    reads = {(id(group), var): None for group in groups for var in _read_by(evaluation, group)}  # in order
    given = [PartitionSpec() if var.aval.shape == () else spec[group] for group, var in reads]
    values = [evaluation.value(var) for _, var in reads]
    pushed = {num_updates + i for i in chain.arrays}
    kept = [(group, o) for group in groups for o in group.outputs if o not in pushed]

    def calls(device_chain: DiskChain, *shards: Any) -> list[Any]:
        known: dict[int, dict[Any, Any]] = {id(group): {} for group in groups}
        for (group, var), shard in zip(reads, shards, strict=True):
            known[group][var] = shard
        local = {group: _Shards(evaluation.jaxpr, values) for group, values in known.items()}
        parts: dict[int, list[Any]] = {o: [] for _, o in kept}
        for piece, taken in device_chain.taken(pieces, ahead):
            made = evaluate(local[id(piece.group)], piece, taken, alone)  # type: ignore[arg-type]
            for output, value in zip(piece.group.outputs, made, strict=True):
                if output in pushed:
                    device_chain.push(output - num_updates, piece, value)
                else:
                    parts[output].append(device_chain.wait_for(value))
        return [joined(parts[o], device_chain.arrays[group.state[0]].shape) for group, o in kept]

    made = chain.run(calls, values, given, [spec[id(group)] for group, _ in kept])
    for (group, output), value in zip(kept, made, strict=True):
        outputs[output] = with_tail(evaluation, value, group.tails.get(output, ()))


def _read_by(evaluation: Demand, group: Group) -> list[Any]:
    """The variables that a group's equations read, but for its state."""
    jaxpr = evaluation.jaxpr
    tails = {output: group.tails.get(output) for output in group.outputs}
    roots = [wide_of(tail[0]) if tail else jaxpr.outvars[output] for output, tail in tails.items()]
    own = {jaxpr.invars[i] for i in group.state} | {eqn.outvars[0] for eqn in group.equations}
    read = [var for eqn in group.equations for var in eqn.invars]
    variables = (var for var in (*read, *roots) if not isinstance(var, core.Literal))
    return [var for var in dict.fromkeys(variables) if var not in own]


def _update_whole(evaluation: Demand, piece: Piece, chain: _Chains, num_updates: int, outputs: list[Any]) -> None:
    group = piece.group

    def read(device_chain: DiskChain) -> list[Any]:
        device_chain.pull(piece)
        device_chain.call()
        return device_chain.call(take=piece)

    taken = dict(zip(group.state, chain.run(read, results=chain.specs(group)), strict=True))
    made = dict(zip(group.outputs, evaluate(evaluation, piece, taken, alone=False), strict=True))
    pushed = [o for o in group.outputs if o - num_updates in chain.arrays and o >= num_updates]

    def write(device_chain: DiskChain, *shards: Any) -> list[Any]:
        for output, shard in zip(pushed, shards, strict=True):
            device_chain.push(output - num_updates, piece, shard)
        return []

    specs = [chain.arrays[o - num_updates].sharding.spec for o in pushed]
    chain.run(write, [jnp.asarray(made[o]) for o in pushed], specs)
    for output, value in made.items():
        if output not in pushed:
            outputs[output] = with_tail(evaluation, value, group.tails.get(output, ()))


def _mesh_of(arrays: Sequence[DiskArray]) -> Any:
    if _compat.on_several_devices():
        raise ValueError(
            "offload.optimizer: `update` must be called outside of jax.shard_map where the state on disk is divided, "
            "got a call inside of one; it makes its own"
        )
    if any(array.sharding is None for array in arrays):
        raise ValueError("offload.optimizer: `state` must be of one mesh, got some arrays on disk that are not divided")
    meshes = list(dict.fromkeys(array.sharding.mesh for array in arrays))
    if len(meshes) > 1:
        raise ValueError(f"offload.optimizer: `state` must be of one mesh, got arrays of {meshes[0]} and {meshes[1]}")
    return meshes[0]


def is_divided(x: Any) -> bool:
    """Whether an array of a state on disk has several devices."""
    return isinstance(x, DiskArray) and x.sharding is not None
