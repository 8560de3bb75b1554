"""Which node values kernels compute for destinations alone, in the graph of a part of a divided graph.

There only the first nodes have incoming edges, and the others are copies of nodes of other parts. A sum over incoming
edges is zero at the copies, and mostly nobody reads it there.
"""

from __future__ import annotations

from functools import lru_cache

from dejax.rgnn.ir.inter import ROWWISE, Program, Space

VIAS = ("dst", "destination_pair.node")
"""Maps that lead to destinations."""


@lru_cache(maxsize=1024)
def read_elsewhere(program: Program, destination_outputs: tuple[int, ...] = ()) -> frozenset[int]:
    """The node values that are read at other nodes than destinations.

    Args:
        program: a level-1 program.
        destination_outputs: indices of the outputs that are read at destinations alone.
    """
    ops = program.ops
    found = {o for n, o in enumerate(program.outputs) if n not in destination_outputs}
    for i in reversed(range(len(ops))):
        op = ops[i]
        by_row = op.space == Space.NODE and (op.name in ROWWISE or op.name == "linear")
        if (by_row and i not in found) or (op.name == "gather" and op.attr("via") in VIAS):
            continue
        found.update(a for a in op.args if ops[a].space == Space.NODE)
    return frozenset(found)


@lru_cache(maxsize=1024)
def summed_at(program: Program) -> frozenset[int]:
    """The node values that are sums over incoming edges, or are made of such row by row."""
    found: set[int] = set()
    for i, op in enumerate(program.ops):
        summed = op.name in ("reduce", "count") and op.attr("via") == "dst"
        if op.space == Space.NODE and (summed or (op.name in ROWWISE and found.intersection(op.args))):
            found.add(i)
    return frozenset(found)
