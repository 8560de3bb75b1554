"""Aggregate before transform, where that is less work.

    sum over edges into v of c_e (x_e W_r)   =   sum over types r of (sum over edges of type r into v of c_e x_e) W_r

The right side multiplies one row for each (destination, type) pair. The left side multiplies one row for each edge or,
compacted, for each (source, type) pair. Scalars `c_e` that multiply a whole row commute with the weight. A weight that
all edges share moves behind the whole sum:

    sum over edges into v of c_e (x_e W)   =   (sum over edges into v of c_e x_e) W
    sum over edges into v of (x_e W + b)   =   (sum over edges into v of x_e) W + degree_v b
    sum over edges into v of c_e (y_e + x_e W)   =   sum over edges into v of c_e y_e + (sum of c_e x_e) W

Where each `x_e W` is small because it cancels, the sum of `x_e` has lost the digits of the products. So with `exact`
shared weights and their biases stay on the edges.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dejax.rgnn.cost.work import Counts, Work
from dejax.rgnn.ir.inter import TYPE_VIA, Builder, Op, OpProgram, Space, is_float
from dejax.rgnn.ir.products import Product, with_axes
from dejax.rgnn.passes._rewrite import (
    Factor,
    aligned,
    as_dtype,
    factors,
    in_range,
    multiply,
    origins,
    rebuild,
    unless_empty,
    widened,
)
from dejax.rgnn.passes.dce import dce

_PAIR = {"dst": ("destination_pair", Space.DESTINATION_PAIR), "src": ("source_pair", Space.SOURCE_PAIR)}


def aggregate(program: OpProgram, counts: Counts, *, exact: bool = False) -> OpProgram:
    program = program if exact else _sums_apart(program, counts)
    users = program.users()
    new: dict[int, int] = {}

    def visit(builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        found = _summed_product(program, users, op)
        if found is None:
            return None
        linear, rest = found
        shared = linear.attr("via") == "all"
        if shared and exact:
            return None
        if not _aggregate_is_cheaper(program, linear, op, counts):
            return None
        pair_via, pair_space = (op.attr("via"), Space.NODE) if shared else _PAIR[op.attr("via")]
        summed = multiply(builder, [(new[linear.args[0]], 1), *aligned(builder, new, rest)], op.dtype)
        # Sums are float32: rows may be integers while their summed products are fractions, and float16 overflows.
        dtype = in_range(linear.dtype)
        by_pair = builder.op("reduce", as_dtype(builder, summed, dtype), via=pair_via, op="sum")
        w = as_dtype(builder, new[linear.args[1]], dtype)
        via = "all" if shared else TYPE_VIA[pair_space]
        by_pair = builder.op("linear", by_pair, w, spec=linear.attr("spec"), via=via)
        if shared:
            return as_dtype(builder, by_pair, op.dtype)
        return as_dtype(builder, builder.op("reduce", by_pair, via=f"{pair_via}.node", op="sum"), op.dtype)

    return rebuild(program, visit, new)


@dataclass(frozen=True, slots=True)
class _WeightedTerm:
    """One term of a sum of rows, as factors; the factor `moves` is a product that can be computed after the sum."""

    factors: tuple[Factor, ...]
    negative: bool
    moves: Factor | None = None

    @property
    def rest(self) -> list[Factor]:
        return [f for f in self.factors if f is not self.moves]


def _sums_apart(program: OpProgram, counts: Counts) -> OpProgram:
    """Sums the terms of rows separately if the product of one term can then be computed after its sum."""
    users = program.users()
    new: dict[int, int] = {}
    moved: list[int] = []

    def with_product(op: Op, term: _WeightedTerm) -> _WeightedTerm:
        found = _product_among(program, users, list(term.factors), op)
        if found is None or not _aggregate_is_cheaper(program, program.ops[found.value], op, counts):
            return term
        return replace(term, moves=found)

    def visit(builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        if not op.is_sum or op.attr("via") not in _PAIR or not is_float(op.dtype):
            return None
        terms = [with_product(op, t) for t in _terms(program, users, op.args[0])]
        if len(terms) < 2 or all(t.moves is None for t in terms):
            return None
        moved.append(index)
        return as_dtype(builder, _total(builder, program, new, op, terms), op.dtype)

    after = rebuild(program, visit, new)
    return dce(after, counts) if moved else program


def _terms(program: OpProgram, users: list[list[int]], value: int) -> list[_WeightedTerm]:
    """Writes a value as a sum of products; an inner sum is taken apart if nothing else reads it."""
    found = factors(program, value)
    shape = program.ops[value].shape
    for f in found:
        added = program.ops[f.value]
        if added.name not in ("add", "sub") or not is_float(added.dtype) or added.shape != shape:
            continue
        if f.power < 0 or f.inserts:
            continue
        if len(users[f.value]) > 1 or f.value in program.outputs:
            continue
        rest = tuple(g for g in found if g is not f)
        left, right = (_terms(program, users, a) for a in added.args)
        right = [replace(t, negative=t.negative ^ (added.name == "sub")) for t in right]
        return [replace(t, factors=(*t.factors, *rest)) for t in (*left, *right)]
    return [_WeightedTerm(tuple(found), negative=False)]


def _total(builder: Builder, program: OpProgram, new: dict[int, int], op: Op, terms: list[_WeightedTerm]) -> int:
    """The sum over edges, term by term; the terms whose products stay are one sum."""
    via = op.attr("via")
    # 16-bit dtypes hold neither counts nor sums of products from which other terms subtract most.
    wide = "float64" if op.dtype == "float64" else "float32"
    total: int | None = None

    def add(to: int | None, value: int, negative: bool) -> int:
        if to is None:
            return builder.op("neg", value) if negative else value
        return builder.op("sub" if negative else "add", to, value)

    def whole(value: int) -> int:
        value = as_dtype(builder, value, wide)
        return value if builder.ops[value].shape == op.shape else builder.op("broadcast", value, shape=op.shape)

    staying: int | None = None
    shared: list[tuple[int, bool]] = []
    for t in terms:
        if t.moves is not None:
            linear = program.ops[t.moves.value]
            product = new[t.moves.value]
            if linear.dtype != wide:
                weight = as_dtype(builder, new[linear.args[1]], wide)
                product = builder.op("linear", new[linear.args[0]], weight, **dict(linear.attrs))
            rows = multiply(builder, [(product, 1), *aligned(builder, new, t.rest)], op.dtype)
            total = add(total, builder.op("reduce", rows, via=via, op="sum"), t.negative)
            continue
        read = program.ops[t.factors[0].value]
        if len(t.factors) == 1 and read.name == "gather" and read.attr("via") == "all" and read.shape == op.shape:
            shared.append((new[read.args[0]], t.negative))
        else:
            staying = add(staying, whole(multiply(builder, aligned(builder, new, t.factors), op.dtype)), t.negative)
    if staying is not None:
        total = add(total, builder.op("reduce", staying, via=via, op="sum"), negative=False)
    for value, negative in shared:  # a shared value is added once for each edge
        degree = builder.op("count", via=via, dtype=wide)
        at_node = builder.op("gather", value, via="all", space=str(Space.NODE))
        if op.shape:
            degree = builder.op("reshape", degree, shape=(1,) * len(op.shape)) if len(op.shape) > 1 else degree
        # Nothing is added without edges, because a shared value may be infinite there.
        times = widened(builder, builder.op("mul", at_node, degree))
        total = add(total, unless_empty(builder, via, times, 0.0), negative)
    assert total is not None
    return total


def _summed_product(program: OpProgram, users: list[list[int]], op: Op) -> tuple[Op, list[Factor]] | None:
    """The grouped GEMM whose rows a reduction to nodes sums, and the factors of these rows that commute with it."""
    if not op.is_sum or op.attr("via") not in _PAIR:
        return None
    found = factors(program, op.args[0])
    moves = _product_among(program, users, found, op)
    return None if moves is None else (program.ops[moves.value], [f for f in found if f is not moves])


def _product_among(program: OpProgram, users: list[list[int]], found: list[Factor], op: Op) -> Factor | None:
    """The factor of summed rows that is a grouped GEMM, where the other factors commute with it."""
    linears = [f for f in found if program.ops[f.value].name == "linear"]
    if len(linears) != 1 or linears[0].power != 1 or linears[0].inserts:
        return None
    linear, rest = program.ops[linears[0].value], [f for f in found if f is not linears[0]]
    if not is_float(linear.dtype) or linear.attr("via") not in ("etype", "all") or len(users[linears[0].value]) != 1:
        return None
    product = Product.parse(linear.attr("spec"))
    # With another shape, a factor makes several heads of one, which does not commute with the weight of one.
    commutes = product.is_forward and product.keeps_heads and op.shape == linear.shape
    return linears[0] if commutes and all(_scales_rows(program, f) for f in rest) else None


def _scales_rows(program: OpProgram, factor: Factor) -> bool:
    """Whether a factor multiplies all elements along the last axis of a row by the same number."""
    return (1, *with_axes(program.ops[factor.value].shape, factor.inserts))[-1] <= 1


def _aggregate_is_cheaper(program: OpProgram, linear: Op, reduce: Op, counts: Counts) -> bool:
    """Whether the sum before the product moves less: rows of each edge, and those that the product reads and writes."""
    x = program.ops[linear.args[0]]
    k, n = (4 * width for width in (x.width, linear.width))  # bytes: sums are float32
    if linear.attr("via") == "all":
        # `compact` multiplies rows that depend on one end alone once for each node, so only the rows' width counts.
        of_nodes = origins(program, linear.args[0]) in ({"src"}, {"dst"})
        first = Work().move(counts.edges, k) if of_nodes else Work().move(counts.edges, k).move(counts.nodes, k + n)
        return first.seconds() < Work().move(counts.edges, n if of_nodes else k + 2 * n).seconds()
    pairs, other = counts.destination_pairs, counts.source_pairs
    if reduce.attr("via") == "src":
        pairs, other = other, pairs
    first = Work().move(counts.edges, k).move(pairs, 2 * k + 2 * n)
    end, pair = ("src", "source_pair") if reduce.attr("via") == "dst" else ("dst", "destination_pair")
    source = end in (of := origins(program, linear.args[0])) and of <= {end, pair, "etype"}
    rows = min(other, counts.edges) if source else counts.edges
    return first.seconds() < Work().move(rows, k + n).move(counts.edges, n).seconds()
