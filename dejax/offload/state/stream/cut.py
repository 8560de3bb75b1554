"""How an optimizer's update is cut: into groups of arrays that are needed together, and those into pieces.

A group is, for example, Adam's two moments of one parameter. One whose update is elementwise is cut further, along its
first axis.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.extend import core

from dejax.offload._evaluation import ELEMENTWISE, Demand, is_elementwise
from dejax.offload.state.store import is_on_disk
from dejax.offload.state.stream.calls import ArrayPiece

# 32 MiB take 0.65 ms over the bus: much longer than the launch of a piece, much shorter than a step.
PIECE_BYTES = 32 << 20


class StateUpdate(Demand):
    """An optimizer's update, evaluated on demand: state, other arguments -> updates, new state.

    Args:
        closed: its jaxpr.
        state: the arrays of the state, the first arguments. They are given to the evaluation later.
        num_updates: number of the outputs before the state's new values.

    Attributes:
        outputs: one place for each output.
    """

    def __init__(self, closed: core.ClosedJaxpr, state: Sequence[Any], num_updates: int) -> None:
        super().__init__(closed)
        self.state = list(state)
        self.num_updates = num_updates
        self.outputs: list[Any] = [None] * len(closed.jaxpr.outvars)

    def state_of(self, output: int) -> int | None:
        """The number of the array of state whose new value an output is."""
        return output - self.num_updates if output >= self.num_updates else None

    def needs(self, numbers: Collection[int]) -> list[frozenset[int]]:
        """For each output: which of some arrays of state it depends on."""
        found: dict[Any, frozenset[int]] = {self.jaxpr.invars[i]: frozenset((i,)) for i in numbers}

        def need(var: Any) -> frozenset[int]:
            return frozenset() if isinstance(var, core.Literal) else found.get(var, frozenset())

        for eqn in self.jaxpr.eqns:
            found.update(dict.fromkeys(eqn.outvars, frozenset().union(*map(need, eqn.invars))))
        return list(map(need, self.jaxpr.outvars))


@dataclass(slots=True, eq=False)
class StateGroup:
    """Arrays of state that are needed together.

    Attributes:
        state: their numbers.
        roots: for each output of the update that depends on them: the variable that is evaluated in pieces.
        tails: for each of these outputs: the equations after its root, evaluated for all pieces at once.
        equations: the elementwise equations that compute the roots; unused where the group is one piece.
        shape: the shape in which its arrays are cut, along the first axis.
    """

    state: list[int]
    roots: dict[int, Any] = field(default_factory=dict)
    tails: dict[int, list[Any]] = field(default_factory=dict)
    equations: list[Any] = field(default_factory=list)
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StatePiece:
    """Rows `begin` to `end` of a group's arrays, or all of them (`whole`)."""

    group: StateGroup
    begin: int
    end: int
    whole: bool

    def of(self, number: int, shard: Any) -> ArrayPiece:
        """The piece of one of the group's arrays, which has this number in its stream."""
        if self.whole:
            return ArrayPiece(number, 0, tuple(shard.shape), shard.dtype)
        shape = (self.end - self.begin, *self.group.shape[1:])
        row = math.prod(self.group.shape[1:]) * np.dtype(shard.dtype).itemsize
        return ArrayPiece(number, self.begin * row, shape, shard.dtype)


def groups_of(update: StateUpdate, streamed: Sequence[int]) -> list[StateGroup]:
    """The groups of the arrays that travel."""
    owner = {i: i for i in streamed}

    def root(i: int) -> int:
        while owner[i] != i:
            i = owner[i]
        return i

    wanted: dict[int, frozenset[int]] = {}
    for output, need in enumerate(update.needs(streamed)):
        at = update.state_of(output)
        if at in owner:
            need |= {at}  # the new value overwrites the old one
        if need:
            wanted[output] = need
            first, *rest = sorted(root(i) for i in need)
            for other in rest:
                owner[root(other)] = root(first)
    groups: dict[int, StateGroup] = {}
    for i in streamed:
        groups.setdefault(root(i), StateGroup([])).state.append(i)
    for output, need in wanted.items():
        group, var = groups[root(min(need))], update.jaxpr.outvars[output]
        tail = _tail(update, var) if update.state_of(output) is None else []
        group.tails[output] = tail
        group.roots[output] = wide_of(tail[0]) if tail else var
    return list(groups.values())


