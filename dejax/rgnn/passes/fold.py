"""Two typed linears in a row become one: the rest of linear operator reordering (Hector, section 3.2.3).

    (x_j W_t(j)) V_r   =   x_j (W_t(r) V_r)   where all edges of type r come from nodes of one type t(r)

as the keys and messages of a heterogeneous graph transformer do on a graph with typed relations. The product of weights
is made once for each edge type, and the node-wise product is not made at all.
"""

from __future__ import annotations

from dejax.rgnn.ir.inter import Builder, Op, Program
from dejax.rgnn.passes._rewrite import Counts, rebuild

# (spec of x W, spec of (x W) V) -> (spec of W V, spec of x (W V)).
_FOLDED = {
    ("k,kn->n", "k,kn->n"): ("jk,kn->jn", "k,kn->n"),
    ("k,hkn->hn", "hk,hkn->hn"): ("hjk,hkn->hjn", "k,hkn->hn"),
}


def fold(program: Program, counts: Counts) -> Program:
    users = program.users()
    new: dict[int, int] = {}

    def inner(op: Op) -> Op | None:
        """The node-wise linear whose rows a typed linear on edges takes, where the two are better made one."""
        if not counts.typed_sources or op.name != "linear" or op.attr("via") != "etype":
            return None
        read = program.ops[op.args[0]]
        if read.name != "gather" or read.attr("via") != "src":
            return None
        first = program.ops[read.args[0]]
        if first.name != "linear" or first.attr("via") != "ntype":
            return None
        if (first.attr("spec"), op.attr("spec")) not in _FOLDED or not _only_read_so(read.args[0]):
            return None
        return first if _is_cheaper(program, first, op, counts) else None

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

    def visit(builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int:
        first = inner(op)
        if first is None:
            made = builder.copy(op, args, builder.line)
        else:
            of_weights, of_rows = _FOLDED[first.attr("spec"), op.attr("spec")]
            by_edge_type = builder.op("gather", new[first.args[1]], via="source_type")
            product = builder.op("linear", by_edge_type, args[1], spec=of_weights, via="self")
            row = builder.op("gather", new[first.args[0]], via="src")
            made = builder.op("linear", row, product, spec=of_rows, via="etype")
        new[index] = made
        return made

    return rebuild(program, visit)


def _is_cheaper(program: Program, first: Op, op: Op, counts: Counts) -> bool:
    """By bytes: rows of x in place of the node-wise product's, for each pair, against making that product."""
    x = program.ops[first.args[0]]
    rows = min(counts.edges, counts.source_pairs)
    weights = counts.edge_types * (program.ops[first.args[1]].row_bytes + 2 * program.ops[op.args[1]].row_bytes)
    return rows * (x.row_bytes - first.row_bytes) + weights < counts.nodes * (x.row_bytes + first.row_bytes)
