"""How an optimizer's update is cut: into groups of arrays that are needed together, and those into pieces.

A group is, for example, Adam's two moments of one parameter. One whose update is elementwise is cut further, along its
first axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.extend import core

from dejax.offload._evaluation import ELEMENTWISE, Demand
from dejax.offload.state.store import DiskArray, is_on_disk
from dejax.offload.state.stream.chain import staging_bytes

# 32 MiB take 0.65 ms over the bus: much longer than the launch of a piece, much shorter than a step.
PIECE_BYTES = 32 << 20


@dataclass(slots=True)
class StateGroup:
    """Arrays of state that are needed together.

    Attributes:
        state: their numbers.
        outputs: numbers of the update's outputs that depend on them.
        equations: the elementwise equations that compute these outputs; unused where the group is one piece.
        tails: for outputs that are updates: the last equations, which are evaluated for all pieces at once.
        shape: of its arrays as they are cut, along the first axis.
    """

    state: list[int]
    outputs: list[int]
    equations: list[Any] = field(default_factory=list)
    tails: dict[int, list[Any]] = field(default_factory=dict)
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StatePiece:
    """Rows `begin` to `end` of a group's arrays, or all of them (`whole`)."""

    group: StateGroup
    begin: int
    end: int
    whole: bool

    def span(self, array: Any) -> tuple[int, int]:
        """Offset and size in bytes of the piece of one of the group's arrays."""
        itemsize = np.dtype(array.dtype).itemsize
        if self.whole:
            return 0, array.size * itemsize
        row = int(np.prod(self.group.shape[1:], dtype=np.int64)) * itemsize
        return self.begin * row, (self.end - self.begin) * row


def staging_of(pieces: Sequence[StatePiece], arrays: Any, ahead: int) -> int:
    """`staging_bytes` for calls that have a piece each; `arrays`: by the numbers that the pieces' groups have."""
    largest = max(([piece.span(arrays[i])[1] for i in piece.group.state] for piece in pieces), key=sum)
    return staging_bytes(largest, ahead, len(pieces))


def groups_of(jaxpr: core.Jaxpr, streamed: list[int], num_updates: int, num_state: int) -> list[StateGroup]:
    needs: dict[Any, frozenset[int]] = {jaxpr.invars[i]: frozenset((i,)) for i in streamed}
    for eqn in jaxpr.eqns:
        found = frozenset().union(*(needs.get(v, frozenset()) for v in eqn.invars if not isinstance(v, core.Literal)))
        needs.update(dict.fromkeys(eqn.outvars, found))
    owner = {i: i for i in streamed}

    def root(i: int) -> int:
        while owner[i] != i:
            i = owner[i]
        return i

    wanted: dict[int, frozenset[int]] = {}
    for output, var in enumerate(jaxpr.outvars):
        need = frozenset() if isinstance(var, core.Literal) else needs.get(var, frozenset())
        at = output - num_updates
        if 0 <= at < num_state and at in owner:
            need |= {at}  # the new value overwrites the old one
        if need:
            wanted[output] = need
            first, *rest = sorted(root(i) for i in need)
            for other in rest:
                owner[root(other)] = root(first)
    groups: dict[int, StateGroup] = {}
    for i in streamed:
        groups.setdefault(root(i), StateGroup([], [])).state.append(i)
    for output, need in wanted.items():
        groups[root(min(need))].outputs.append(output)
    return list(groups.values())


