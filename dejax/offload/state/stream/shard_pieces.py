"""An optimizer's update for state in host memory or on disk that is divided among the devices of a mesh.

Each device updates its own shard, by a chain of calls of its own: the calls are in the bodies of `jax.shard_map`. What
is elementwise is cut into pieces there, as `pieces.py` does it on one device. What is not (Adafactor's means of rows)
is read whole, shard by shard, and XLA divides its computation among the devices, as it does without offload.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from dejax import _compat
from dejax.offload._evaluation import Demand
from dejax.offload.state import disk_shards
from dejax.offload.state.store import is_on_disk
from dejax.offload.state.stream.chain import Group, Piece, staging_of
from dejax.offload.state.stream.loop_chain import LoopChain
from dejax.offload.state.stream.pieces import (
    cut_of,
    evaluate,
    groups_of,
    is_elementwise,
    joined,
    tails_of,
    wide_of,
    with_tail,
)
from dejax.offload.state.stream.shard_calls import ShardCalls, shapes_of_shards


def stream_shards(
    evaluation: Demand,
    state: Sequence[Any],
    shardings: Sequence[Any],
    streamed: Sequence[bool],
    num_updates: int,
    outputs: list[Any],
    piece_bytes: int,
    ahead: int,
) -> None:
    """`stream_state` for arrays that a mesh divides; `shardings`: of the state's arrays."""
    numbers = [i for i, yes in enumerate(streamed) if yes]
    groups = groups_of(evaluation.jaxpr, numbers, num_updates, len(state))
    arrays = {i: state[i] for group in groups for i in group.state}
    where = {i: shardings[i] for i in arrays}
    if why := why_no_shards(list(where.values())):
        raise ValueError(f"offload.optimizer: {why}")
    local = dict(zip(arrays, shapes_of_shards(list(arrays.values()), list(where.values())), strict=True))
    near: list[Piece] = []  # of elementwise groups
    far: list[Piece] = []
    for group in groups:
        pieces = _cut(evaluation, group, local, {where[i].spec for i in group.state}, num_updates, piece_bytes)
        (far if pieces[0].whole else near).extend(pieces)
    chain = _Chains(arrays, where, staging_bytes=staging_of([*near, *far], local, ahead))
    if near:
        _update_in_pieces(evaluation, near, chain, num_updates, outputs, ahead, alone=len(groups) == 1)
    for piece in far:
        _update_whole(evaluation, piece, chain, num_updates, outputs)
    for i, array in chain.finish().items():
        outputs[num_updates + i] = array


class _Chains(ShardCalls):
    """The chains of all devices, as one.

    Args:
        arrays: divided ones, by their numbers.
        shardings: of each, on one mesh.
        staging_bytes: cap of staging memory on each device.
    """

    def __init__(self, arrays: dict[int, Any], shardings: dict[int, NamedSharding], staging_bytes: int) -> None:
        super().__init__(list(arrays.values()), [shardings[i] for i in arrays])
        self.numbers = list(arrays)
        marks = {i: disk_shards.mark_of(x.sharding, x.shape) for i, x in arrays.items() if is_on_disk(x)}
        shards = shapes_of_shards(self.arrays, [shardings[i] for i in arrays])
        self._chain = LoopChain(dict(zip(self.numbers, shards, strict=True)), staging_bytes, marks)
        self._ticket = self._first_ticket()
        self._begin()

    def specs(self, numbers: Sequence[int]) -> list[PartitionSpec]:
        return [self._specs[self.numbers.index(i)] for i in numbers]

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

        def body(ticket: Any, *shards: Any) -> tuple[Any, list[Any]]:
            self._chain._ticket = ticket
            made = calls(self._chain, *shards)
            self._chain.flush()
            return self._chain._ticket, made

        self._ticket, made = self._run(body, self._ticket, values, given, results)
        return made

    def _begin(self) -> None:
        def calls(chain: LoopChain, *operands: Any) -> list[Any]:
            chain.arrays.update(zip(self.numbers, self._own(operands), strict=True))
            chain.begin(self._place())
            return self._near([chain.arrays[i] for i in self.numbers])

        self._take_back(self.run(calls, self._operands(), self._operand_specs(), self._near(self._specs)))

    def finish(self) -> dict[int, Any]:
        """The arrays with their new values."""

        def calls(chain: LoopChain, *operands: Any) -> list[Any]:
            chain.arrays.update(zip(self.numbers, self._own(operands), strict=True))
            chain.finish()
            return self._returned([chain.arrays[i] for i in self.numbers])

        specs = self._operand_specs()
        self._take_back(self.run(calls, self._operands(), specs, specs), all_of_them=True)
        return dict(zip(self.numbers, self.arrays, strict=True))


