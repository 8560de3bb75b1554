"""An optimizer's update evaluated piece by piece, while other pieces of its state travel between host and device.

`cut.py` cuts the update. Where a mesh divides the state, each device updates its own shards. What is elementwise is cut
into pieces there. What is not (Adafactor's means of rows) is read whole, shard by shard, and XLA divides its
computation among the devices, as it does without offload.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend import core
from jax.sharding import PartitionSpec

from dejax.offload.state.meshes import divided, why_no_shards
from dejax.offload.state.stream.calls import (
    ArrayPiece,
    Stream,
    StreamUse,
    shapes_of_shards,
    staging_bytes,
)
from dejax.offload.state.stream.cut import StateGroup, StatePiece, StateUpdate, groups_of, pieces_of, read_by, wide_of

_USE = StreamUse(
    feature="offload.optimizer",
    scope="offload_pieces",
    several="offload.optimizer: `state` must come from this transformation's init, called outside of jax.jit, if it "
    "lies on several devices and dejax copies it, got one that it has not seen; call init on the parameters before the "
    "first update, and restore the state into what it makes, or give streams=False",
    sharded=1,
)


def stream_state(
    update: StateUpdate, shardings: Sequence[Any], streamed: Sequence[bool], piece_bytes: int, ahead: int
) -> None:
    """Computes the outputs that depend on streamed state, and the state's new values, into `update.outputs`.

    Args:
        update: with every input but the streamed ones.
        shardings: the shardings of the state's arrays; None, or of one device, where they are on one device.
        streamed: which of them travel.
        piece_bytes: see `optimizer`.
        ahead: see `optimizer`.

    Raises:
        ValueError: some arrays that travel are on several devices, and not all are on one mesh.
    """
    numbers = [i for i, yes in enumerate(streamed) if yes]
    arrays, where = [update.state[i] for i in numbers], [shardings[i] for i in numbers]
    several = any(map(divided, where))
    if several and (why := why_no_shards("`update`", arrays, where)):
        raise ValueError(f"offload.optimizer: {why}")
    at = {number: position for position, number in enumerate(numbers)}
    shards = shapes_of_shards(arrays, where)
    elementwise: list[StatePiece] = []
    others: list[StatePiece] = []
    groups = groups_of(update, numbers)
    for group in groups:
        alike = not several or len({where[at[i]].spec for i in group.state}) == 1
        pieces = pieces_of(update, group, [shards[at[i]] for i in group.state], alike, piece_bytes)
        (others if pieces[0].whole else elementwise).extend(pieces)
    stream = StatePieces(dict(zip(numbers, arrays, strict=True)), where, [*elementwise, *others], ahead)
    if elementwise:
        _update_in_pieces(update, elementwise, stream, alone=len(groups) == 1)
    for piece in others:
        _update_whole(update, piece, stream)
    for i, array in stream.finish_all().items():
        update.outputs[update.num_updates + i] = array


class StatePieces(Stream):
    """The calls of one update, in the order in which they are made.

    Args:
        arrays: the arrays, by their numbers in the state.
        shardings: the sharding of each array.
        pieces: the pieces that travel, in the order in which they are taken.
        ahead: number of pieces that are copied to the device before they are needed.
    """

    def __init__(
        self, arrays: dict[int, Any], shardings: Sequence[Any], pieces: Sequence[StatePiece], ahead: int
    ) -> None:
        self._at = {number: position for position, number in enumerate(arrays)}
        held = list(arrays.values())
        shards = shapes_of_shards(held, shardings)
        self._parts = [[piece.of(self._at[i], shards[self._at[i]]) for i in piece.group.state] for piece in pieces]
        largest = max(([part.nbytes for part in parts] for parts in self._parts), key=sum)
        super().__init__(_USE, held, shardings, staging_bytes(largest, ahead, len(pieces)))
        self._pieces = pieces
        self._ahead = ahead
        self._taken = 0
        self._pulls: list[ArrayPiece] = []
        self._pushes: list[tuple[ArrayPiece, Any]] = []
        self._after: list[Any] = []
        self._ticket = self.begin()

    def specs_of(self, numbers: Sequence[int]) -> list[PartitionSpec]:
        return [self.specs[self._at[i]] for i in numbers]

    def travels(self, number: int | None) -> bool:
        return number in self._at

    def evaluate(
        self,
        fn: Callable[..., list[Any]],
        values: Sequence[Any] = (),
        given: Sequence[PartitionSpec] = (),
        results: Sequence[PartitionSpec] = (),
    ) -> list[Any]:
        """Evaluates `fn(*shards of values)` on every device, which may take, push and wait; returns its results.

        Args:
            fn: a function that returns a list of arrays.
            values: divided as `given` says.
            given: shardings of the values.
            results: shardings of the results.
        """

        def calls(ticket: Array, *shards: Any) -> tuple[Array, list[Any]]:
            self._ticket = ticket
            made = fn(*shards)
            if self.mesh is not None:  # what is pushed is a value of this body
                self._flush()
            return self._ticket, made

        self._ticket, made = self.run(calls, self._ticket, values, given, results)
        return made

    def take(self) -> dict[int, Any]:
        """The arrays of the next piece by number, in `evaluate`; the `ahead` pieces after it are being copied."""
        if self._taken == 0:
            self._pulls += [part for parts in self._parts[: self._ahead] for part in parts]
            self._next_call()
        at = self._taken
        self._taken += 1
        self._pulls += [part for parts in self._parts[at + self._ahead : at + self._ahead + 1] for part in parts]
        return dict(zip(self._pieces[at].group.state, self._next_call(self._parts[at]), strict=True))

    def push(self, number: int, piece: StatePiece, value: Any) -> None:
        """Has the next call begin to copy a piece of an array's new value to the host; in `evaluate`."""
        k = self._at[number]
        self._pushes.append((piece.of(k, self.shards[k]), value))

    def wait_for(self, value: Any) -> Any:
        """Has `value` computed before the next call, in `evaluate`. XLA might otherwise keep its operands."""
        value = jax.lax.optimization_barrier(value)
        self._after.append(value)
        return value

    def finish_all(self) -> dict[int, Any]:
        """The arrays with their new values, by number; those on disk have the tickets of their next version."""
        self._flush()
        return dict(zip(self._at, self.finish(self._ticket), strict=True))

    def shape(self, number: int) -> tuple[int, ...]:
        """The shape of an array as one device has it."""
        return tuple(self.shards[self._at[number]].shape)

    def _flush(self) -> None:
        """Makes a call that begins the copies that the next call would begin."""
        if self._pulls or self._pushes or self._after:
            self._next_call()

    def _next_call(self, take: Sequence[ArrayPiece] = ()) -> list[Any]:
        """Makes the next call; returns the arrays of the pieces to take, which were pulled `ahead` calls before."""
        pulls, pushes, after = self._pulls, self._pushes, self._after
        self._pulls, self._pushes, self._after = [], [], []
        self._ticket, values = self.call(
            self._ticket,
            take=take,
            pull=pulls,
            push=[part for part, _ in pushes],
            values=[value for _, value in pushes],
            after=after,
        )
        return values


