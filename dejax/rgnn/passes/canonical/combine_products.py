"""Products that are added become one product, where they share the rows or the weight.

    x_j @ W_r + x_j @ U                  becomes    x_j @ (W_r + U)
    sum over b of a_rb (x_j @ V_b)       becomes    x_j @ (sum over b of a_rb V_b)
    (a_r[:, None] * (x_j @ V)).sum(0)    becomes    the same, with V of several heads
    sum over r of g.sum_to_dst(m_r (x_j @ W_r)), a loop over relations    becomes    one sum of one product
    c_r (x_j @ W_r)                      becomes    x_j @ (c_r W_r)
    x_j @ W + y_j @ W                    becomes    (x_j + y_j) @ W

The weights are added once for each type, and rows are read and multiplied once. Rows are added where they come from one
place alone (`split_sums` does the reverse for the others). Weights of float16 are added as float32.
"""

from __future__ import annotations

from dataclasses import dataclass

from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import Builder, Op, OpProgram, Space, is_float
from dejax.rgnn.ir.products import Product
from dejax.rgnn.passes._rewrite import Rewrite, as_dtype, origins, scale_of_weight, widened

# From this number of shared weights on, one weight for each type is less work: edges then read a single row.
_MANY = 3


@dataclass(frozen=True, slots=True)
class _ProductTerm:
    """A term of a sum, by old numbers: scales (value, power) times a product, or any other value."""

    value: int
    negative: bool
    scales: tuple[tuple[int, int], ...]
    product: Op | None


def combine_products(program: OpProgram, counts: Counts) -> OpProgram:
    return _CombineProducts(program, counts).run()


