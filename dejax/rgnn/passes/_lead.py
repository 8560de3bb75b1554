"""Which loop makes the narrow numbers of each item that several loops over the same items need.

Backward of attention multiplies wide rows by two numbers an edge, the share and the gradient of its score, in a loop
over destinations and in one over sources. Both come from inner products of wide rows and from what other loops gave for
the destination. One loop, the leader, makes and writes them; a follower reads them, and multiplies and sums: it needs
registers for neither inner products nor what they are made from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dejax.rgnn.ir.inter import VIAS
from dejax.rgnn.ir.intra import BY_ROW, access_operand, as_part
from dejax.rgnn.passes._rewrite import CACHED_BYTES

if TYPE_CHECKING:
    from dejax.rgnn.passes.fuse_traversal import Fusion, Loop

_NARROWER = 4  # times that a number of an item must be narrower than what it multiplies or is made from
# One byte gathered from memory costs as much as so many in order. On am HGT's loop over source pairs reads 1.11 times
# the bytes, in order, that the one over destinations would gather in their stead: training took 6.26 ms, and 6.72 with
# that one as the leader. On wikikg2 it is 1.57 times: 17.3 ms and 17.4.
_GATHERED = 1.5


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
    return sum(ops[v].width for v in leaves) + sum(ops[a.out].width for a in loop.accumulators)


def pays(fusion: Fusion, leader: Loop, follower: Loop, values: list[int]) -> bool:
    """Whether the leader needs nothing more; or other parts of the wide rows that it reads anyway, and less in all.

    Those parts must come from the cache, or be fewer bytes than the follower then need not read. What the leader alone
    reads is free when it is done: on wikikg2 HGT's keys and messages, 3.1 GiB, before as many bytes of their gradients
    are written, and training holds 9.5 GiB at once instead of 11.7.

    HGT's loop over destinations holds rows of keys and messages, two of its own and one sum, where the loop over source
    pairs held four rows and two sums: 140 instructions for two edges of that one became 71. HGT's training with and
    without: mutag 0.223 ms and 0.231; bgs, fb15k and biokg the same within 0.5 %; where rows come from memory it would
    be longer, am 6.06 and 5.90, mag 10.16 and 9.57.
    """
    if any(a.kind != "sum" for a in leader.accumulators):
        return False
    program, ops, counts = fusion.program, fusion.program.ops, fusion.counts

    def by_item(values: list[int], width: int) -> dict[tuple, int]:
        """Widths of the rows, so wide or wider, that the leader reads for each item: by array, map and part."""
        found = [(as_part(program, access_operand(program, v, leader.via)), ops[v].width) for v in values]
        return {(o.value, o.via, o.part): w for o, w in found if o.access not in BY_ROW and w >= width}

    def in_order(values: list[int]) -> int:
        """Numbers of what the follower reads once for a row, of values that it reads."""
        return sum(ops[v].width for v in values if access_operand(program, v, follower.via).access == "row")

    body, _ = fusion.cone(fusion.roots(leader), set())
    # What is read for inner products alone, another loop might read in its place.
    anyhow = fusion.cone(fusion.roots(leader), {v for v in body if fusion.shrinks(v)})[1]
    needed = fusion.cone(values, set())[1]
    at_hand = by_item(anyhow, 0)
    more = [width for row, width in by_item(needed, 0).items() if row not in at_hand]
    if not more:
        return True
    # Parts of one array lie side by side, and are as good as one row.
    wide = _NARROWER * max(ops[v].width for v in values)
    rows, others = ({row[:2] for row in by_item(found, wide)} for found in (needed, anyhow))
    if not rows <= others or held(fusion, leader, values) >= held(fusion, follower, []):
        return False
    arrays = [ops[v] for v in {value for value, _ in rows}]
    if sum(2 * op.width * counts.rows(op.space) for op in arrays) <= CACHED_BYTES:
        return True
    assert follower.via is not None
    roots = fusion.roots(follower)
    read, left = (in_order(fusion.cone(roots, cut)[1]) for cut in (set(), set(values)))
    return _GATHERED * sum(more) * counts.rows(leader.space) <= (read - left) * counts.rows(VIAS[follower.via].coarse)