def pieces_of(
    update: StateUpdate, group: StateGroup, shards: Sequence[Any], alike: bool, piece_bytes: int
) -> list[StatePiece]:
    """Pieces of a group's arrays on each device, or one that is whole where the update is not elementwise.

    Args:
        update: the update of the whole state.
        group: its equations are filled in here.
        shards: its arrays, as one device has them.
        alike: a mesh divides all of them alike.
        piece_bytes: the largest piece of one array.
    """
    units = {x.unit_bytes // x.dtype.itemsize if is_on_disk(x) else None for x in shards}
    alike &= len(units) == len({x.shape for x in shards}) == 1
    if not alike or not _fill_equations(update, group):
        return [StatePiece(group, 0, shards[0].shape[0], whole=True)]
    (unit,) = units
    group.shape, rows = _cut(shards, piece_bytes) if unit is None else _cut_on_disk(shards[0].shape, unit)
    length = group.shape[0]
    return [StatePiece(group, at, min(length, at + rows), whole=False) for at in range(0, length, rows)]


def _cut(arrays: Sequence[Any], piece_bytes: int) -> tuple[tuple[int, ...], int]:
    """The shape in which a group of arrays of one shape is cut, and rows of a piece."""
    shape = arrays[0].shape
    itemsize = max(np.dtype(x.dtype).itemsize for x in arrays)
    row = math.prod(shape[1:]) * itemsize
    if row <= piece_bytes:
        return shape, max(1, piece_bytes // row)
    return (math.prod(shape),), max(1, piece_bytes // itemsize)


def _cut_on_disk(shape: tuple[int, ...], unit: int) -> tuple[tuple[int, ...], int]:
    """The shape and the rows of a piece, like `_cut`, for arrays on disk, whose pieces are units of the files."""
    row = math.prod(shape[1:])
    return (shape, unit // row) if unit % row == 0 else ((math.prod(shape),), unit)


def unit_of(shape: tuple[int, ...], dtype: Any, piece_bytes: int) -> int:
    """Bytes of a piece of an array on disk. Pieces of all dtypes have as many elements, since moments go together."""
    row = max(1, math.prod(shape[1:]))
    elements = max(1, piece_bytes // 4)
    return (elements // row * row or elements) * np.dtype(dtype).itemsize


def _tail(update: StateUpdate, root: Any) -> list[Any]:
    """The last equations of an update, elementwise, each of one array and scalars.

    An update is added to its parameter. XLA rounds a product and the following sum once where one kernel computes both.
    To keep that, products with a scalar wait until the pieces are joined.
    """
    shape, tail = root.aval.shape, []
    while (eqn := update.producer.get(root)) is not None and eqn.primitive.name in ELEMENTWISE:
        wide = [v for v in eqn.invars if not isinstance(v, core.Literal) and v.aval.shape == shape]
        if len(wide) != 1 or len(eqn.outvars) != 1:
            break
        tail.append(eqn)
        root = wide[0]
    return tail[::-1]


def _fill_equations(update: StateUpdate, group: StateGroup) -> bool:
    """Whether a group's outputs are elementwise in arrays of one shape; fills in its equations."""
    jaxpr = update.jaxpr
    shape = jaxpr.invars[group.state[0]].aval.shape
    inputs = {jaxpr.invars[i] for i in group.state}
    if any(
        getattr(var.aval, "shape", None) != shape for var in (*inputs, *map(jaxpr.outvars.__getitem__, group.roots))
    ):
        return False
    depends: dict[Any, bool] = {}  # variables seen, and whether they depend on the group's state
    for output, root in group.roots.items():
        if update.state_of(output) is None:
            eqn = update.producer.get(root)
            if eqn is not None and eqn.primitive.name == "mul":
                return False  # the equation has two arrays as operands
        scalars = [v for eqn in group.tails[output] for v in eqn.invars if v is not wide_of(eqn)]
        if not all(_walk(update, v, shape, inputs, {}, []) for v in scalars):
            return False  # it depends on the whole array, such as LAMB's ratio of norms
        if not _walk(update, root, shape, inputs, depends, group.equations):
            return False
    return True


def _walk(
    update: StateUpdate, root: Any, shape: tuple[int, ...], inputs: set[Any], depends: dict[Any, bool], found: list[Any]
) -> bool:
    """Adds the equations between `inputs` and `root`; False where one of them is not elementwise."""
    stack = [(root, False)]
    while stack:
        var, done = stack.pop()
        if isinstance(var, core.Literal) or (var in depends and not done):
            continue
        eqn = update.producer.get(var)
        if eqn is None:
            depends[var] = var in inputs
            continue
        if not done:
            depends[var] = False
            stack.append((var, True))
            stack.extend((v, False) for v in eqn.invars)
            continue
        depends[var] = any(depends[v] for v in eqn.invars if not isinstance(v, core.Literal))
        if is_elementwise(eqn, shape):
            found.append(eqn)
        elif depends[var]:
            return False
    return True


def read_by(update: StateUpdate, group: StateGroup) -> list[Any]:
    """The variables that a group's equations read, but for its state."""
    own = {update.jaxpr.invars[i] for i in group.state} | {eqn.outvars[0] for eqn in group.equations}
    read = [*(var for eqn in group.equations for var in eqn.invars), *group.roots.values()]
    variables = (var for var in read if not isinstance(var, core.Literal))
    return [var for var in dict.fromkeys(variables) if var not in own]


def wide_of(eqn: Any) -> Any:
    """The operand with the shape of the result, in an equation of a tail."""
    return next(v for v in eqn.invars if not isinstance(v, core.Literal) and v.aval.shape == eqn.outvars[0].aval.shape)
