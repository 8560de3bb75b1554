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
import numpy as np
from jax import Array
from jax.extend import core
from jax.sharding import PartitionSpec

from dejax.offload._evaluation import Demand
from dejax.offload.state import disk_shards
from dejax.offload.state.stream import devices
from dejax.offload.state.stream.chain import ChainUse, Spans
from dejax.offload.state.stream.cut import StatePiece, groups_of, pieces_of, read_by, staging_of, wide_of

_USE = ChainUse(
    feature="offload.optimizer",
    scope="offload_pieces",
    several="offload.optimizer: `state` must come from this transformation's init, called outside of jax.jit, if it "
    "lies on several devices and dejax copies it, got one that it has not seen; call init on the parameters before the "
    "first update, and restore the state into what it makes, or give streams=False",
    sharded=1,
)


def stream_state(
    evaluation: Demand,
    state: Sequence[Any],
    shardings: Sequence[Any],
    streamed: Sequence[bool],
    num_updates: int,
    outputs: list[Any],
    piece_bytes: int,
    ahead: int,
) -> None:
    """Computes the outputs that depend on streamed state, and the state's new values, into `outputs`.

    Args:
        evaluation: of the update, with every input but the streamed ones.
        state: the state's arrays, which are the update's first inputs.
        shardings: of them; None, or of one device, where they are on one device.
        streamed: which of them travel.
        num_updates: number of outputs before the state's new values.
        outputs: one place for each output, filled in here.
        piece_bytes: see `optimizer`.
        ahead: see `optimizer`.

    Raises:
        ValueError: some arrays that travel are on several devices, and not all are on one mesh.
    """
    groups = groups_of(evaluation.jaxpr, [i for i, yes in enumerate(streamed) if yes], num_updates, len(state))
    numbers = sorted(i for group in groups for i in group.state)
    arrays, where = [state[i] for i in numbers], [shardings[i] for i in numbers]
    several = any(map(disk_shards.divided, where))
    if several and (why := devices.why_no_shards("`update`", arrays, where)):
        raise ValueError(f"offload.optimizer: {why}")
    specs = dict(zip(numbers, [at.spec if several else None for at in where], strict=True))
    local = dict(zip(numbers, devices.shapes_of_shards(arrays, where), strict=True))
    elementwise: list[StatePiece] = []
    others: list[StatePiece] = []
    for group in groups:
        alike = len({specs[i] for i in group.state}) == 1
        shards = [local[i] for i in group.state]
        pieces = pieces_of(evaluation, group, shards, alike, num_updates, piece_bytes)
        (others if pieces[0].whole else elementwise).extend(pieces)
    stream = StatePieces(dict(zip(numbers, arrays, strict=True)), where, [*elementwise, *others], ahead)
    if elementwise:
        _update_in_pieces(evaluation, elementwise, stream, num_updates, outputs, alone=len(groups) == 1)
    for piece in others:
        _update_whole(evaluation, piece, stream, num_updates, outputs)
    for i, array in stream.finish_all().items():
        outputs[num_updates + i] = array


