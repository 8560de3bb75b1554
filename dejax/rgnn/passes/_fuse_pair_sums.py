"""Sums over a node's source pairs and over its destination pairs, fused into one kernel.

The gradient of a node comes from both ends of its edges: from source pairs and from destination pairs. Where the
epilogue of one loop adds the sums of the other, both are one instance, and the sums between them are not written.
"""

from __future__ import annotations

from dataclasses import replace

from dejax.rgnn.passes._loops import Fusion, Loop

_PAIRS_OF_NODES = ("source_pair.node", "destination_pair.node")
# A node has at most one pair for each edge type. The long segments of a fused kernel are not split, so with hundreds of
# types one node would take longer than all others, unless there are so many pairs that the others take long, too.
_FEW_TYPES = 256
_PAIRS_OF_TYPE = 10_000


def fuse_pair_sums(fusion: Fusion) -> None:
    """Fuses two loops where only the epilogue of one reads the sums of the other."""
    pairs = min(fusion.counts.source_pairs, fusion.counts.destination_pairs)
    if fusion.counts.edge_types > max(_FEW_TYPES, pairs / _PAIRS_OF_TYPE):
        return
    for loop in list(fusion.loops):
        plain = loop.via in _PAIRS_OF_NODES and not (loop.epilogue or loop.stored)
        reader = next((o for o in fusion.loops if plain and _reads_all(fusion, o, loop)), None)
        if reader is None:
            continue
        # The loop that loads more for each entry comes first: its rows are sorted by length, its long segments split.
        first, second = sorted((loop, reader), key=lambda each: _loaded_width(fusion, each), reverse=True)
        sums = replace(second, epilogue=[])
        if all(o.access in ("dense", "gathered") for o in fusion.operands(sums, set())[1]):
            fusion.loops.remove(loop)
            fusion.loops[fusion.loops.index(reader)] = replace(first, epilogue=reader.epilogue, alongside=sums)


def _reads_all(fusion: Fusion, reader: Loop, loop: Loop) -> bool:
    """Whether only the epilogue of `reader`, another loop of sums over pairs of nodes, reads the loop's sums."""
    fits = reader.via in _PAIRS_OF_NODES and reader.via != loop.via and not (reader.stored or reader.alongside)
    return (
        fits
        and all(a.kind == "sum" for a in (*loop.accumulators, *reader.accumulators))
        and loop.sums.isdisjoint(fusion.program.outputs)
        and all(set(fusion.users[v]) <= set(reader.epilogue) for v in loop.sums)
    )


def _loaded_width(fusion: Fusion, loop: Loop) -> int:
    """Elements that a loop loads for each entry."""
    ops = fusion.program.ops
    return sum(ops[v].width for v in fusion.cone(loop.roots, set())[1] if ops[v].space == loop.space)
