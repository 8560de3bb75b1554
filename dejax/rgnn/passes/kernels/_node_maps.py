"""Kernels without a reduction that compute rows of nodes for other traversals to gather."""

from __future__ import annotations

from dejax.rgnn.ir.inter import Space
from dejax.rgnn.ir.templates import access_by
from dejax.rgnn.passes.kernels._traversal_plans import NARROWER, Fusion, TraversalPlan
from dejax.rgnn.passes.kernels.storage import MIN_WIDTH

# How often traversals read a row of nodes, on average, before a copy as row-scaled float16 pays. Traversals of short
# segments wait for latency and not for bytes, and wait for the exponent of each row besides.
_READS_OF_COPY = 8
# Operators that move elements and compute nothing: a value made by these alone is a copy.
_COPIES = ("const", "reshape", "broadcast", "cast")


def add_node_maps(fusion: Fusion) -> None:
    """Adds kernels for values of nodes that traversals gather, where a kernel can compute them.

    - Wide rows, which the kernel may then store as row-scaled float16. The same kernel computes the inner products of
      these rows: of the rows as stored, so that they cancel with the inner products that a traversal takes of them.
    - Copies of wide rows, where such an inner product keeps traversals from reading rows rounded (the gradient of a
      softmax), and traversals read them often and from memory.
    """
    ops = fusion.program.ops
    able, gathered = _computable_arrays(fusion), _rows_gathered(fusion)
    done = {v for traversal in fusion.traversals for v in traversal.results}
    for value in able:
        if value in done or value not in gathered or ops[value].width < MIN_WIDTH:
            continue
        body, _ = fusion.cone([value], done)
        readers = [v for v in able if value in fusion.cone([v], done)[0]]
        if all(ops[v].name in _COPIES for v in body):
            compared = any(NARROWER * ops[v].width <= ops[value].width for v in readers)
            often = gathered[value] >= _READS_OF_COPY * fusion.counts.nodes
            if not (fusion.row_scaled and compared and fusion.from_memory(value) and often):
                continue
        narrow = [v for v in able if v in body and NARROWER * ops[v].width <= ops[value].width]
        done |= _node_map(fusion, sorted({*narrow, *readers} - done))


def _computable_arrays(fusion: Fusion) -> list[int]:
    """Values of nodes that are needed as arrays in memory and that a kernel can compute."""
    ops = fusion.program.ops
    arrays = {
        *fusion.must_be_arrays(Space.NODE),
        *(a for o in fusion.traversals for i in o.epilogue for a in ops[i].args),
    }
    nodes = (v for v in arrays if ops[v].space == Space.NODE and ops[v].name != "const")
    return sorted(v for v in nodes if fusion.in_registers(v))


def _rows_gathered(fusion: Fusion) -> dict[int, int]:
    """For each value that traversals gather, how many of its rows they read in all."""
    ops, rows = fusion.program.ops, dict[int, int]()
    for traversal in fusion.traversals:
        for v in fusion.cone(traversal.computed, fusion.stored_elsewhere(traversal))[1]:
            if ops[v].name == "gather" and access_by(ops[v].attr("via"), traversal.via)[0] == "gathered":
                rows[ops[v].args[0]] = rows.get(ops[v].args[0], 0) + fusion.counts.rows(traversal.space)
    return rows


def _node_map(fusion: Fusion, values: list[int]) -> set[int]:
    """Adds a traversal for values of nodes if the traversals then still have an order; returns its values."""
    return set(values) if fusion.extend(fusion.traversals, [TraversalPlan(None, Space.NODE, stored=values)]) else set()
