"""Inner products of the items that only numbers follow from are made once, by a loop that reads their rows anyway.

The gradient of a softmax is the difference of an inner product and its mean over a row. Where it goes into sums of
numbers alone, as that of RGAT's scores does, three narrow loops follow one wide loop: the loop that sums gradients by
source has both rows of an edge and writes the inner product, one loop makes the mean, and the others the sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dejax.rgnn.ir.inter import Space
from dejax.rgnn.ir.intra import BY_ROW, access_operand

if TYPE_CHECKING:
    from dejax.rgnn.passes.fuse_traversal import Fusion

_NARROWER = 4  # times that a number of an item is narrower than a row


def made_once(fusion: Fusion) -> dict[int, list[int]]:
    """For reductions of rows, the item values that their loops write for all others."""
    ops = fusion.program.ops
    sums = [
        i for i, op in enumerate(ops) if op.name == "reduce" and i not in fusion.written and op.attr("via") != "all"
    ]
    sums = [i for i in sums if ops[ops[i].args[0]].space == Space.EDGE]
    cones = {i: fusion.cone([ops[i].args[0]], set()) for i in sums}
    found: dict[int, list[int]] = {}
    for value, op in enumerate(ops):
        if op.space != Space.EDGE or not fusion.on_tile(value) or not fusion.shrinks(value):
            continue
        readers = [i for i in sums if value in cones[i][0]]
        if len({ops[i].attr("via") for i in readers}) < 2 or any(ops[i].width > op.width for i in readers):
            continue
        waits = any(fusion.follows((ops[i].args[0],), {j}) for i in readers for j in readers if i != j)
        needed = fusion.cone([value], set())[1]
        for i in sums if waits else ():
            body, leaves = cones[i]
            if ops[i].width < _NARROWER * op.width:
                continue
            if all(
                v in leaves or access_operand(fusion.program, v, ops[i].attr("via")).access in BY_ROW for v in needed
            ):
                found[i] = [value, *_numbers_beside(fusion, body, fusion.cone([value], set())[0], op.width)]
                break
    return found


def _numbers_beside(fusion: Fusion, body: list[int], product: list[int], width: int) -> list[int]:
    """Numbers of the loop that others read, too: so they need nothing of what the loop made them from."""
    ops, inside = fusion.program.ops, {*body, *product}
    read = [
        v for v in body
        if ops[v].width <= width and ops[v].name not in ("const", "reshape", "cast")
        and any(u not in inside and ops[u].space == Space.EDGE for u in fusion.users[v])
    ]  # fmt: skip

    def follows(value: int) -> bool:
        """Whether a number is another of them, times or over one of the destination."""
        others = [a for a in ops[value].args if a not in read]
        one = len(others) < len(ops[value].args)
        return one and all(ops[a].name == "gather" and ops[a].attr("via") == "dst" for a in others)

    return [v for v in read if not follows(v)]


def share_in_order(fusion: Fusion) -> None:
    """Of loops that sum the same number of each item, the one that takes items in order writes it for the others."""
    for loop in fusion.loops:
        if loop.via != "destination_pair":
            continue
        for value in dict.fromkeys(a.value for a in loop.accumulators if a.kind == "sum"):
            again = any(o is not loop and value in (a.value for a in o.accumulators) for o in fusion.loops)
            if again and fusion.on_tile(value) and not any(value in o.items for o in fusion.loops):
                loop.items.append(value)
                if not fusion.acyclic(fusion.loops):
                    loop.items.pop()
