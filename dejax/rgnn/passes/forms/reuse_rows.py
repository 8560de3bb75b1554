"""Elementwise functions of rows that the edges read anyway are computed on the edges.

    sum of m_e, largest -m_e, sum of m_e^2, with m = g.src(x)   read x_j alone, and not -x_j and x_j^2 from arrays

Compact materialization computes what depends on a node alone once for each node. Where the edges also read the row that
it is made of, a few operations in registers cost less than a second and a third row: several aggregations of one
message are one traversal then.
"""

from __future__ import annotations

from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import BINARY, UNARY, Builder, Op, OpProgram, Space
from dejax.rgnn.passes._rewrite import Rewrite

# Rows with fewer elements than this share a memory sector (32 bytes) with other rows.
_WIDE = 8
# Up to this number of operations on an element in registers costs no more than reading the element from memory.
_MOST = 4


def reuse_rows(program: OpProgram, counts: Counts) -> OpProgram:
    return _Reuse(program, counts).run()


class _Reuse(Rewrite):
    def __init__(self, program: OpProgram, counts: Counts) -> None:
        super().__init__(program, counts)
        self.read = {(op.args[0], op.attr("via")): i for i, op in reversed(list(enumerate(program.ops))) if _is_row(op)}

    def visit(self, builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        if not _is_row(op) or self._operations(op.args[0], op.attr("via"), index) not in range(1, _MOST + 1):
            return None
        return self._on_edges(builder, op.args[0], op.attr("via"))

    def _operations(self, value: int, via: str, before: int) -> int:
        """How many operations compute the value from a row that edges read already; more than `_MOST` if none does."""
        found, waiting = 0, [value]
        while waiting and found <= _MOST:  # a value of two readers counts twice, so that the count may double with each
            at = waiting.pop()
            op = self.program.ops[at]
            if op.name == "const" or self.read.get((at, via), before) < before:
                continue
            by_element = op.name in UNARY | BINARY and {self.program.ops[a].shape for a in op.args} <= {op.shape, ()}
            if op.space != Space.NODE or not by_element:
                return _MOST + 1
            found += 1
            waiting += set(op.args)
        return found

    def _on_edges(self, builder: Builder, value: int, via: str) -> int:
        op = self.program.ops[value]
        if op.name == "const":
            return builder.const(op.attr("value"), op.dtype, Space.EDGE)
        if (value, via) in self.read and self.read[value, via] in self.new:
            return self.new[self.read[value, via]]
        return builder.op(op.name, *(self._on_edges(builder, a, via) for a in op.args), **dict(op.attrs))


def _is_row(op: Op) -> bool:
    return op.name == "gather" and op.space == Space.EDGE and op.attr("via") in ("src", "dst") and op.width >= _WIDE