class StatePieces(devices.Stream):
    """The calls of one update, in the order in which they are made.

    Args:
        arrays: by their numbers.
        shardings: of each.
        pieces: that travel, in the order in which they are taken.
        ahead: number of pieces that are copied to the device before they are needed.
    """

    def __init__(
        self, arrays: dict[int, Any], shardings: Sequence[Any], pieces: Sequence[StatePiece], ahead: int
    ) -> None:
        self._at = {number: position for position, number in enumerate(arrays)}
        local = dict(zip(arrays, devices.shapes_of_shards(list(arrays.values()), shardings), strict=True))
        super().__init__(_USE, list(arrays.values()), shardings, staging_of(pieces, local, ahead))
        self._pieces = pieces
        self._ahead = ahead
        self._taken = 0
        self._pulls: list[tuple[int, int, int]] = []
        self._pushes: list[tuple[int, int, Any]] = []
        self._after: list[Any] = []
        self._ticket = self.begin()

    def specs(self, numbers: Sequence[int]) -> list[PartitionSpec]:
        return [self._specs[self._at[i]] for i in numbers]

    def has(self, number: int) -> bool:
        """Whether the array travels."""
        return number in self._at

    def run(
        self,
        calls: Callable[..., list[Any]],
        values: Sequence[Any] = (),
        given: Sequence[PartitionSpec] = (),
        results: Sequence[PartitionSpec] = (),
    ) -> list[Any]:
        """Evaluates `calls(*shards of values)` on every device, which may take, push and wait; returns its results.

        Args:
            calls: to a list of arrays.
            values: divided as `given` says.
            given: of the values.
            results: of the results.
        """

        def body(ticket: Array, *shards: Any) -> tuple[Array, list[Any]]:
            self._ticket = ticket
            made = calls(*shards)
            if self.mesh is not None:  # what is pushed is a value of this body
                self._flush()
            return self._ticket, made

        self._ticket, made = self._run(body, self._ticket, values, given, results)
        return made

    def take(self) -> dict[int, Any]:
        """In `run`: the arrays of the next piece by number, while the `ahead` pieces after it are copied."""
        if self._taken == 0:
            for piece in self._pieces[: self._ahead]:
                self._pull(piece)
            self._call()
        piece = self._pieces[self._taken]
        if self._taken + self._ahead < len(self._pieces):
            self._pull(self._pieces[self._taken + self._ahead])
        self._taken += 1
        return dict(zip(piece.group.state, self._call(take=piece), strict=True))

    def push(self, i: int, piece: StatePiece, value: Any) -> None:
        """In `run`: the next call begins to copy a piece of array i's new value to the host."""
        self._pushes.append((i, piece.span(self._shard(i))[0], value))

    def wait_for(self, value: Any) -> Any:
        """In `run`: `value`, computed before the next call. XLA might otherwise keep its operands until the end."""
        value = jax.lax.optimization_barrier(value)
        self._after.append(value)
        return value

    def finish_all(self) -> dict[int, Any]:
        """The arrays with their new values, by number; those on disk have the tickets of their next version."""
        self._flush()
        return dict(zip(self._at, self.finish(self._ticket), strict=True))

    def shape(self, i: int) -> tuple[int, ...]:
        """Of array i, as one device has it."""
        return tuple(self._shard(i).shape)

    def _shard(self, i: int) -> Any:
        return self._chain.arrays[self._at[i]]

    def _pull(self, piece: StatePiece) -> None:
        """The next call begins to copy the piece to the device."""
        self._pulls += [(i, *piece.span(self._shard(i))) for i in piece.group.state]

    def _flush(self) -> None:
        """Begins what the next call would begin."""
        if self._pulls or self._pushes or self._after:
            self._call()

    def _call(self, take: StatePiece | None = None) -> list[Any]:
        """Makes the next call; returns the arrays of the piece to take, which was pulled `ahead` calls before."""
        taken: list[tuple[int, int]] = []
        results = []
        for i in () if take is None else take.group.state:
            assert take is not None
            array = self._shard(i)
            taken.append((i, take.span(array)[0]))
            shape = array.shape if take.whole else (take.end - take.begin, *take.group.shape[1:])
            results.append(jax.ShapeDtypeStruct(shape, array.dtype))
        pulls, pushes, after = self._pulls, self._pushes, self._after
        self._pulls, self._pushes, self._after = [], [], []
        self._ticket, values = self._chain.loop(
            self._ticket,
            takes=self._spans(taken),
            results=results,
            pulls=self._spans([(i, offset) for i, offset, _ in pulls]),
            pull_bytes=[nbytes for *_, nbytes in pulls],
            pushes=self._spans([(i, offset) for i, offset, _ in pushes]),
            values=[value for *_, value in pushes],
            after=after,
        )
        return values

    def _spans(self, pieces: list[tuple[int, int]]) -> Spans:
        numbers = [self._at[i] for i, _ in pieces]
        return numbers, [offset for _, offset in pieces], np.zeros(len(pieces), np.int64).tolist()