def pieces_of(
    evaluation: Demand, group: StateGroup, shards: Sequence[Any], alike: bool, num_updates: int, piece_bytes: int
) -> list[StatePiece]:
    """Pieces of a group's arrays on each device, or one that is whole where the update is not elementwise.

    Args:
        evaluation: of the update.
        group: its equations are filled in here.
        shards: its arrays, as one device has them.
        alike: a mesh divides all of them alike.
        num_updates: number of the update's outputs before the state's new values.
        piece_bytes: the largest piece of one array.
    """
    group.tails = tails_of(evaluation, group, num_updates)
    units = {x.unit_bytes // x.dtype.itemsize if is_on_disk(x) else None for x in shards}
    alike &= len(units) == len({x.shape for x in shards}) == 1
    if not alike or not is_elementwise(evaluation, group, num_updates):
        return [StatePiece(group, 0, shards[0].shape[0], whole=True)]
    group.shape, rows = cut_of(shards, piece_bytes)
    length = group.shape[0]
    return [StatePiece(group, at, min(length, at + rows), whole=False) for at in range(0, length, rows)]


def tails_of(evaluation: Demand, group: StateGroup, num_updates: int) -> dict[int, list[Any]]:
    return {o: tail_of(evaluation, evaluation.jaxpr.outvars[o]) for o in group.outputs if o < num_updates}


def cut_of(arrays: Sequence[Any], piece_bytes: int) -> tuple[tuple[int, ...], int]:
    """The shape in which a group of arrays of one shape is cut, and rows of a piece."""
    if is_on_disk(arrays[0]):
        return shape_on_disk(arrays)
    shape = arrays[0].shape
    itemsize = max(np.dtype(x.dtype).itemsize for x in arrays)
    row = int(np.prod(shape[1:], dtype=np.int64)) * itemsize
    if row <= piece_bytes:
        return shape, max(1, piece_bytes // row)
    return (int(np.prod(shape, dtype=np.int64)),), max(1, piece_bytes // itemsize)


def unit_of(shape: tuple[int, ...], dtype: Any, piece_bytes: int) -> int:
    """Bytes of a piece of an array on disk: equally many elements of each dtype, as the moments of a parameter need."""
    row = max(1, int(np.prod(shape[1:], dtype=np.int64)))
    elements = max(1, piece_bytes // 4)
    return (elements // row * row or elements) * np.dtype(dtype).itemsize


def shape_on_disk(arrays: Sequence[DiskArray]) -> tuple[tuple[int, ...], int]:
    """The shape in which a group on disk is cut, and rows of a piece: as its files are, or all rows."""
    elements = {x.unit_bytes // x.dtype.itemsize for x in arrays}
    shape, size = arrays[0].shape, arrays[0].size
    row = size // shape[0]
    if len(elements) > 1:
        return shape, shape[0]
    (count,) = elements
    return (shape, count // row) if count % row == 0 else ((size,), count)


def tail_of(evaluation: Demand, root: Any) -> list[Any]:
    """The last equations of an update, elementwise, each of one array and scalars.

    An update is added to its parameter. XLA rounds a product and the following sum once where one kernel computes both.
    To keep that, products with a scalar wait until the pieces are joined.
    """
    shape, tail = root.aval.shape, []
    while (eqn := evaluation.producer.get(root)) is not None and eqn.primitive.name in ELEMENTWISE:
        wide = [v for v in eqn.invars if not isinstance(v, core.Literal) and v.aval.shape == shape]
        if len(wide) != 1 or len(eqn.outvars) != 1:
            break
        tail.append(eqn)
        root = wide[0]
    return tail[::-1]


def is_elementwise(evaluation: Demand, group: StateGroup, num_updates: int) -> bool:
    """Whether a group's outputs are elementwise in arrays of one shape; fills in its equations."""
    jaxpr = evaluation.jaxpr
    shape = jaxpr.invars[group.state[0]].aval.shape
    inputs = {jaxpr.invars[i] for i in group.state}
    if any(var.aval.shape != shape for var in inputs):
        return False
    if any(getattr(jaxpr.outvars[o].aval, "shape", None) != shape for o in group.outputs):
        return False
    depends: dict[Any, bool] = {}  # variables seen, and whether they depend on the group's state
    for output in group.outputs:
        root = jaxpr.outvars[output]
        if tail := group.tails.get(output):
            root = wide_of(tail[0])
        if output < num_updates:
            eqn = evaluation.producer.get(root)
            if eqn is not None and eqn.primitive.name == "mul":
                return False  # of two arrays
        if not _walk(evaluation, root, shape, inputs, depends, group.equations):
            return False
    return True


def _walk(
    evaluation: Demand, root: Any, shape: tuple[int, ...], inputs: set[Any], depends: dict[Any, bool], found: list[Any]
) -> bool:
    """Adds the equations between `inputs` and `root`; False where one of them is not elementwise."""
    stack = [(root, False)]
    while stack:
        var, done = stack.pop()
        if isinstance(var, core.Literal) or (var in depends and not done):
            continue
        eqn = evaluation.producer.get(var)
        if eqn is None:
            depends[var] = var in inputs
            continue
        if not done:
            depends[var] = False
            stack.append((var, True))
            stack.extend((v, False) for v in eqn.invars)
            continue
        depends[var] = any(depends[v] for v in eqn.invars if not isinstance(v, core.Literal))
        if (
            eqn.primitive.name in ELEMENTWISE
            and len(eqn.outvars) == 1
            and var.aval.shape == shape
            and all(v.aval.shape in (shape, ()) for v in eqn.invars)
        ):
            found.append(eqn)
        elif depends[var]:
            return False
    return True


def read_by(evaluation: Demand, group: StateGroup) -> list[Any]:
    """The variables that a group's equations read, but for its state."""
    jaxpr = evaluation.jaxpr
    tails = {output: group.tails.get(output) for output in group.outputs}
    roots = [wide_of(tail[0]) if tail else jaxpr.outvars[output] for output, tail in tails.items()]
    own = {jaxpr.invars[i] for i in group.state} | {eqn.outvars[0] for eqn in group.equations}
    read = [var for eqn in group.equations for var in eqn.invars]
    variables = (var for var in (*read, *roots) if not isinstance(var, core.Literal))
    return [var for var in dict.fromkeys(variables) if var not in own]


def wide_of(eqn: Any) -> Any:
    return next(v for v in eqn.invars if not isinstance(v, core.Literal) and v.aval.shape == eqn.outvars[0].aval.shape)
