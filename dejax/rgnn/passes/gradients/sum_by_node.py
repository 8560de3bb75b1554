"""A sum over all edges becomes sums over the edges of each node, then a sum over the nodes.

    sum over edges e of m_e   =   sum over nodes v of (sum over edges e into v of m_e)

The gradient of a vector that all edges share, as GATv2's attention vector, is such a sum of rows that are made of both
ends of an edge. By nodes it is one more accumulator of the traversal that reads these rows anyway. Without the nodes in
between, all rows of the edges would be written and read again.
"""

from __future__ import annotations

from dejax.rgnn.cost.work import Counts, Work
from dejax.rgnn.ir.inter import Builder, Op, OpProgram, Space
from dejax.rgnn.passes._rewrite import Rewrite, as_dtype, in_range, live

_ENDS = ("dst", "src")


def sum_by_node(program: OpProgram, counts: Counts) -> OpProgram:
    return _SumsByNode(program, counts).run()


class _SumsByNode(Rewrite):
    def visit(self, builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        if not op.is_sum or op.attr("via") != "all":
            return None
        rows = self.program.ops[op.args[0]]
        via = self._end(op.args[0])
        # Bytes: sums of nodes are written and read again, rows of edges are read once.
        by_node = Work().move(2 * self.counts.nodes, op.row_bytes)
        if by_node.seconds() > Work().move(self.counts.edges, op.row_bytes).seconds():
            return None
        if rows.space != Space.EDGE or op.args[0] in self.program.outputs or via is None:
            return None
        # In 16 bits the sums of nodes would be rounded once more.
        dtype = "float32" if op.dtype == "bfloat16" else in_range(op.dtype)
        sums = builder.op("reduce", as_dtype(builder, args[0], dtype), via=via, op="sum")
        return as_dtype(builder, builder.op("reduce", sums, via="all", op="sum"), op.dtype)

    def _end(self, value: int) -> str | None:
        """The end of the edges (source or destination) by whose nodes to sum: one on whose rows the value depends.

        Rather one by which the program sums other values of the same rows: they share a traversal.
        """
        ops = self.program.ops
        read = {v for v in live(self.program, [value]) if ops[v].name == "gather" and ops[v].space == Space.EDGE}
        ends = [via for via in _ENDS if any(ops[v].attr("via") == via for v in read)]
        wide = {v for v in read if ops[v].width >= ops[value].width and ops[v].attr("via") != "all"}

        def shared(via: str) -> int:
            sums = [op.args[0] for op in ops if op.name == "reduce" and op.attr("via") == via]
            return max((len(wide & live(self.program, [v])) for v in sums), default=0)

        return max(ends, key=shared, default=None)
