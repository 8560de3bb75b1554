"""Which loop makes the narrow numbers of each item that several loops over the same items need.

Backward of attention multiplies wide rows by two numbers an edge, the share and the gradient of its score, in a loop
over destinations and in one over sources. Both come from inner products of wide rows and from what other loops gave for
the destination. One loop, the leader, makes and writes them; a follower reads them, and multiplies and sums: it needs
registers for neither inner products nor what they are made from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dejax.rgnn.ir.intra import BY_ROW, access_operand, as_part

if TYPE_CHECKING:
    from dejax.rgnn.passes.fuse_traversal import Fusion, Loop

_NARROWER = 4  # times that a number of an item must be narrower than what it multiplies or is made from


def lead(fusion: Fusion) -> None:
    """Gives loops the item values to write that others then need not make: first where the leader holds least."""
    found = []
    for follower in fusion.loops:
        values = multipliers(fusion, follower)
        if values:
            found += [(held(fusion, loop, values), loop, follower, values) for loop in fusion.loops]
    leaders: list[Loop] = []
    followers: list[Loop] = []
    for _, leader, follower, values in sorted(found, key=lambda f: f[0]):
        if leader is follower or leader in followers or follower in (*followers, *leaders):
            continue
        values = before_sums(fusion, leader, values)
        if leader.space != follower.space or not pays(fusion, leader, follower, values):
            continue
        before = list(leader.items)
        leader.items += [v for v in values if v not in before]
        if fusion.acyclic(fusion.loops):
            leaders.append(leader)
            followers.append(follower)
        else:
            leader.items[:] = before


def multipliers(fusion: Fusion, loop: Loop) -> list[int]:
    """The narrow item values that a loop sums or multiplies wide rows by, if any is made from an inner product."""
    ops = fusion.program.ops
    if loop.via is None or any(a.kind != "sum" for a in loop.accumulators):
        return []
    found: dict[int, None] = {}

    def visit(value: int, width: int) -> None:
        op = ops[value]
        if op.width * _NARROWER <= width or op.width * _NARROWER <= widest(value):
            found[value] = None
        elif op.name in ("mul", "div") and fusion.on_tile(value):
            for a in op.args:
                visit(a, max(width, op.width))
        elif op.name in ("reshape", "cast") and fusion.on_tile(value):
            visit(op.args[0], width)

    def widest(value: int) -> int:
        """Of all that the value is made from."""
        return max(ops[v].width for part in fusion.cone([value], set()) for v in part)

    for a in loop.accumulators:
        visit(a.value, 0)
    values = list(dict.fromkeys(plain(fusion, v) for v in found))
    values = [v for v in values if fusion.cone([v], set())[0] and ops[v].name != "const"]
    return values if any(fusion.shrinks(v) for v in fusion.cone(values, set())[0]) else []


def before_sums(fusion: Fusion, leader: Loop, values: list[int]) -> list[int]:
    """The values, but what is made from a sum of the leader itself is left to followers, from values before it."""
    ops, found = fusion.program.ops, dict[int, None]()

    def visit(value: int) -> None:
        if not fusion.follows((value,), leader.sums):
            if ops[value].name != "const" and fusion.cone([value], set())[0]:
                found[value] = None
        elif fusion.on_tile(value):
            for a in ops[value].args:
                visit(a)

    for value in values:
        visit(value)
    return list(found)


def plain(fusion: Fusion, value: int) -> int:
    """The value before reshapes, and before it is rounded: none of its digits are lost in memory."""
    ops = fusion.program.ops
    while ops[value].name in ("reshape", "cast") and fusion.on_tile(ops[value].args[0]):
        (before,) = ops[value].args
        if ops[value].name == "cast" and ops[before].dtype != "float32":
            break
        value = before
    return value


def held(fusion: Fusion, loop: Loop, values: list[int]) -> int:
    """Numbers of a slot that a loop holds in registers where it makes the values, too: what it loads and sums."""
    ops = fusion.program.ops
    _, leaves = fusion.cone([*fusion.roots(loop), *values], set())
    sums = [ops[a.out] for a in loop.accumulators]
    # What is summed again here would else be summed forward and kept (`_softmax_gradient.py`): no follower could have it.
    return sum(ops[v].width for v in leaves) + sum(op.width for op in sums if not op.attr("again"))


def pays(fusion: Fusion, leader: Loop, follower: Loop, values: list[int]) -> bool:
    """Whether the leader needs nothing more; or other parts of the wide rows that it reads anyway, and less in all.

    HGT's loop over destinations holds rows of keys and messages, two of its own and one sum, where the loop over source
    pairs held four rows and two sums: 140 instructions for two edges of that one became 71. HGT's training with and
    without: mutag 0.223 ms and 0.231; am 5.28 and 5.32, mag 7.63 and 7.73, wikikg2 13.8 and 14.3. What the leader alone
    reads is free when it is done: on wikikg2 keys and messages, 3.1 GiB, before as many bytes of their gradients are
    written, and training holds 9.5 GiB at once instead of 11.7.
    """
    if any(a.kind != "sum" for a in leader.accumulators):
        return False
    program, ops = fusion.program, fusion.program.ops

    def by_item(values: list[int], width: int) -> set[tuple]:
        """The rows, so wide, that the leader reads for each item to have the values: array, map and part."""
        operands = [as_part(program, access_operand(program, v, leader.via)) for v in values if ops[v].width >= width]
        return {(o.value, o.via, o.part) for o in operands if o.access not in BY_ROW}

    body, _ = fusion.cone(fusion.roots(leader), set())
    # What is read for inner products alone, another loop might read in its place.
    anyhow = fusion.cone(fusion.roots(leader), {v for v in body if fusion.shrinks(v)})[1]
    needed = fusion.cone(values, set())[1]
    if by_item(needed, 0) <= by_item(anyhow, 0):
        return True
    # Parts of one array lie side by side, and are as good as one row.
    wide = _NARROWER * max(ops[v].width for v in values)
    rows, others = ({row[:2] for row in by_item(found, wide)} for found in (needed, anyhow))
    return rows <= others and held(fusion, leader, values) < held(fusion, follower, [])
