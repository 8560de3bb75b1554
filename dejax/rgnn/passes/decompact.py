"""Scores of edges back into the loop that reads their rows anyway: compaction taken back where it does not pay.

Of a score that is the sum of an inner product by (source, type) pair and one by (destination, type) pair, compaction
makes two arrays of numbers. Where there are about as many pairs as edges, the loop over destinations computes both as
fast as it reads them: it has the rows of both ends, the types of its edges come in order, and the vectors of types stay
in the cache of its multiprocessor. A product over the destination pairs is spared, and a burst of memory for each edge.
RGAT's forward pass took 1.15 ms on am, 3.60 on wikikg2 and 0.116 on fb15k; so it takes 1.00, 2.81 and 0.107.

For programs without gradients alone: backward reads the scores again, by edge then, and training was no faster (am 3.59
and 3.70 ms, wikikg2 11.65 and 11.75).
"""

from __future__ import annotations

from dejax.rgnn.ir.inter import COMPOSED_VIAS, Builder, Op, Program
from dejax.rgnn.passes._rewrite import Counts, rebuild

_PAIRS = ("source_pair", "destination_pair")
# Inner products of a row with one vector for each type; with several, a row would meet many vectors on each edge (8
# heads on am 1.44 ms and 4.96).
_SPECS = ("k,k->", "hk,hk->h", "k,hk->h")
# Wider rows and vectors are more to read than a number is: on am at 100 2.68 ms and 2.10, at 128 2.29 and 1.97, but at
# 256 4.27 and 4.50.
_WIDEST = 128
# Edges for each destination pair, beyond which a number for each pair is less work. With 1.3 on wikikg2, 1.8 on fb15k
# and 1.9 on am the loop wins; with 2.3 on mutag 0.039 ms became 0.042, with 4 on bgs 0.107 0.118, with 7 on biokg 0.34
# 0.38 and with 14 on mag 2.08 2.18.
_MOST_EDGES = 2


def sink(program: Program, counts: Counts) -> Program:
    new: dict[int, int] = {}

    def visit(builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        if op.name != "add":
            return None
        # In the order of the arguments, so that the sum is what it was.
        made = dict(found for a in op.args if (found := _by_pair(program, a)) is not None)
        if set(made) != set(_PAIRS) or not _pays(program, made, counts):
            return None
        terms = [_products(builder, program, new, product, pair) for pair, product in made.items()]
        if len({builder.ops[t].shape for t in terms}) == 1:
            return _summed(builder, builder.op("add", *terms))
        return builder.op("add", *(_summed(builder, t) for t in terms))

    return rebuild(program, visit, new)


def _by_pair(program: Program, value: int) -> tuple[str, Op] | None:
    """The pair, and the inner product by it, that an edge value reads, if it does."""
    read = program.ops[value]
    if read.name != "gather" or read.attr("via") not in _PAIRS:
        return None
    pair, made = str(read.attr("via")), program.ops[read.args[0]]
    if made.name != "linear" or made.attr("spec") not in _SPECS or made.width != 1 or made.dtype == "float64":
        return None
    x = program.ops[made.args[0]]
    known = x.name != "gather" or (pair, x.attr("via")) in COMPOSED_VIAS
    return (pair, made) if known and made.attr("via") == f"{pair}.etype" else None


def _pays(program: Program, made: dict[str, Op], counts: Counts) -> bool:
    """Whether edges read the rows of their sources anyway, not many share a destination pair, and no row is wide."""
    source = (made["source_pair"].args[0],)
    read = any(op.name == "gather" and op.args == source and op.attr("via") == "source_pair" for op in program.ops)
    few = counts.edges <= _MOST_EDGES * counts.destination_pairs
    return read and few and all(program.ops[product.args[0]].width <= _WIDEST for product in made.values())


def _products(builder: Builder, program: Program, new: dict[int, int], made: Op, pair: str) -> int:
    """The row of an edge's end times the vector of its type, number by number."""
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