def _update_in_pieces(
    evaluation: Demand,
    pieces: Sequence[StatePiece],
    stream: StatePieces,
    num_updates: int,
    outputs: list[Any],
    alone: bool,
) -> None:
    """Of elementwise groups: on each device alone.

    Args:
        evaluation: of the update.
        pieces: the next ones of the stream.
        stream: of the state.
        num_updates: number of outputs before the state's new values.
        outputs: filled in.
        alone: there is no other group.
    """
    jaxpr = evaluation.jaxpr
    groups = list({id(piece.group): piece.group for piece in pieces}.values())
    spec = {id(group): stream.specs(group.state)[0] for group in groups}
    reads = {(id(group), var): None for group in groups for var in read_by(evaluation, group)}  # in order
    given = [PartitionSpec() if var.aval.shape == () else spec[group] for group, var in reads]
    values = [evaluation.value(var) for _, var in reads]
    kept = [(group, o) for group in groups for o in group.outputs if not stream.has(o - num_updates)]

    def calls(*shards: Any) -> list[Any]:
        known: dict[int, dict[Any, Any]] = {id(group): {} for group in groups}
        for (group, var), shard in zip(reads, shards, strict=True):
            known[group][var] = shard
        parts: dict[int, list[Any]] = {o: [] for _, o in kept}
        for piece in pieces:
            made = _evaluated(jaxpr, piece, stream.take(), known[id(piece.group)], alone)
            for output, value in zip(piece.group.outputs, made, strict=True):
                if stream.has(output - num_updates):
                    stream.push(output - num_updates, piece, value)
                else:
                    parts[output].append(stream.wait_for(value))
        return [_joined(parts[o], stream.shape(group.state[0])) for group, o in kept]

    made = stream.run(calls, values, given, [spec[id(group)] for group, _ in kept])
    for (group, output), value in zip(kept, made, strict=True):
        outputs[output] = _with_tail(evaluation, value, group.tails.get(output, ()))


def _evaluated(
    jaxpr: core.Jaxpr, piece: StatePiece, taken: dict[int, Any], given: dict[Any, Any], alone: bool
) -> list[Any]:
    """A piece of each of the group's outputs, updates without their tails.

    Args:
        jaxpr: of the update.
        piece: of an elementwise group.
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
    tails = [group.tails.get(output) for output in group.outputs]
    roots = [wide_of(tail[0]) if tail else jaxpr.outvars[o] for o, tail in zip(group.outputs, tails, strict=True)]
    return [jnp.broadcast_to(read(var), (piece.end - piece.begin, *group.shape[1:])) for var in roots]


def _update_whole(
    evaluation: Demand, piece: StatePiece, stream: StatePieces, num_updates: int, outputs: list[Any]
) -> None:
    """Of the next piece of the stream, which is whole: XLA divides the computation."""
    jaxpr, group = evaluation.jaxpr, piece.group

    def read() -> list[Any]:
        return list(stream.take().values())

    for i, value in zip(group.state, stream.run(read, results=stream.specs(group.state)), strict=True):
        evaluation.give(jaxpr.invars[i], value, False)
    tails = {output: group.tails.get(output, []) for output in group.outputs}
    made = {o: evaluation.value(wide_of(tail[0]) if tail else jaxpr.outvars[o]) for o, tail in tails.items()}
    pushed = [o for o in group.outputs if stream.has(o - num_updates)]

    def write(*shards: Any) -> list[Any]:
        for output, shard in zip(pushed, shards, strict=True):
            stream.push(output - num_updates, piece, shard)
        if stream.mesh is None:  # on several devices XLA orders the updates
            made.update((o, stream.wait_for(made[o])) for o in made if o not in pushed)
        return []

    stream.run(write, [jnp.asarray(made[o]) for o in pushed], stream.specs([o - num_updates for o in pushed]))
    for output, value in made.items():
        if output not in pushed:
            outputs[output] = _with_tail(evaluation, value, tails[output])


def _joined(parts: list[Any], shape: tuple[int, ...]) -> Any:
    """The array of an output's pieces."""
    return (parts[0] if len(parts) == 1 else jnp.concatenate(parts)).reshape(shape)


def _with_tail(evaluation: Demand, value: Any, tail: Sequence[Any]) -> Any:
    """An update after its last equations."""
    for eqn in tail:
        wide = wide_of(eqn)
        value = eqn.primitive.bind(*(value if v is wide else evaluation.value(v) for v in eqn.invars), **eqn.params)
    return value
