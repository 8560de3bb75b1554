"""Products of nodes that are added become one product: the rows are added first.

    a_v @ W + b_v @ W                  becomes    (a_v + b_v) @ W
    sum over v of x_v^T a_v + the same with b_v    becomes    sum over v of x_v^T (a_v + b_v)

Backward makes such sums where a program multiplies both ends of an edge by one weight: the gradients of the two ends
meet at the node, and in the gradient of the weight. `combine_products` does the same for edges, before compaction.
Rows of 16 bits stay: their sum would be rounded once more.
"""

from __future__ import annotations

from dejax.rgnn.ir.inter import Builder, Space
from dejax.rgnn.passes.rules import Match, Pat, Rule, Var, rules


def _are_rows_of_one_product(m: Match) -> bool:
    one, two, left, right = (m.at(name) for name in ("one", "two", "left", "right"))
    if m["one"] == m["two"] or one.attrs != two.attrs or m.op.dtype not in ("float32", "float64"):
        return False
    kinds = {(rows.space, rows.shape, rows.dtype) for rows in (left, right)}
    return kinds == {(Space.NODE, left.shape, m.op.dtype)} and "gather" not in (left.name, right.name)


def _added(b: Builder, m: Match) -> int:
    return b.op("add", m.new("left"), m.new("right"))


combine_node_products = rules(
    Rule(
        Pat(
            "add",
            Pat("linear", Var("left"), Var("w"), name="one", once=True),
            Pat("linear", Var("right"), Var("w"), name="two", once=True),
        ),
        lambda b, m: b.op("linear", _added(b, m), m.new("w"), **dict(m.at("one").attrs)),
        where=_are_rows_of_one_product,
    ),
    Rule(
        Pat(
            "add",
            Pat("outer", Var("x"), Var("left"), name="one", once=True),
            Pat("outer", Var("x"), Var("right"), name="two", once=True),
        ),
        lambda b, m: b.op("outer", m.new("x"), _added(b, m), **dict(m.at("one").attrs)),
        where=_are_rows_of_one_product,
    ),
)