def _update_in_pieces(update: StateUpdate, pieces: Sequence[StatePiece], stream: StatePieces, alone: bool) -> None:
    """Updates the elementwise groups piece by piece, each device its own part.

    Args:
        update: the update of the state.
        pieces: the next ones of the stream.
        stream: the stream of the state.
        alone: there is no other group.
    """
    groups = list(dict.fromkeys(piece.group for piece in pieces))
    spec = {group: stream.specs_of(group.state)[0] for group in groups}
    reads = [(group, var) for group in groups for var in read_by(update, group)]
    given = [PartitionSpec() if var.aval.shape == () else spec[group] for group, var in reads]
    values = [update.value(var) for _, var in reads]
    kept = [(group, o) for group in groups for o in group.roots if not stream.travels(update.state_of(o))]

    def fn(*shards: Any) -> list[Any]:
        known: dict[StateGroup, dict[Any, Any]] = {group: {} for group in groups}
        for (group, var), shard in zip(reads, shards, strict=True):
            known[group][var] = shard
        parts: dict[int, list[Any]] = {o: [] for _, o in kept}
        for piece in pieces:
            made = _evaluated(update.jaxpr, piece, stream.take(), known[piece.group], alone)
            for output, value in zip(piece.group.roots, made, strict=True):
                if output in parts:
                    parts[output].append(stream.wait_for(value))
                else:
                    stream.push(output - update.num_updates, piece, value)
        return [_joined(parts[o], stream.shape(group.state[0])) for group, o in kept]

    made = stream.evaluate(fn, values, given, [spec[group] for group, _ in kept])
    for (group, output), value in zip(kept, made, strict=True):
        update.outputs[output] = _with_tail(update, value, group.tails[output])


