"""Which arrays of nodes a kernel makes for loops to gather, and which of their rows it need not read."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dejax.rgnn.ir.inter import Space
from dejax.rgnn.ir.intra import Operand, access_by
from dejax.rgnn.passes.storage import MIN_WIDTH

if TYPE_CHECKING:
    from dejax.rgnn.passes.fuse_traversal import Fusion, Loop

# How often rows of nodes are read, on average, for which a copy in 16 bits is made. RGAT's backward loop on 10.9 reads
# a row 2.29 -> 1.79 ms and the copy 0.02; on 6.4 2.89 -> 3.06, and on 3 0.77 -> 0.84: rows of few items wait more than
# they move bytes, and wait for an exponent besides.
_READS_OF_COPY = 8


def write_nodes(fusion: Fusion) -> None:
    """Wide rows of nodes that loops gather are made by a kernel where they can be, which may store them in 16 bits.

    With them goes what is computed of them and must be an array: an inner product of such a row is then of the row
    as it was stored, and cancels with those that a loop makes of it. And narrow arrays that they are computed of.
    A row that is there already, but for its shape, is worth a copy in 16 bits where such a product keeps loops from
    reading it rounded, as for a softmax's gradient, and they read it often and from memory.

    Inner products of rows in memory are made so, too, where they are of nodes that a map leads to: `where_reached`.
    """
    ops = fusion.program.ops
    arrays = {*fusion.demanded(Space.NODE), *(a for loop in fusion.loops for i in loop.epilogue for a in ops[i].args)}
    able = sorted(v for v in arrays if ops[v].space == Space.NODE and fusion.on_tile(v) and ops[v].name != "const")
    gathered: dict[int, int] = {}  # and how many rows loops read of it
    for loop in fusion.loops:
        for v in fusion.cone(fusion.roots(loop) + loop.items, fusion.led(loop))[1]:
            if ops[v].name == "gather" and access_by(ops[v].attr("via"), loop.via)[0] == "gathered":
                gathered[ops[v].args[0]] = gathered.get(ops[v].args[0], 0) + fusion.counts.rows(loop.space)
    done = {v for loop in fusion.loops for v in loop.results}
    for value in able:
        if value in done or value not in gathered:
            continue
        made_from, leaves = fusion.cone([value], done)
        if ops[value].width < MIN_WIDTH:
            inner = any(fusion.shrinks(v) and fusion.from_memory(ops[v].args[0]) for v in made_from)
            if inner and any(ops[v].name == "count" for v in leaves):  # of which it need not read all rows
                done |= fusion.map_of_nodes([value])
            continue
        of_it = [v for v in able if value in fusion.cone([v], done)[0]]
        if all(ops[v].name in ("const", "reshape", "broadcast", "cast") for v in made_from):
            compared = any(4 * ops[v].width <= ops[value].width for v in of_it)
            often = gathered[value] >= _READS_OF_COPY * fusion.counts.nodes
            if not (fusion.half and compared and fusion.from_memory(value) and often):
                continue  # nothing is computed
        narrow = [v for v in able if v in made_from and 4 * ops[v].width <= ops[value].width]
        done |= fusion.map_of_nodes(sorted({*narrow, *of_it} - done))


def where_reached(fusion: Fusion, loop: Loop, operands: list[Operand]) -> list[Operand]:
    """The operands of a loop over nodes; wide rows in memory are read only where a map leads to the node.

    Those are enough where all that is made of them is gathered by that map, and the number of its items is read.
    """
    ops = fusion.program.ops
    counted = {ops[o.value].attr("via"): o.name for o in operands if ops[o.value].name == "count"}
    if loop.via is not None or loop.space != Space.NODE or not counted:
        return operands
    made_of = {value: set(fusion.cone([value], set())[1]) for value in loop.items}
    body = set(fusion.cone(loop.items, set())[0])

    def when(o: Operand) -> int | None:
        wide = o.access == "dense" and o.part is None and ops[o.name].width >= MIN_WIDTH
        if not wide or not fusion.from_memory(o.value):
            return None
        made = [value for value, leaves in made_of.items() if o.name in leaves]
        users = {u for value in made for u in fusion.users[value] if u not in body}
        maps = {ops[u].attr("via") if ops[u].name == "gather" else None for u in users}
        via = maps.pop() if len(maps) == 1 and not set(fusion.program.outputs).intersection(made) else None
        return counted.get(via)

    found = [replace(o, when=when(o)) for o in operands]
    return sorted(found, key=lambda o: o.when is not None)
