"""An optimizer's update evaluated piece by piece, while other pieces of its state travel between host and device.

`state/stream/chain.py` has the calls that copy. Here the update's jaxpr is cut into groups: the arrays of state that
are needed together (Adam's two moments of one parameter). A group whose update is elementwise is cut further, along its
first axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from dejax.offload._evaluation import ELEMENTWISE, Demand
from dejax.offload.state.store import DiskArray, is_on_disk
from dejax.offload.state.stream.chain import Chain, Group, Piece, staging_of
from dejax.offload.state.stream.loop_chain import LoopChain

# 32 MiB take 0.65 ms over the bus: much longer than the launch of a piece, much shorter than a step.
PIECE_BYTES = 32 << 20


def stream_state(
    evaluation: Demand,
    state: Sequence[Any],
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
        streamed: which of them travel.
        num_updates: number of outputs before the state's new values.
        outputs: one place for each output, filled in here.
        piece_bytes: see `optimizer`.
        ahead: see `optimizer`.
    """
    jaxpr = evaluation.jaxpr
    groups = groups_of(jaxpr, [i for i, yes in enumerate(streamed) if yes], num_updates, len(state))
    pieces = [piece for group in groups for piece in _cut(evaluation, group, state, num_updates, piece_bytes)]
    arrays = {i: state[i] for group in groups for i in group.state}
    kind = LoopChain if any(map(is_on_disk, arrays.values())) else Chain
    chain = kind(arrays, staging_bytes=staging_of(pieces, state, ahead))
    parts: dict[int, list[Any]] = {}
    chain.begin()
    for piece, taken in chain.taken(pieces, ahead):
        values = evaluate(evaluation, piece, taken, alone=len(groups) == 1)
        for output, value in zip(piece.group.outputs, values, strict=True):
            if output >= num_updates and output - num_updates in arrays:
                chain.push(output - num_updates, piece, value)
            else:
                parts.setdefault(output, []).append(chain.wait_for(value))
    chain.finish()
    for group in groups:
        for output in group.outputs:
            if output in parts:
                whole = joined(parts[output], jaxpr.outvars[output].aval.shape)
                outputs[output] = with_tail(evaluation, whole, group.tails.get(output, ()))
    for i, array in chain.arrays.items():
        outputs[num_updates + i] = array


def groups_of(jaxpr: core.Jaxpr, streamed: list[int], num_updates: int, num_state: int) -> list[Group]:
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
    groups: dict[int, Group] = {}
    for i in streamed:
        groups.setdefault(root(i), Group([], [])).state.append(i)
    for output, need in wanted.items():
        groups[root(min(need))].outputs.append(output)
    return list(groups.values())


def _cut(evaluation: Demand, group: Group, state: Sequence[Any], num_updates: int, piece_bytes: int) -> list[Piece]:
    group.tails = tails_of(evaluation, group, num_updates)
    group.shape, rows = cut_of([state[i] for i in group.state], piece_bytes)
    length = group.shape[0]
    if rows >= length or not is_elementwise(evaluation, group, num_updates):
        return [Piece(group, 0, length, whole=True)]
    return [Piece(group, at, min(length, at + rows), whole=False) for at in range(0, length, rows)]


def tails_of(evaluation: Demand, group: Group, num_updates: int) -> dict[int, list[Any]]:
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


def is_elementwise(evaluation: Demand, group: Group, num_updates: int) -> bool:
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


def evaluate(evaluation: Demand, piece: Piece, taken: dict[int, Any], alone: bool) -> list[Any]:
    """A piece of each of the group's outputs, updates without their tails.

    Args:
        alone: there is no other group. A scalar is then copied for each piece: XLA replaces a division by a scalar with
            a single use by a product with its reciprocal, which rounds differently.
    """
    jaxpr, group = evaluation.jaxpr, piece.group
    tails = [group.tails.get(output) for output in group.outputs]
    roots = [wide_of(tail[0]) if tail else jaxpr.outvars[o] for o, tail in zip(group.outputs, tails, strict=True)]
    if piece.whole:
        for i, value in taken.items():
            evaluation.give(jaxpr.invars[i], value, False)
        return [evaluation.value(root) for root in roots]
    known = {jaxpr.invars[i]: value for i, value in taken.items()}
    shape = (piece.end - piece.begin, *group.shape[1:])

    def read(var: Any) -> Any:
        if not isinstance(var, core.Literal) and var in known:
            return known[var]
        value = evaluation.value(var)
        if var.aval.shape == ():
            if alone and not isinstance(var, core.Literal):
                value = known[var] = jax.lax.optimization_barrier(value)
            return value
        known[var] = jax.lax.slice_in_dim(value.reshape(group.shape), piece.begin, piece.end)
        return known[var]

    for eqn in group.equations:
        known[eqn.outvars[0]] = eqn.primitive.bind(*map(read, eqn.invars), **eqn.params)
    return [jnp.broadcast_to(read(var), shape) for var in roots]


def wide_of(eqn: Any) -> Any:
    return next(v for v in eqn.invars if not isinstance(v, core.Literal) and v.aval.shape == eqn.outvars[0].aval.shape)


def joined(parts: list[Any], shape: tuple[int, ...]) -> Any:
    """The array of an output's pieces."""
    return (parts[0] if len(parts) == 1 else jnp.concatenate(parts)).reshape(shape)


def with_tail(evaluation: Demand, value: Any, tail: Sequence[Any]) -> Any:
    """An update after its last equations."""
    for eqn in tail:
        wide = wide_of(eqn)
        value = eqn.primitive.bind(*(value if v is wide else evaluation.value(v) for v in eqn.invars), **eqn.params)
    return value