def _evaluated(
    jaxpr: core.Jaxpr, piece: StatePiece, taken: dict[int, Any], given: dict[Any, Any], alone: bool
) -> list[Any]:
    """Computes a piece of each output of the group; updates are without their tails.

    Args:
        jaxpr: the jaxpr of the update.
        piece: a piece of an elementwise group.
        taken: its arrays of state.
        given: what else the group's equations read: scalars and whole arrays.
        alone: there is no other group. A scalar is then copied for each piece: XLA replaces a division by a scalar with
            a single use by a product with its reciprocal, which rounds differently.
    """
    group, known = piece.group, {jaxpr.invars[i]: value for i, value in taken.items()}

    def read(var: Any) -> Any:
        if isinstance(var, core.Literal):
            return var.val
        if var not in known:
            value = given[var]
            if var.aval.shape != ():
                value = jax.lax.slice_in_dim(value.reshape(group.shape), piece.begin, piece.end)
            elif alone:
                value = jax.lax.optimization_barrier(value)
            known[var] = value
        return known[var]

    for eqn in group.equations:
        known[eqn.outvars[0]] = eqn.primitive.bind(*map(read, eqn.invars), **eqn.params)
    shape = (piece.end - piece.begin, *group.shape[1:])
    return [jnp.broadcast_to(read(var), shape) for var in group.roots.values()]


def _update_whole(update: StateUpdate, piece: StatePiece, stream: StatePieces) -> None:
    """Updates from the next piece of the stream, which has whole arrays; XLA divides the computation."""
    group = piece.group

    def read() -> list[Any]:
        return list(stream.take().values())

    for i, value in zip(group.state, stream.evaluate(read, results=stream.specs_of(group.state)), strict=True):
        update.give(update.jaxpr.invars[i], value, False)
    made = {o: update.value(root) for o, root in group.roots.items()}
    pushed = {o: o - update.num_updates for o in made if stream.travels(update.state_of(o))}

    def write(*shards: Any) -> list[Any]:
        for number, shard in zip(pushed.values(), shards, strict=True):
            stream.push(number, piece, shard)
        if stream.mesh is None:  # on several devices XLA orders the updates
            made.update((o, stream.wait_for(made[o])) for o in made if o not in pushed)
        return []

    stream.evaluate(write, [jnp.asarray(made[o]) for o in pushed], stream.specs_of(list(pushed.values())))
    for output, value in made.items():
        if output not in pushed:
            update.outputs[output] = _with_tail(update, value, group.tails[output])


def _joined(parts: list[Any], shape: tuple[int, ...]) -> Any:
    """Joins the pieces of an output to one array."""
    return (parts[0] if len(parts) == 1 else jnp.concatenate(parts)).reshape(shape)


def _with_tail(update: StateUpdate, value: Any, tail: Sequence[Any]) -> Any:
    """Applies the last equations of an update, its tail."""
    for eqn in tail:
        wide = wide_of(eqn)
        value = eqn.primitive.bind(*(value if v is wide else update.value(v) for v in eqn.invars), **eqn.params)
    return value