class _CombineProducts(Rewrite):
    def __init__(self, program: OpProgram, counts: Counts) -> None:
        super().__init__(program, counts)
        self.inside: set[int] = set()  # sums that are terms of another sum

    def run(self) -> OpProgram:
        for _i, op in enumerate(self.program.ops):
            if op.name in ("add", "sub"):
                self.inside.update(
                    a for a in op.args if self.program.ops[a].name in ("add", "sub") and self.read_once(a)
                )
        return super().run()

    def visit(self, builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        """See `Rewrite`."""
        if not is_float(op.dtype) or index in self.inside:
            return None
        if op.space == Space.NODE and op.name in ("add", "sub"):
            return self.sums_over_edges(builder, op, index)
        if op.space != Space.EDGE:
            return None
        if op.name == "sum_features":
            return self.weighted_heads(builder, op)
        if op.name == "mul":
            term = self.term(index, negative=False)
            if term.product is None or not term.scales or term.product.attr("via") != "etype":
                return None
            return as_dtype(builder, self.product(builder, [term]), op.dtype)
        if op.name not in ("add", "sub"):
            return None
        terms = self.terms(index)
        groups = self.groups(terms)
        return None if len(groups) == len(terms) else self.total(builder, groups, op)

    def sums_over_edges(self, builder: Builder, op: Op, index: int) -> int | None:
        """Sums over edges of products that become one product, as of a loop over relations: one sum."""
        sums, others, terms = list[int](), list[_ProductTerm](), list[_ProductTerm]()
        for leaf in self.leaves(index):
            total = self.program.ops[leaf.value]
            first = self.program.ops[sums[0]] if sums else total
            if total.is_sum and self.read_once(leaf.value) and total.attrs == first.attrs and total.dtype == op.dtype:
                rows = self.program.ops[total.args[0]]
                if rows.space == Space.EDGE and rows.shape == op.shape and self.read_once(total.args[0]):
                    sums.append(leaf.value)
                    terms += self.terms(total.args[0], leaf.negative)
                    continue
            others.append(leaf)
        groups = self.groups(terms)
        if len(sums) < 2 or len(groups) > 1 or groups[0][0].product is None:
            return None
        one = builder.op("reduce", self.total(builder, groups, op), **dict(self.program.ops[sums[0]].attrs))
        return self.signed(builder, [(one, False), *((self.new[t.value], t.negative) for t in others)])

    def leaves(self, value: int, negative: bool = False, outer: bool = True) -> list[_ProductTerm]:
        """The terms of a sum, products or other values."""
        op = self.program.ops[value]
        if op.name in ("add", "sub") and is_float(op.dtype) and (outer or self.read_once(value)):
            left, right = op.args
            return self.leaves(left, negative, False) + self.leaves(right, negative ^ (op.name == "sub"), False)
        return [_ProductTerm(value, negative, (), None)]

    def weighted_heads(self, builder: Builder, op: Op) -> int | None:
        """`(a_r[:, None] * (x @ V)).sum(0)` as a product by the sum of `a_rh V_h` over the heads h."""
        ops, product = self.program.ops, self.program.ops[op.args[0]]
        if op.attr("axes") != (0,) or op.attr("keepdims") or product.name != "mul" or not self.read_once(op.args[0]):
            return None
        for rows, scale in (product.args, product.args[::-1]):
            numbers, read = self.through_reshape(ops[scale]), ops[rows]
            made = ops[read.args[0]] if read.name == "gather" and self.read_once(rows) else read
            is_product = made.name == "linear" and (made.attr("spec"), made.attr("via")) == ("k,hkn->hn", "all")
            typed = numbers.name == "gather" and numbers.attr("via") == "etype"
            if not (is_product and typed and ops[scale].shape == (made.shape[0], 1) and made.shape[0] >= _MANY):
                continue
            if read.name == "gather" and (read.attr("via") not in ("src", "dst") or not self.read_once(read.args[0])):
                continue
            if len({made.dtype, numbers.dtype, op.dtype}) > 1 or (read is made and not self.read_once(rows)):
                continue
            factor = scale_of_weight(builder, self.new[numbers.args[0]])
            factor = builder.op("reshape", factor, shape=(made.shape[0], 1, 1))
            w = builder.lift(widened(builder, self.new[made.args[1]]), Space.EDGE_TYPE)
            w = builder.op("sum_features", builder.op("mul", w, factor), axes=(0,), keepdims=False)
            x = self.new[made.args[0]]
            x = builder.op("gather", x, via=read.attr("via")) if read is not made else x
            return as_dtype(builder, builder.op("linear", x, w, spec="k,kn->n", via="etype"), op.dtype)
        return None

    def through_reshape(self, op: Op) -> Op:
        return self.program.ops[op.args[0]] if op.name == "reshape" else op

    def terms(self, value: int, negative: bool = False) -> list[_ProductTerm]:
        """The terms of a sum, with their products."""
        return [self.term(t.value, t.negative) for t in self.leaves(value, negative)]

    def term(self, value: int, negative: bool) -> _ProductTerm:
        scales: list[tuple[int, int]] = []
        at, whole = value, self.program.ops[value]
        while True:
            op = self.program.ops[at]
            if op.shape != whole.shape or op.dtype != whole.dtype or not (at == value or self.read_once(at)):
                break
            if op.name == "linear" and op.attr("via") in ("etype", "all") and self.read_once(at):
                if Product.parse(op.attr("spec")).is_forward:
                    return _ProductTerm(value, negative, tuple(scales), op)
                break
            found = self.scale(op)
            if found is None:
                break
            at, scale, power = found
            scales.append((scale, power))
        return _ProductTerm(value, negative, (), None)

    def scale(self, op: Op) -> tuple[int, int, int] | None:
        """For a row times (or over) one number by type or shared: a triple of row, number and power. Else None."""
        if op.name not in ("mul", "div"):
            return None
        for at in (0, 1) if op.name == "mul" else (1,):
            scale = self.program.ops[op.args[at]]
            read = scale.name == "gather" and scale.attr("via") in ("etype", "all")
            if (read or scale.name == "const") and scale.width == 1 and scale.dtype == op.dtype:
                return op.args[1 - at], op.args[at], 1 if op.name == "mul" or at == 0 else -1
        return None

    def groups(self, terms: list[_ProductTerm]) -> list[list[_ProductTerm]]:
        """Groups of terms with the same rows or, without scales, the same weight; each other term is its own group."""
        found: dict[object, list[_ProductTerm]] = {}
        key: object
        for t in terms:
            key = len(found) if t.product is None else ("rows", t.product.args[0], t.product.attr("spec"))
            found.setdefault(key, []).append(t)
        found = {(key, at): part for key, group in found.items() for at, part in enumerate(self.worthwhile(group))}
        merged: dict[object, list[_ProductTerm]] = {}
        for key, group in found.items():
            t, op = group[0], group[0].product
            if len(group) == 1 and op is not None and not t.scales:
                place = frozenset(origins(self.program, op.args[0]))
                if is_float(self.program.ops[op.args[0]].dtype) and place and "edge" not in place and len(place) == 1:
                    key = ("weight", op.args[1], op.attr("spec"), op.attr("via"), place)
            merged.setdefault(key, []).extend(group)
        return list(merged.values())

    def worthwhile(self, group: list[_ProductTerm]) -> list[list[_ProductTerm]]:
        """The group, or each term alone where two products by shared weights would become one for each type."""
        typed = any(self.program.ops[s].attr("via") == "etype" for t in group for s, _ in t.scales)
        by_type = any(t.product is not None and t.product.attr("via") == "etype" for t in group)
        return [[t] for t in group] if typed and not by_type and len(group) < _MANY else [group]

    def total(self, builder: Builder, groups: list[list[_ProductTerm]], op: Op) -> int:
        total: int | None = None
        for group in groups:
            first = group[0]
            if len(group) == 1:
                value, negative = self.new[first.value], first.negative
            else:
                value, negative = self.product(builder, group), False
            if total is None:
                total = builder.op("neg", value) if negative else value
            else:
                total = builder.op("sub" if negative else "add", total, value)
        assert total is not None
        return as_dtype(builder, total, op.dtype)

    def product(self, builder: Builder, group: list[_ProductTerm]) -> int:
        """The one product of a group."""
        products = [t.product for t in group if t.product is not None]
        first = products[0]
        if len({p.args[0] for p in products}) > 1:  # one weight
            rows = self.signed(
                builder, [(self.new[p.args[0]], t.negative) for p, t in zip(products, group, strict=True)]
            )
            rows = widened(builder, rows)
            return builder.op("linear", rows, self.new[first.args[1]], **dict(first.attrs))
        typed = any(p.attr("via") == "etype" for p in products)
        typed |= any(self.program.ops[s].attr("via") == "etype" for t in group for s, _ in t.scales)
        space, via = (Space.EDGE_TYPE, "etype") if typed else (Space.GRAPH, "all")
        weights = []
        for p, t in zip(products, group, strict=True):
            w = builder.lift(widened(builder, self.new[p.args[1]]), space)
            for scale, power in t.scales:
                w = builder.op("mul" if power > 0 else "div", w, self.scale_of(builder, scale, space))
            weights.append((w, t.negative))
        return builder.op(
            "linear", self.new[first.args[0]], self.signed(builder, weights), spec=first.attr("spec"), via=via
        )

    def scale_of(self, builder: Builder, scale: int, space: Space) -> int:
        read = self.program.ops[scale]
        if read.name == "const":
            return builder.const(read.attr("value"), read.dtype, space)
        value = self.new[read.args[0]]
        value = value if read.shape == () else builder.op("reshape", value, shape=())
        return scale_of_weight(builder, builder.lift(value, space))

    def signed(self, builder: Builder, values: list[tuple[int, bool]]) -> int:
        total: int | None = None
        for value, negative in sorted(values, key=lambda v: v[1]):
            if total is None:
                total = builder.op("neg", value) if negative else value
            else:
                total = builder.op("sub" if negative else "add", total, value)
        assert total is not None
        return total