class _Shards:
    """What `evaluate` reads of an update inside of a `shard_map`."""

    def __init__(self, jaxpr: core.Jaxpr, known: dict[Any, Any]) -> None:
        self.jaxpr = jaxpr
        self._known = known

    def value(self, var: Any) -> Any:
        return var.val if isinstance(var, core.Literal) else self._known[var]


def _cut(
    evaluation: Demand,
    group: Group,
    local: dict[int, Any],
    specs: set[PartitionSpec],
    num_updates: int,
    piece_bytes: int,
) -> list[Piece]:
    """Pieces of every device's shard, or one that is whole where the update is not elementwise."""
    group.tails = tails_of(evaluation, group, num_updates)
    shards = [local[i] for i in group.state]
    units = {x.unit_bytes // x.dtype.itemsize if is_on_disk(x) else None for x in shards}
    alike = len(specs) == len(units) == len({x.shape for x in shards}) == 1
    if not alike or not is_elementwise(evaluation, group, num_updates):
        return [Piece(group, 0, shards[0].shape[0], whole=True)]
    group.shape, rows = cut_of(shards, piece_bytes)
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
    spec = {id(group): chain.specs(group.state)[0] for group in groups}
    reads = {(id(group), var): None for group in groups for var in _read_by(evaluation, group)}  # in order
    given = [PartitionSpec() if var.aval.shape == () else spec[group] for group, var in reads]
    values = [evaluation.value(var) for _, var in reads]
    pushed = {num_updates + i for i in chain.numbers}
    kept = [(group, o) for group in groups for o in group.outputs if o not in pushed]

    def calls(device_chain: LoopChain, *shards: Any) -> list[Any]:
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

    def read(device_chain: LoopChain) -> list[Any]:
        device_chain.pull(piece)
        device_chain.call()
        return device_chain.call(take=piece)

    taken = dict(zip(group.state, chain.run(read, results=chain.specs(group.state)), strict=True))
    made = dict(zip(group.outputs, evaluate(evaluation, piece, taken, alone=False), strict=True))
    pushed = [o for o in group.outputs if o - num_updates in chain.numbers]

    def write(device_chain: LoopChain, *shards: Any) -> list[Any]:
        for output, shard in zip(pushed, shards, strict=True):
            device_chain.push(output - num_updates, piece, shard)
        return []

    specs = chain.specs([o - num_updates for o in pushed])
    chain.run(write, [jnp.asarray(made[o]) for o in pushed], specs)
    for output, value in made.items():
        if output not in pushed:
            outputs[output] = with_tail(evaluation, value, group.tails.get(output, ()))


def why_no_shards(shardings: Sequence[Any]) -> str | None:
    """What keeps the devices of a mesh from updating their shards, and the remedy; None where nothing does."""
    if _compat.on_several_devices():
        return (
            "`update` must be called outside of jax.shard_map where the state is divided, got a call inside of one; it "
            "makes its own"
        )
    if not all(map(disk_shards.divided, shardings)):
        return (
            "`state` must be of one mesh, got some arrays that are not divided; place all parameters on the mesh with "
            "jax.device_put(params, NamedSharding(mesh, spec)) before init"
        )
    if others := [at for at in shardings if not isinstance(at, NamedSharding)]:
        return (
            f"`state` must have a NamedSharding, got {type(others[0]).__name__}; place parameters with "
            "jax.device_put(params, NamedSharding(mesh, spec)) before init"
        )
    return disk_shards.why_not_one_mesh(shardings)
