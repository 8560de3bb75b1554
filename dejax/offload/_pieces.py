"""An optimizer's update evaluated piece by piece, while other pieces of its state travel between host and device.

`native/offload/pieces.h` says how the copies run. Here the update's jaxpr is cut into groups: the arrays of state that
are needed together (Adam's two moments of one parameter). A group whose update is elementwise is cut further, along its
first axis.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from dejax import _native
from dejax.offload._evaluation import ELEMENTWISE, Demand
from dejax.offload._state_store import DiskArray, is_on_disk

# 32 MiB take 0.65 ms over the bus: much longer than the launch of a piece, much shorter than a step.
PIECE_BYTES = 32 << 20
_BETWEEN, _BEGIN, _FINISH, _LOOP, _OPEN, _COMMIT = range(6)  # native/offload/pieces.h
_sites = itertools.count(1)
NO_LOOP = {
    "slot": np.int64(0),
    "pull_iterations": np.int64(0),
    **dict.fromkeys(("pull_stride", "push_stride", "take_array", "take_offset", "take_stride"), np.zeros(0, np.int64)),
}
"""Attributes of a call that is in no loop."""


def new_site() -> int:
    """The number of a program's chain of calls."""
    return next(_sites)


@dataclass(slots=True)
class Group:
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
class Piece:
    """Rows `begin` to `end` of a group's arrays, or all of them (`whole`)."""

    group: Group
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
    groups = _groups(jaxpr, [i for i, yes in enumerate(streamed) if yes], num_updates, len(state))
    pieces = [piece for group in groups for piece in _cut(evaluation, group, state, num_updates, piece_bytes)]
    arrays = {i: state[i] for group in groups for i in group.state}
    largest = max(sum(piece.span(state[i])[1] for i in piece.group.state) for piece in pieces)
    kind = _DiskChain if any(map(is_on_disk, arrays.values())) else _Chain
    chain = kind(arrays, staging_bytes=2 * (ahead + 1) * largest)
    parts: dict[int, list[Any]] = {}
    chain.begin()
    for piece in pieces[:ahead]:
        chain.pull(piece)
    chain.call()
    for number, piece in enumerate(pieces):
        if number + ahead < len(pieces):
            chain.pull(pieces[number + ahead])
        taken = dict(zip(piece.group.state, chain.call(take=piece), strict=True))
        values = _evaluate(evaluation, piece, taken, alone=len(groups) == 1)
        for output, value in zip(piece.group.outputs, values, strict=True):
            if output >= num_updates and output - num_updates in arrays:
                chain.push(output - num_updates, piece, value)
            else:
                parts.setdefault(output, []).append(chain.wait_for(value))
    chain.finish()
    for group in groups:
        for output in group.outputs:
            if output in parts:
                outputs[output] = _join(evaluation, parts[output], group.tails.get(output, ()), jaxpr.outvars[output])
    for i, array in chain.arrays.items():
        outputs[num_updates + i] = array


