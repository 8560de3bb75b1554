"""Products of sums of rows are sums of products, each where its rows come from.

    (x_j + x_i) @ W                  becomes    x_j @ W + x_i @ W
    (x_j + r_e) @ W                  becomes    x_j @ W + (r @ W)_e,  r a vector for each edge type

`compact` then multiplies once for each node, pair or type. Sums that cancel keep their digits: a difference stays
(positions of neighbours, or rows without the mean of their type, may be close), and with `exact` all sums stay. A sum
with rows of edges stays, too, because each edge would be multiplied all the same. Products of terms of float16 may be
beyond its range, and are float32.
"""

from __future__ import annotations

from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import Builder, Op, OpProgram, Space, is_float
from dejax.rgnn.ir.products import Product
from dejax.rgnn.passes._rewrite import Rewrite, as_dtype, in_range, is_anchor, origins


def split_sums(program: OpProgram, counts: Counts, *, exact: bool = False) -> OpProgram:
    return program if exact else _SplitSums(program, counts).run()


class _SplitSums(Rewrite):
    def visit(self, builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        """See `Rewrite`."""
        if op.name != "linear" or op.space != Space.EDGE or not is_float(op.dtype) or op.attr("via") == "self":
            return None
        if not Product.parse(op.attr("spec")).is_forward or not is_float(self.program.ops[op.args[0]].dtype):
            return None
        terms = self.terms(op.args[0])
        if terms is None:
            return None
        dtype = in_range(op.dtype)
        rows = self.program.ops[op.args[0]].dtype
        w = args[1] if dtype == op.dtype else as_dtype(builder, args[1], dtype)
        total, *others = (
            builder.op("linear", as_dtype(builder, self.new[term], rows), w, **dict(op.attrs)) for term in terms
        )
        for made in others:
            total = builder.op("add", total, made)
        return as_dtype(builder, total, op.dtype)

    def terms(self, value: int) -> list[int] | None:
        """The terms of a sum whose rows come from several places, one term for each place; None for other rows."""
        found = self.leaves(value, outer=True)
        if len(found) < 2:
            return None
        places = [origins(self.program, t) for t in found]
        if any(not p or "edge" in p or not is_anchor(p) for p in places):
            return None
        shape = self.program.ops[value].shape
        suits = all(self.program.ops[t].shape == shape and not self.is_negative(t) for t in found)
        return found if suits else None

    def is_negative(self, value: int) -> bool:
        """Whether a term is written as a negative: its sum is a difference."""
        op = self.program.ops[value]
        while op.name in ("gather", "reshape", "cast"):
            op = self.program.ops[op.args[0]]
        factors = [self.program.ops[a] for a in op.args] if op.name in ("mul", "div") else []
        return op.name == "neg" or any(f.name == "const" and f.attr("value") < 0 for f in factors)

    def leaves(self, value: int, outer: bool = False) -> list[int]:
        op = self.program.ops[value]
        if op.name != "add" or not (outer or self.read_once(value)) or len(origins(self.program, value)) < 2:
            return [value]
        left, right = op.args
        return self.leaves(left) + self.leaves(right)
