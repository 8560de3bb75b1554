"""Products move to the rows that they are made of: out of scales, and out of sums of rows of several origins.

    (c_e * x_j) @ W                  becomes    c_e * (x_j @ W),  c one number for each edge
    (c_r * x_j) @ W_r                becomes    x_j @ (c_r W_r),  c one number for each edge type
    (x_j + x_i) @ W                  becomes    x_j @ W + x_i @ W
    (x_j + r_e) @ W                  becomes    x_j @ W + (r @ W)_e,  r a vector for each edge type

`compact` then multiplies once for each node, pair or type. Sums that cancel keep their digits: a difference stays
(positions of neighbours, or rows without the mean of their type, may be close), and with `exact` all sums stay. A sum
with rows of edges stays, too, because each edge would be multiplied all the same. Products of float16 rows without
their scale may be beyond its range, and are float32.
"""

from __future__ import annotations

from dejax.rgnn.ir.inter import Builder, Op, Program, Space, is_float
from dejax.rgnn.ir.products import Product
from dejax.rgnn.passes._rewrite import Counts, Rewrite, as_dtype, in_range, origins, scale_of_weight, widened


def scale_products(program: Program, counts: Counts, *, shared: bool = False) -> Program:
    """The first two lines, for weights by type or, after `aggregate`, which may do better, for `shared` weights."""
    return _Scales(program, counts, "all" if shared else "etype").run()


def split_sums(program: Program, counts: Counts, *, exact: bool = False) -> Program:
    """The last two lines."""
    return program if exact else _Sums(program, counts).run()


class _Scales(Rewrite):
    def __init__(self, program: Program, counts: Counts, via: str) -> None:
        super().__init__(program, counts)
        self.via = via

    def visit(self, builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        """See `Rewrite`."""
        if op.name != "linear" or op.space != Space.EDGE or not is_float(op.dtype):
            return None
        scaled = self.program.ops[op.args[0]]
        if scaled.name not in ("mul", "div") or len(self.users[op.args[0]]) > 1 or op.args[0] in self.program.outputs:
            return None
        if not Product.parse(op.attr("spec")).is_forward or op.attr("via") != self.via:
            return None
        for at in (0, 1) if scaled.name == "mul" else (1,):
            scale, row = scaled.args[at], scaled.args[1 - at]
            factor, rows = self.program.ops[scale], self.program.ops[row]
            if rows.shape != scaled.shape or factor.shape not in ((), (1,)) or {factor.dtype, rows.dtype} != {op.dtype}:
                continue
            made = self.by_weight(builder, op, scaled, scale, row) or self.by_row(builder, op, scaled, scale, row)
            if made is not None:
                return made
        return None

    def by_weight(self, builder: Builder, op: Op, scaled: Op, scale: int, row: int) -> int | None:
        """A scale by type in the weight of the type."""
        read = self.program.ops[scale]
        if read.name != "gather" or read.attr("via") != "etype" or self.via != "etype":
            return None
        w = widened(builder, self.new[op.args[1]])
        factor = self.new[read.args[0]]
        if read.shape:
            factor = builder.op("reshape", factor, shape=())
        w = builder.op(scaled.name, w, scale_of_weight(builder, factor))
        return as_dtype(builder, builder.op("linear", self.new[row], w, **dict(op.attrs)), op.dtype)

    def by_row(self, builder: Builder, op: Op, scaled: Op, scale: int, row: int) -> int | None:
        """A scale that is finer than the row, after the product."""
        types = {"etype"} if op.attr("via") == "etype" else set()
        of_row = origins(self.program, row) | types
        finer = origins(self.program, scale) - of_row
        if not finer or "edge" in of_row or not _is_anchor(of_row):
            return None
        product = builder.op("linear", self.new[row], widened(builder, self.new[op.args[1]]), **dict(op.attrs))
        factor = self.new[scale]
        shape = (1,) * len(op.shape)
        if self.program.ops[scale].shape not in ((), shape):
            factor = builder.op("reshape", factor, shape=shape)
        return as_dtype(builder, builder.op(scaled.name, product, factor), op.dtype)


def _is_anchor(maps: set[str]) -> bool:
    """Whether `compact` computes a value of these maps once for each node, type or pair."""
    return any(maps <= within for within in ({"src", "etype", "source_pair"}, {"dst", "etype", "destination_pair"}))


class _Sums(Rewrite):
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
        """The terms of a sum of rows from several places, each of one place; None for other rows."""
        found = self.leaves(value, outer=True)
        if len(found) < 2:
            return None
        places = [origins(self.program, t) for t in found]
        if any(not p or "edge" in p or not _is_anchor(p) for p in places):
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
        alone = outer or (len(self.users[value]) == 1 and value not in self.program.outputs)
        if op.name != "add" or not alone or len(origins(self.program, value)) < 2:
            return [value]
        left, right = op.args
        return self.leaves(left) + self.leaves(right)
