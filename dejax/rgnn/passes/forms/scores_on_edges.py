"""Attention scores are computed on the edges that read the rows of both ends, where that takes less time than by pair.

Compact materialization makes two arrays of scalars for a score that is an inner product by (source, type) pair plus one
by (destination, type) pair. A traversal over destinations has the rows of both ends anyway, and the vectors of types
stay in the L1 cache, so it can compute both inner products itself:

    s_(j, r) + t_(i, r)     becomes     sum over features of z_(j, r) a_r + x_i c_r

That spares the product over destination pairs, and each edge two reads of narrow rows. It costs each edge 128
multiplications and additions at a width of 64. The cost model decides: kernels are planned for both forms. For
programs without gradients alone, because backward reads the scores again, by edge then, and training was no faster.
"""

from __future__ import annotations

from collections.abc import Callable

from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import COMPOSED_VIAS, Builder, OpProgram
from dejax.rgnn.ir.products import Product
from dejax.rgnn.passes.dce import dce
from dejax.rgnn.passes.rules import Match, Pat, Rule, Var, rules

_ENDS = ("source", "destination")
_WIDEST = 128  # a program has two vectors and two rows in registers


def scores_on_edges(
    program: OpProgram, counts: Counts, *, seconds: Callable[[OpProgram], float] | None = None
) -> OpProgram:
    """The pass. `seconds` predicts the time of a program; None: the form with scores on edges is taken."""
    found = _on_edges(program, counts)
    if found is program:
        return program
    found = dce(found, counts)
    return found if seconds is None or seconds(found) < seconds(program) else program


def _score(end: str) -> Pat:
    """The read of a score by pair: the inner product of a row and the vector of the pair's type."""
    inner = lambda spec: Product.parse(spec).is_inner  # noqa: E731
    pair = f"{end}_pair"
    made = Pat("linear", Var(f"{end}_rows"), Var(f"{end}_vectors"), via=f"{pair}.etype", spec=inner, name=end)
    return Pat("gather", made, via=pair)


def _one_vector(m: Match) -> bool:
    """Whether both products have one vector for each type: of several, edges would multiply each row by all."""
    made = [(m.at(end), m.at(f"{end}_rows")) for end in _ENDS]
    return all(op.width == 1 and op.dtype != "float64" and rows.width <= _WIDEST for op, rows in made)


def _sum_on_edges(b: Builder, m: Match) -> int:
    terms = [_terms(b, m, end) for end in _ENDS]
    if len({b.ops[t].shape for t in terms}) == 1:
        terms = [b.op("add", *terms)]
    sums = [b.op("sum_features", t, axes=(len(b.ops[t].shape) - 1,), keepdims=False) for t in terms]
    return sums[0] if len(sums) == 1 else b.op("add", *sums)


def _terms(b: Builder, m: Match, end: str) -> int:
    """The row of an edge's end times the vector of the edge's type, feature by feature."""
    pair, read = f"{end}_pair", m.at(f"{end}_rows")
    of_node = COMPOSED_VIAS.get((pair, read.attr("via"))) if read.name == "gather" else None
    rows, via = (f"{end}_rows", pair) if of_node is None else (read.args[0], of_node)
    row = b.op("gather", m.new(rows), via=via)
    vector = b.op("gather", m.new(f"{end}_vectors"), via="etype")
    row_shape, shape = b.ops[row].shape, b.ops[vector].shape
    if len(row_shape) < len(shape):
        row = b.op("reshape", row, shape=(*(1,) * (len(shape) - len(row_shape)), *row_shape))
    return b.op("mul", row, vector)


_on_edges = rules(Rule(Pat("add", _score("source"), _score("destination")), _sum_on_edges, where=_one_vector))
