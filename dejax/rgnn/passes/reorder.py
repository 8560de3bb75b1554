"""Linear operator reordering (Hector, section 3.2.3): weights meet weights before they meet rows.

`(x W_r) . a_r` becomes `x . (W_r a_r)`, and `(x W_r) V_r` becomes `x (W_r V_r)` where that is less work: the product of
two weights is made once for each type, the product with a row once for each row. `((x W_r) . y) c_r` becomes
`(x (c_r W_r)) . y`, so that no edge reads a scalar of its type. Products of float16 weights are float32: they may be
beyond float16's range where the products with rows are not.
"""

from __future__ import annotations

from dejax.rgnn.ir.inter import TYPE_VIA, Builder, Op, Program
from dejax.rgnn.ir.products import Product
from dejax.rgnn.passes._rewrite import Counts, Rewrite, as_dtype, scale_of_weight, widened

_PLAIN = Product.parse("k,kn->n")
_INNER, _INNER_BY_HEAD = Product.parse("k,k->"), Product.parse("hk,hk->h")
# The bytes that reading a scalar by type costs an edge, whose types need not be in the order of the traversal: one
# burst.
_TYPED_READ_BYTES = 64


def reorder(program: Program, counts: Counts) -> Program:
    return _Reordering(program, counts).run()


class _Reordering(Rewrite):
    def visit(self, builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        if op.name == "mul":
            return self.scaled_inner_product(builder, op)
        if op.name == "dot":
            return self.dot_with_vector_of_type(builder, op)
        return self.product_of_product(builder, op) if op.name == "linear" else None

    def scaled_inner_product(self, builder: Builder, op: Op) -> int | None:
        """`((x W) . y) c` as `(x (c W)) . y`."""
        found = self.inner_product_and_scale(op)
        if found is None:
            return None
        scale, other, linear = found
        x, w = self.new[linear.args[0]], widened(builder, self.new[linear.args[1]])
        factor, shape = scale_of_weight(builder, self.new[scale]), self.program.ops[scale].shape
        if shape:
            factor = builder.op("reshape", factor, shape=(*shape, 1, 1))
        product = builder.op("linear", x, builder.op("mul", w, factor), **dict(linear.attrs))
        return as_dtype(builder, builder.op("dot", product, self.new[other]), op.dtype)

    def inner_product_and_scale(self, op: Op) -> tuple[int, int, Op] | None:
        """Of `((x W) . y) c` the values c and y, and the operator `x W`; None where `op` is something else."""
        ops = self.program.ops
        for value, factor in (op.args, op.args[::-1]):
            dot, scale = ops[value], self.value_of_type(factor)
            if dot.name != "dot" or scale is None or not self.read_once(value):
                continue
            for product, other in (dot.args, dot.args[::-1]):
                linear = ops[product]
                if linear.name == "linear" and self.read_once(product) and self.takes_scale(linear, scale, op):
                    return scale, other, linear
        return None

    def takes_scale(self, linear: Op, scale: int, op: Op) -> bool:
        """Whether a scalar by type (and head) can be multiplied into the weight, and that moves fewer bytes."""
        weight, by = self.program.ops[linear.args[1]], self.program.ops[scale]
        product = Product.parse(linear.attr("spec"))
        if not product.is_forward or ("h" in product.out and "h" not in product.right):
            return False
        typed = linear.attr("via") == TYPE_VIA.get(op.space) and weight.dtype == by.dtype
        moved = 3 * self.counts.rows(weight.space) * weight.row_bytes
        return typed and by.shape in ((), weight.shape[:-2]) and moved < self.counts.rows(op.space) * _TYPED_READ_BYTES

    def dot_with_vector_of_type(self, builder: Builder, op: Op) -> int | None:
        """`(x W) . a` as `x . (W a)`; another inner product with a vector of the type as a `linear`."""
        for vector, x in (op.args, op.args[::-1]):
            constant = self.value_of_type(vector)
            if constant is None:
                continue
            made, via = self.program.ops[x], TYPE_VIA[op.space]
            inner = _INNER if len(made.shape) == 1 else _INNER_BY_HEAD
            linear = made.name == "linear" and made.attr("via") == via
            if linear and (product := Product.parse(made.attr("spec"))).is_forward and self.only_in_such_dots(x):
                weights, rows = product.weights_first(inner)
                w = widened(builder, self.new[made.args[1]])
                w = builder.op("linear", self.new[constant], w, spec=str(weights.swapped), via="self")
                row = builder.op("linear", self.new[made.args[0]], w, spec=str(rows), via=via)
                return as_dtype(builder, row, op.dtype)
            if len(made.shape) > 2:
                return None
            return builder.op("linear", self.new[x], self.new[constant], spec=str(inner), via=via)
        return None

    def product_of_product(self, builder: Builder, op: Op) -> int | None:
        """`(x W) V` as `x (W V)`, where that is fewer multiplications."""
        ops, via = self.program.ops, op.attr("via")
        inner = ops[op.args[0]]
        same = inner.name == "linear" and inner.attr("spec") == op.attr("spec") == str(_PLAIN)
        if not same or not inner.attr("via") == via != "self" or not self.read_once(op.args[0]):
            return None
        (k,), (n,), (m,) = ops[inner.args[0]].shape, inner.shape, op.shape
        rows, types = self.counts.rows(op.space), self.counts.rows(ops[op.args[1]].space)
        if rows * (k * n + n * m) <= rows * k * m + types * k * n * m:
            return None
        weights, by_row = _PLAIN.weights_first(_PLAIN)
        w = widened(builder, self.new[op.args[1]])
        w = builder.op("linear", self.new[inner.args[1]], w, spec=str(weights), via="self")
        return as_dtype(builder, builder.op("linear", self.new[inner.args[0]], w, spec=str(by_row), via=via), op.dtype)

    def value_of_type(self, value: int) -> int | None:
        """The value by type that `value` gathers, if it does."""
        op = self.program.ops[value]
        typed = op.name == "gather" and op.attr("via") == TYPE_VIA.get(op.space)
        return op.args[0] if typed else None

    def only_in_such_dots(self, value: int) -> bool:
        """Whether only inner products with vectors of the type read the value."""
        readers = [self.program.ops[u] for u in self.users[value]]
        return value not in self.program.outputs and all(
            u.name == "dot" and any(self.value_of_type(a) is not None for a in u.args) for u in readers
        )

    def read_once(self, value: int) -> bool:
        return value not in self.program.outputs and len(self.users[value]) == 1
