"""Which rows of node values exist and are read: those of destinations, and padding.

In a block of a sample and in a part of a divided graph only the first `num_destinations` nodes have incoming edges; the
others are sources alone, or copies of nodes of other parts. A sum over incoming edges is zero at those other nodes, and
mostly nothing reads it there. So kernels compute and read such values for destinations alone. Padding nodes follow the
nodes of a graph of fixed size; kernels rarely read them, so that no zeros need to be written there beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from dejax.pallas import RowScaled
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.ir.inter import ROWWISE, VIAS, OpProgram, Space, is_float
from dejax.rgnn.ir.intra import Traversal
from dejax.rgnn.lowering.segments import num_rows, where_rows
from dejax.rgnn.passes import Cut

TO_DESTINATIONS = ("dst", "destination_pair.node")
"""Maps that lead to destinations."""


@dataclass(frozen=True, slots=True)
class NodeRows:
    """Which rows of its inputs and outputs for nodes a program may rely on; a part of what the program is compiled for.

    Attributes:
        zero_elsewhere: positions of inputs that are zeros at other nodes than destinations.
        read_at_destinations: indices of outputs that nothing reads at other nodes than destinations.
        padded: positions of inputs whose padding rows may hold anything.
    """

    zero_elsewhere: tuple[int, ...] = ()
    read_at_destinations: tuple[int, ...] = ()
    padded: tuple[int, ...] = ()

    @classmethod
    def of(cls, graph: RelGraph, program: OpProgram, *, padded: bool) -> NodeRows:
        """The rows of a user's call.

        Args:
            graph: the graph.
            program: a level-1 program.
            padded: whether inputs come as they are where the graph has padding nodes, because kernels read them.

        Raises:
            ValueError: the graph asks for rows of destinations alone and does not say how many there are.
        """
        if graph.only_destinations and graph.num_destinations is None:
            raise ValueError(
                "`num_destinations` of a graph with `only_destinations` must be a number, got None; take the graph "
                "from `Block.bipartite`"
            )
        ops = program.ops
        inputs: tuple[int, ...] = ()
        outputs: tuple[int, ...] = ()
        if graph.only_destinations:
            outputs = tuple(n for n, o in enumerate(program.outputs) if ops[o].space == Space.NODE)
        if padded and graph.node_mask is not None:
            of_nodes = (ops[i] for i in program.inputs if ops[i].space == Space.NODE)
            inputs = tuple(op.attr("position") for op in of_nodes if is_float(op.dtype))
        return cls(read_at_destinations=outputs, padded=inputs)

    def halves(self, parts: Cut, wrt: Sequence[int]) -> tuple[NodeRows, NodeRows]:
        """The rows of forward and of backward, for gradients of the inputs at the positions `wrt`."""
        first, kept = len(parts.needed), parts.forward.outputs[parts.num_outputs :][: parts.num_saved]
        saved: list[int] = []
        inputs: tuple[int, ...] = ()
        gradients: tuple[int, ...] = ()
        if self.zero_elsewhere or self.read_at_destinations:
            gradients = tuple(n for n, position in enumerate(wrt) if position in self.zero_elsewhere)
            summed, elsewhere = summed_at(parts.forward), read_elsewhere(parts.backward, gradients)
            given = parts.backward.by_position()
            saved = [n for n, v in enumerate(kept) if v in summed and given.get(first + n) not in elsewhere]
            needed = [n for n, position in enumerate(parts.needed) if position in self.zero_elsewhere]
            cotangents = [first + parts.num_saved + o for o in self.read_at_destinations]
            inputs = (*needed, *(first + n for n in saved), *cotangents)
        padded = tuple(n for n, position in enumerate(parts.needed) if position in self.padded)
        outputs = (*self.read_at_destinations, *(parts.num_outputs + n for n in saved))
        return NodeRows(self.zero_elsewhere, outputs, self.padded), NodeRows(inputs, gradients, padded)


ALL_ROWS = NodeRows()
"""The rows of a program without promises: every row of its inputs counts, and every row of its outputs is read."""


@lru_cache(maxsize=1024)
def read_elsewhere(program: OpProgram, read_at_destinations: tuple[int, ...] = ()) -> frozenset[int]:
    """The node values that are read at other nodes than destinations.

    Args:
        program: a level-1 program.
        read_at_destinations: as in `NodeRows`.
    """
    ops = program.ops
    found = {o for n, o in enumerate(program.outputs) if n not in read_at_destinations}
    for i in reversed(range(len(ops))):
        op = ops[i]
        of_own_row = op.space == Space.NODE and (op.name in ROWWISE or op.name == "linear")
        if (of_own_row and i not in found) or (op.name == "gather" and op.attr("via") in TO_DESTINATIONS):
            continue
        found.update(a for a in op.args if ops[a].space == Space.NODE)
    return frozenset(found)


@lru_cache(maxsize=1024)
def summed_at(program: OpProgram) -> frozenset[int]:
    """The node values that are sums over incoming edges, or are made of such row by row."""
    found: set[int] = set()
    for i, op in enumerate(program.ops):
        summed = op.name in ("reduce", "count") and op.attr("via") == "dst"
        if op.space == Space.NODE and (summed or (op.name in ROWWISE and found.intersection(op.args))):
            found.add(i)
    return frozenset(found)


class RowArrays:
    """The arrays of node values while a program runs, where kernels need fewer rows than `env` has.

    `env` has each node value with all rows, zeros in those of padding and of other nodes than destinations. XLA makes
    such an array only if something reads it.

    Attributes:
        of_destinations: the rows of destinations, of values that are zeros at other nodes or are not read there.
        padded: inputs whose padding rows may hold anything.
    """

    def __init__(self, graph: RelGraph, program: OpProgram, rows: NodeRows, env: dict[int, Any]) -> None:
        self.graph, self.program = graph, program
        self._elsewhere = read_elsewhere(program, rows.read_at_destinations)
        positions = {i: program.ops[i].attr("position") for i in program.inputs}
        self.padded = {i: env[i] for i, position in positions.items() if position in rows.padded}
        env.update((i, where_rows(graph.node_mask, x)) for i, x in self.padded.items() if isinstance(x, jax.Array))
        self.of_destinations: dict[int, Any] = {}
        if graph.num_destinations is not None:
            given = (i for i, position in positions.items() if position in rows.zero_elsewhere)
            count = graph.num_destinations
            self.of_destinations = {i: first_rows(env[i], count) for i in given}

    def any_row(self, value: int, env: dict[int, Any]) -> Any:
        """The array of a value for a reader that is told which rows are padding, or reads none of them."""
        return self.padded.get(value, env[value])

    def fewest(self, value: int, env: dict[int, Any]) -> Any:
        """The same, without the rows of other nodes than destinations where these are zeros."""
        return self.of_destinations.get(value, self.any_row(value, env))

    def first(self, count: int, value: int, env: dict[int, Any]) -> Any:
        """The array that a traversal of the first `count` rows reads by row."""
        array = env[value]
        return array if count == array.shape[0] else self.of_destinations.get(value, array)

    def count(self, t: Traversal) -> int:
        """The rows that a traversal computes: those of destinations where it reduces to them alone."""
        assert t.via is not None
        zero_elsewhere = {a.out for a in t.accumulators}
        if (
            self.graph.num_destinations is not None
            and t.via in TO_DESTINATIONS
            and zero_elsewhere.union(set(t.row_outputs).difference(self._elsewhere)).issuperset(t.row_outputs)
        ):
            return self.graph.num_destinations
        return num_rows(self.graph, VIAS[t.via].coarse)

    def entries(self, t: Traversal) -> int:
        """The entries that a map computes: destinations alone where nothing reads its results at other nodes."""
        whole = num_rows(self.graph, t.space)
        few = t.space == Space.NODE and self._elsewhere.isdisjoint(t.entry_outputs)
        return whole if not few or self.graph.num_destinations is None else self.graph.num_destinations

    def sums_destinations(self, t: Traversal) -> bool:
        """Whether a traversal sums values by node type that are zeros at other nodes than destinations."""
        by_type = t.via == "ntype" and self.graph.destinations_by_type is not None and not t.entry_outputs
        short = (o.access == "dense" and isinstance(self.of_destinations.get(o.value), jax.Array) for o in t.operands)
        return by_type and all(short)

    def write(self, value: int, rows: Any, env: dict[int, Any]) -> None:
        """Adds a value to `env` of which the rows of all nodes or those of destinations were computed."""
        missing = self.graph.num_nodes - rows.shape[0]
        if missing:
            self.of_destinations[value] = rows
            rows = longer(rows, missing)
        env[value] = rows

    def reshaped(self, values: Sequence[int]) -> None:
        """Takes the rows of destinations along where XLA only reshapes them, as into heads."""
        for v in values:
            op = self.program.ops[v]
            rows = self.of_destinations.get(op.args[0]) if op.name == "reshape" else None
            if isinstance(rows, jax.Array):
                self.of_destinations[v] = rows.reshape(rows.shape[0], *op.shape)


def first_rows(rows: Any, count: int) -> Any:
    """The first `count` rows, of an array or of `RowScaled`."""
    if isinstance(rows, RowScaled):
        return replace(rows, mantissa=rows.mantissa[:count], exponent=rows.exponent[:count])
    return rows[:count]


def longer(rows: Any, count: int) -> Any:
    """Rows followed by `count` rows of zeros, of an array or of `RowScaled`."""
    if isinstance(rows, RowScaled):
        return replace(rows, mantissa=longer(rows.mantissa, count), exponent=longer(rows.exponent, count))
    return jnp.pad(rows, [(0, count)] + [(0, 0)] * (rows.ndim - 1))