def _groups(jaxpr: core.Jaxpr, streamed: list[int], num_updates: int, num_state: int) -> list[Group]:
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
    shape = state[group.state[0]].shape
    itemsize = max(np.dtype(state[i].dtype).itemsize for i in group.state)
    row = int(np.prod(shape[1:], dtype=np.int64)) * itemsize
    group.tails = {o: _tail(evaluation, evaluation.jaxpr.outvars[o]) for o in group.outputs if o < num_updates}
    group.shape = shape if row <= piece_bytes else (int(np.prod(shape, dtype=np.int64)),)
    rows = max(1, piece_bytes // (row if row <= piece_bytes else itemsize))
    if is_on_disk(state[group.state[0]]):
        group.shape, rows = _shape_on_disk([state[i] for i in group.state])
    length = group.shape[0]
    if rows >= length or not _elementwise(evaluation, group, num_updates):
        return [Piece(group, 0, length, whole=True)]
    return [Piece(group, at, min(length, at + rows), whole=False) for at in range(0, length, rows)]


def unit_of(shape: tuple[int, ...], dtype: Any, piece_bytes: int) -> int:
    """Bytes of a piece of an array on disk: equally many elements of each dtype, as the moments of a parameter need."""
    row = max(1, int(np.prod(shape[1:], dtype=np.int64)))
    elements = max(1, piece_bytes // 4)
    return (elements // row * row or elements) * np.dtype(dtype).itemsize


def _shape_on_disk(arrays: Sequence[DiskArray]) -> tuple[tuple[int, ...], int]:
    """The shape in which a group on disk is cut, and rows of a piece: as its files are, or all rows."""
    elements = {x.unit_bytes // x.dtype.itemsize for x in arrays}
    shape, size = arrays[0].shape, arrays[0].size
    row = size // shape[0]
    if len(elements) > 1:
        return shape, shape[0]
    (count,) = elements
    return (shape, count // row) if count % row == 0 else ((size,), count)


def _tail(evaluation: Demand, root: Any) -> list[Any]:
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


def _elementwise(evaluation: Demand, group: Group, num_updates: int) -> bool:
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
            root = _wide(tail[0])
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


def _evaluate(evaluation: Demand, piece: Piece, taken: dict[int, Any], alone: bool) -> list[Any]:
    """A piece of each of the group's outputs, updates without their tails.

    Args:
        alone: there is no other group. A scalar is then copied for each piece: XLA replaces a division by a scalar with
            a single use by a product with its reciprocal, which rounds differently.
    """
    jaxpr, group = evaluation.jaxpr, piece.group
    tails = [group.tails.get(output) for output in group.outputs]
    roots = [_wide(tail[0]) if tail else jaxpr.outvars[o] for o, tail in zip(group.outputs, tails, strict=True)]
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


def _wide(eqn: Any) -> Any:
    return next(v for v in eqn.invars if not isinstance(v, core.Literal) and v.aval.shape == eqn.outvars[0].aval.shape)


def _join(evaluation: Demand, parts: list[Any], tail: Sequence[Any], var: Any) -> Any:
    if len(parts) == 1 and not tail:
        return parts[0].reshape(var.aval.shape)
    value = jnp.concatenate(parts).reshape(var.aval.shape)
    for eqn in tail:
        wide = _wide(eqn)
        value = eqn.primitive.bind(*(value if v is wide else evaluation.value(v) for v in eqn.invars), **eqn.params)
    return value


class _Chain:
    """The FFI calls of one update, one after the other."""

    def __init__(self, arrays: dict[int, Any], staging_bytes: int) -> None:
        _native.extension("offload.optimizer")
        self.arrays = dict(arrays)
        self._staging_bytes = staging_bytes
        self._site = new_site()
        self._ticket: Any = jnp.zeros((2,), jnp.uint32)
        self._given = 0
        self._pulls: list[tuple[int, int, int]] = []
        self._pushes: list[tuple[int, int, Any]] = []
        self._after: list[Any] = []

    def pull(self, piece: Piece) -> None:
        """The next call begins to copy the piece to the device."""
        self._pulls += [(i, *piece.span(self.arrays[i])) for i in piece.group.state]

    def push(self, i: int, piece: Piece, value: Any) -> None:
        """The next call begins to copy a piece of array i's new value to the host."""
        self._pushes.append((i, piece.span(self.arrays[i])[0], value))

    def wait_for(self, value: Any) -> Any:
        """`value`, computed before the next call: XLA might otherwise keep its operands until the end."""
        value = jax.lax.optimization_barrier(value)
        self._after.append(value)
        return value

    def begin(self) -> None:
        """Makes the host arrays the program's own."""
        numbers = sorted(self.arrays)
        mine = self._ffi(_BEGIN, numbers, [jax.typeof(self.arrays[i]) for i in numbers])(
            *(self.arrays[i] for i in numbers)
        )
        self.arrays.update(zip(numbers, mine, strict=True))

    def call(self, take: Piece | None = None) -> list[Any]:
        """Makes the next call; returns the arrays of the piece to take, which was pulled `ahead` calls before."""
        numbers = sorted({i for i, *_ in (*self._pulls, *self._pushes)})
        results: list[Any] = [jax.typeof(self._ticket)]
        if take is not None:
            for i in take.group.state:
                array = self.arrays[i]
                shape = array.shape if take.whole else (take.end - take.begin, *take.group.shape[1:])
                results.append(jax.ShapeDtypeStruct(shape, array.dtype))
        ffi = self._ffi(_BETWEEN, numbers, results)
        self._ticket, *taken = ffi(self._ticket, *(self.arrays[i] for i in numbers), *self._operands())
        self._given += len(taken)
        return list(jax.lax.optimization_barrier(taken))  # as in _operands

    def finish(self) -> None:
        """Makes the last call, which waits for all copies."""
        numbers = sorted(self.arrays)
        ffi = self._ffi(_FINISH, numbers, [jax.typeof(self.arrays[i]) for i in numbers])
        done = ffi(*(self.arrays[i] for i in numbers), self._ticket, *self._operands())
        self.arrays.update(zip(numbers, done, strict=True))

    def _operands(self) -> list[Any]:
        values = [*(value for *_, value in self._pushes), *self._after]
        self._pulls, self._pushes, self._after = [], [], []
        # XLA folds slices into calls that take or return them, and jax 0.11 keeps the replaced call where it has side
        # effects: it would run twice. XLA does not look through barriers.
        return list(jax.lax.optimization_barrier(values))

    def _ffi(self, mode: int, numbers: list[int], results: list[Any]) -> Any:
        at = {number: position for position, number in enumerate(numbers)}
        through = 1 if mode == _BETWEEN else len(numbers)
        ffi = jax.ffi.ffi_call(
            "dejax_offload_pieces",
            tuple(results),
            has_side_effect=True,
            input_output_aliases={k: k for k in range(through)},
        )
        attributes = {
            "site": np.int64(self._site),
            "mode": np.int64(mode),
            "first_tag": np.int64(self._given),
            "staging_bytes": np.int64(self._staging_bytes),
            "arrays": np.array(numbers, np.int64),
            "pull_array": np.array([at[i] for i, *_ in self._pulls], np.int64),
            "pull_offset": np.array([offset for _, offset, _ in self._pulls], np.int64),
            "pull_bytes": np.array([nbytes for *_, nbytes in self._pulls], np.int64),
            "push_array": np.array([at[i] for i, *_ in self._pushes], np.int64),
            "push_offset": np.array([offset for _, offset, _ in self._pushes], np.int64),
            **NO_LOOP,
        }

        def call(*operands: Any) -> Any:
            with jax.named_scope("offload_pieces"):
                return ffi(*operands, **attributes)

        return call


class _DiskChain(_Chain):
    """The same for arrays on disk, which are no operands: the calls name them by their numbers."""

    def __init__(self, arrays: dict[int, Any], staging_bytes: int) -> None:
        super().__init__(arrays, staging_bytes)
        self._slots = 0

    def begin(self) -> None:
        """Names the arrays and the versions that the update goes on from."""
        numbers = sorted(self.arrays)
        tickets = jnp.stack([self.arrays[i].ticket for i in numbers])
        sizes = np.array([self.arrays[i].nbytes for i in numbers], np.int64)
        self._ticket = self._call(_OPEN, {"arrays": np.array(numbers, np.int64), "pull_bytes": sizes}, tickets)[0]

    def call(self, take: Piece | None = None) -> list[Any]:
        taken = [] if take is None else [(i, *take.span(self.arrays[i])) for i in take.group.state]
        results = []
        for i, *_ in taken:
            assert take is not None
            array = self.arrays[i]
            shape = array.shape if take.whole else (take.end - take.begin, *take.group.shape[1:])
            results.append(jax.ShapeDtypeStruct(shape, array.dtype))
        attributes: dict[str, Any] = {"slot": np.int64(self._slots), "pull_iterations": np.int64(1)}
        self._slots += 1
        places: dict[str, Sequence[Any]] = {
            "take": [x[:2] for x in taken],
            "pull": [x[:2] for x in self._pulls],
            "push": self._pushes,
        }
        for name, some in places.items():
            attributes[f"{name}_array"] = np.array([x[0] for x in some], np.int64)
            attributes[f"{name}_offset"] = np.array([x[1] for x in some], np.int64)
            attributes[f"{name}_stride"] = np.zeros(len(some), np.int64)
        attributes["pull_bytes"] = np.array([x[2] for x in self._pulls], np.int64)
        self._ticket, *values = self._call(_LOOP, attributes, *self._operands(), results=results)
        return list(jax.lax.optimization_barrier(values))

    def finish(self) -> None:
        """Makes the last calls; the arrays then have the tickets of their next version."""
        if self._pushes or self._after:
            self.call()
        self._ticket = self._call(_COMMIT, {"arrays": np.array(sorted(self.arrays), np.int64)})[0]
        self._ticket = self._call(_FINISH, {})[0]
        for i, array in self.arrays.items():
            # The chain's ticket holds zeros, which XLA does not know. A barrier with one used result would not wait.
            self.arrays[i] = array.next_version(array.ticket + self._ticket[0])

    def _call(self, mode: int, attributes: dict[str, Any], *operands: Any, results: Sequence[Any] = ()) -> Any:
        ffi = jax.ffi.ffi_call(
            "dejax_offload_pieces",
            (jax.typeof(self._ticket), *results),
            has_side_effect=True,
            input_output_aliases={0: 0},
        )
        empty = np.zeros(0, np.int64)
        given = {
            "site": np.int64(self._site),
            "mode": np.int64(mode),
            "first_tag": np.int64(0),
            "staging_bytes": np.int64(self._staging_bytes),
            "arrays": empty,
            **dict.fromkeys(("pull_array", "pull_offset", "pull_bytes", "push_array", "push_offset"), empty),
            **NO_LOOP,
            **attributes,
        }
        with jax.named_scope("offload_pieces"):
            return ffi(self._ticket, *operands, **given)
