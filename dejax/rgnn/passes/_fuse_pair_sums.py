"""Which of two sums over a node's pairs, of both kinds, is made in the loop of the other.

Gradients of nodes come from both ends of their edges: from source pairs and from destination pairs. Where the epilogue
of one loop adds what the other gave, both are one instance, and the rows between them are not written.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dejax.rgnn.passes.fuse_traversal import Fusion, Loop

_PAIRS_OF_NODES = ("source_pair.node", "destination_pair.node")
# A node has at most one pair for each type of edges. Sums that an epilogue makes are not split: with hundreds of types
# one node would take longer than all others, unless those take long, too. 535 types and 12.7 million pairs: 1.43 ms in
# two loops, 1.23 in one; 474 types and 0.2 million pairs 34 and 63 us.
_FEW_TYPES = 256
_PAIRS_OF_TYPE = 10_000


def put_beside(fusion: Fusion) -> None:
    """Makes one of two loops where all that reads the sums of the one is the other's epilogue."""
    pairs = min(fusion.counts.source_pairs, fusion.counts.destination_pairs)
    if fusion.counts.edge_types > max(_FEW_TYPES, pairs / _PAIRS_OF_TYPE):
        return
    for loop in list(fusion.loops):
        plain = loop.via in _PAIRS_OF_NODES and not (loop.epilogue or loop.items)
        other = next((o for o in fusion.loops if plain and reads_all(fusion, o, loop)), None)
        if other is None:
            continue
        # The one that reads more for each item leads: its rows are sorted by length, and its hubs are split.
        lead, beside = sorted((loop, other), key=lambda each: item_width(fusion, each), reverse=True)
        sums = replace(beside, epilogue=[])
        if all(o.access in ("dense", "gathered") for o in fusion.operands(sums, set())[1]):
            fusion.loops.remove(loop)
            fusion.loops[fusion.loops.index(other)] = replace(lead, epilogue=other.epilogue, beside=sums)


def reads_all(fusion: Fusion, reader: Loop, loop: Loop) -> bool:
    """Whether the loop's sums are read by an epilogue over the same nodes alone, of another loop of sums."""
    results = loop.sums
    fits = reader.via in _PAIRS_OF_NODES and reader.via != loop.via and not (reader.items or reader.beside)
    return (
        fits
        and all(a.kind == "sum" for a in (*loop.accumulators, *reader.accumulators))
        and results.isdisjoint(fusion.program.outputs)
        and all(set(fusion.users[v]) <= set(reader.epilogue) for v in results)
    )


def item_width(fusion: Fusion, loop: Loop) -> int:
    """Numbers of items that a loop loads."""
    ops = fusion.program.ops
    return sum(ops[v].width for v in fusion.cone(fusion.roots(loop), set())[1] if ops[v].space == loop.space)
