"""Two typed linears in a row become one: the rest of linear operator reordering (Hector, section 3.2.3).

    (x_j W_t(j) + b_t(j)) V_r   =   x_j (W_t(r) V_r) + b_t(r) V_r

where all edges of type r come from nodes of one type t(r), as the keys and messages of a heterogeneous graph
transformer do on a graph with typed relations. The products of weights are made once for each edge type, and the
node-wise product is not made at all.
"""

from __future__ import annotations

from dataclasses import dataclass

from dejax.rgnn.ir.inter import Builder, Op, Program
from dejax.rgnn.passes._rewrite import Counts, rebuild

# (spec of x W, spec of (x W) V) -> (spec of W V, spec of x (W V)); a bias is multiplied as rows are, by the second.
_FOLDED = {
    ("k,kn->n", "k,kn->n"): ("jk,kn->jn", "k,kn->n"),
    ("k,hkn->hn", "hk,hkn->hn"): ("hjk,hkn->hjn", "k,hkn->hn"),
}


@dataclass(frozen=True, slots=True)
class _Inner:
    """The node-wise product whose rows are multiplied again: `x @ w`, and `bias` (by node type) where one is added."""

    linear: Op
    bias: int | None


def fold(program: Program, counts: Counts) -> Program:
    users = program.users()
    new: dict[int, int] = {}

    def inner(op: Op) -> _Inner | None:
        """The node-wise product whose rows a typed linear on edges takes, where the two are better made one."""
        if not counts.typed_sources or op.name != "linear" or op.attr("via") != "etype":
            return None
        read = program.ops[op.args[0]]
        if read.name != "gather" or read.attr("via") != "src":
            return None
        first = node_wise(read.args[0])
        if first is None or (first.linear.attr("spec"), op.attr("spec")) not in _FOLDED:
            return None
        if not _only_read_so(read.args[0]):
            return None
        return first if _is_cheaper(program, first.linear, op, counts) else None

    def node_wise(value: int) -> _Inner | None:
        op = program.ops[value]
        if op.name == "linear" and op.attr("via") == "ntype":
            return _Inner(op, None)
        if op.name != "add":
            return None
        for product, bias in (op.args, op.args[::-1]):
            linear, read = program.ops[product], program.ops[bias]
            typed = all(o.attr("via") == "ntype" and o.shape == op.shape for o in (linear, read))
            if typed and linear.name == "linear" and read.name == "gather" and users[product] == [value]:
                return None if product in program.outputs else _Inner(linear, read.args[0])
        return None

    def _only_read_so(value: int) -> bool:
        """Whether a value is read at the sources of typed linears alone, so that it need not be made."""
        if value in program.outputs:
            return False
        for u in users[value]:
            if program.ops[u].name != "gather" or program.ops[u].attr("via") != "src" or u in program.outputs:
                return False
            for v in users[u]:
                reader = program.ops[v]
                if reader.name != "linear" or reader.attr("via") != "etype" or reader.args[0] != u:
                    return False
        return True

    def visit(builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        first = inner(op)
        if first is None:
            return None
        of_weights, of_rows = _FOLDED[first.linear.attr("spec"), op.attr("spec")]
        x, w = (new[a] for a in first.linear.args)
        by_edge_type = builder.op("gather", w, via="source_type")
        product = builder.op("linear", by_edge_type, args[1], spec=of_weights, via="self")
        bias = None
        if first.bias is not None:  # made before the product, whose kernel can add it then
            bias = builder.op("gather", new[first.bias], via="source_type")
            bias = builder.op("linear", bias, args[1], spec=op.attr("spec"), via="self")
        made = builder.op("linear", builder.op("gather", x, via="src"), product, spec=of_rows, via="etype")
        return made if bias is None else builder.op("add", made, builder.op("gather", bias, via="etype"))

    return rebuild(program, visit, new)


def _is_cheaper(program: Program, first: Op, op: Op, counts: Counts) -> bool:
    """By bytes: rows of x in place of the node-wise product's, for each pair, against making that product."""
    x = program.ops[first.args[0]]
    rows = min(counts.edges, counts.source_pairs)
    weights = counts.edge_types * (program.ops[first.args[1]].row_bytes + 2 * program.ops[op.args[1]].row_bytes)
    return rows * (x.row_bytes - first.row_bytes) + weights < counts.nodes * (x.row_bytes + first.row_bytes)
