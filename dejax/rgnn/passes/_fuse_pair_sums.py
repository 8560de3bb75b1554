"""Sums over a node's source pairs and over its destination pairs, fused into one kernel.

The gradient of a node comes from both ends of its edges: from source pairs and from destination pairs. Where the
epilogue of one traversal adds the sums of the other, both are one instance, and the sums between them are not written.
"""

from __future__ import annotations

from dataclasses import replace

from dejax.rgnn.passes._traversal_plans import Fusion, TraversalPlan

_PAIRS_OF_NODES = ("source_pair.node", "destination_pair.node")
# A node has at most one pair for each edge type. The long segments of a fused kernel are not split, so with hundreds of
# types one node would take longer than all others, unless there are so many pairs that the others take long, too.
_FEW_TYPES = 256
_PAIRS_OF_TYPE = 10_000


def fuse_pair_sums(fusion: Fusion) -> None:
    """Fuses two traversals where only the epilogue of one reads the sums of the other."""
    pairs = min(fusion.counts.source_pairs, fusion.counts.destination_pairs)
    if fusion.counts.edge_types > max(_FEW_TYPES, pairs / _PAIRS_OF_TYPE):
        return
    for traversal in list(fusion.traversals):
        plain = traversal.via in _PAIRS_OF_NODES and not (traversal.epilogue or traversal.stored)
        reader = next((o for o in fusion.traversals if plain and _reads_all(fusion, o, traversal)), None)
        if reader is None:
            continue
        # The one that loads more for each entry comes first: its rows are sorted by length, its long segments split.
        first, second = sorted((traversal, reader), key=lambda each: _loaded_width(fusion, each), reverse=True)
        sums = replace(second, epilogue=[])
        if all(o.access in ("dense", "gathered") for o in fusion.operands(sums)[1]):
            apart, fused = fusion.traversals, replace(first, epilogue=reader.epilogue, alongside=sums)
            fusion.traversals = [fused if o is reader else o for o in apart if o is not traversal]
            if not fusion.acyclic():
                fusion.traversals = apart


def _reads_all(fusion: Fusion, reader: TraversalPlan, traversal: TraversalPlan) -> bool:
    """Whether only the epilogue of `reader`, which also sums over pairs of nodes, reads the traversal's sums."""
    fits = reader.via in _PAIRS_OF_NODES and reader.via != traversal.via and not (reader.stored or reader.alongside)
    return (
        fits
        and all(a.kind == "sum" for a in (*traversal.accumulators, *reader.accumulators))
        and traversal.sums.isdisjoint(fusion.program.outputs)
        and all(set(fusion.users[v]) <= set(reader.epilogue) for v in traversal.sums)
    )


def _loaded_width(fusion: Fusion, traversal: TraversalPlan) -> int:
    """Elements that a traversal loads for each entry."""
    ops = fusion.program.ops
    return sum(ops[v].width for v in fusion.cone(traversal.roots, set())[1] if ops[v].space == traversal.space)
