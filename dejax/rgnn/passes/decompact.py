"""Attention scores are computed in the traversal that reads their rows anyway: compaction undone where it does not pay.

Compaction makes two arrays of scalars for a score that is the sum of an inner product by (source, type) pair and one by
(destination, type) pair. Where there are about as many pairs as edges, the traversal of destinations computes both as
fast as it reads them: it has the rows of both ends, it takes edges in the order of their types, and the vectors of
types stay in the L1 cache. That spares a product over the destination pairs, and a burst of memory for each edge.

For programs without gradients alone: backward reads the scores again, by edge then, and training was no faster.
"""

from __future__ import annotations

from dejax.rgnn.ir.inter import COMPOSED_VIAS, Builder, Op, Program
from dejax.rgnn.ir.products import Product
from dejax.rgnn.passes._rewrite import Counts, rebuild

_PAIRS = ("source_pair", "destination_pair")
# Wider rows and vectors are more to read than a scalar is.
_WIDEST = 128
# Edges for each destination pair, beyond which a scalar for each pair is less work.
_MOST_EDGES = 2


def decompact(program: Program, counts: Counts) -> Program:
    new: dict[int, int] = {}

    def visit(builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        if op.name != "add":
            return None
        # In the order of the arguments, so that the sum is what it was.
        made = dict(found for a in op.args if (found := _score_by_pair(program, a)) is not None)
        if set(made) != set(_PAIRS) or not _pays(program, made, counts):
            return None
        terms = [_products(builder, program, new, product, pair) for pair, product in made.items()]
        if len({builder.ops[t].shape for t in terms}) == 1:
            return _summed(builder, builder.op("add", *terms))
        return builder.op("add", *(_summed(builder, t) for t in terms))

    return rebuild(program, visit, new)


def _score_by_pair(program: Program, value: int) -> tuple[str, Op] | None:
    """The pair, and the inner product by it, that an edge value reads, if it does.

    With several vectors for each type, each edge would multiply its row by several vectors: these stay.
    """
    read = program.ops[value]
    if read.name != "gather" or read.attr("via") not in _PAIRS:
        return None
    pair, made = str(read.attr("via")), program.ops[read.args[0]]
    if made.name != "linear" or made.width != 1 or made.dtype == "float64":
        return None
    x = program.ops[made.args[0]]
    known = x.name != "gather" or (pair, x.attr("via")) in COMPOSED_VIAS
    inner = made.attr("via") == f"{pair}.etype" and Product.parse(made.attr("spec")).is_inner
    return (pair, made) if known and inner else None


def _pays(program: Program, made: dict[str, Op], counts: Counts) -> bool:
    """Whether edges read the rows of their sources anyway, not many share a destination pair, and no row is wide."""
    source = (made["source_pair"].args[0],)
    read = any(op.name == "gather" and op.args == source and op.attr("via") == "source_pair" for op in program.ops)
    few = counts.edges <= _MOST_EDGES * counts.destination_pairs
    return read and few and all(program.ops[product.args[0]].width <= _WIDEST for product in made.values())


def _products(builder: Builder, program: Program, new: dict[int, int], made: Op, pair: str) -> int:
    """The row of an edge's end times the vector of its type, element by element."""
    rows, vectors = made.args
    x = program.ops[rows]
    if x.name == "gather":
        row = builder.op("gather", new[x.args[0]], via=COMPOSED_VIAS[pair, x.attr("via")])
    else:
        row = builder.op("gather", new[rows], via=pair)
    vector = builder.op("gather", new[vectors], via="etype")
    missing = len(builder.ops[vector].shape) - len(builder.ops[row].shape)
    if missing:
        row = builder.op("reshape", row, shape=(*(1,) * missing, *builder.ops[row].shape))
    return builder.op("mul", row, vector)


def _summed(builder: Builder, products: int) -> int:
    last = len(builder.ops[products].shape) - 1
    return builder.op("sum_features", products, axes=(last,), keepdims=False)
