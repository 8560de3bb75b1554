"""Aggregate before transform, where that is less work.

    sum over edges into v of c_e (x_e W_r)   =   sum over types r of (sum over edges of type r into v of c_e x_e) W_r

The right side multiplies one row for each (destination, type) pair. The left side multiplies one row for each edge or,
compacted, for each (source, type) pair. Scalars `c_e` that multiply a whole row commute with the weight. A weight that
all edges share moves behind the whole sum:

    sum over edges into v of c_e (x_e W)   =   (sum over edges into v of c_e x_e) W
    sum over edges into v of (x_e W + b)   =   (sum over edges into v of x_e) W + degree_v b

Where each `x_e W` is small because it cancels, the sum of `x_e` has lost the digits of the products. So with `exact`
shared weights and their biases stay on the edges.
"""

from __future__ import annotations

from dejax.rgnn.ir.inter import TYPE_VIA, Builder, Op, Program, Space, is_float
from dejax.rgnn.ir.products import Product, with_axes
from dejax.rgnn.passes._rewrite import Counts, Factor, aligned, as_dtype, factors, in_range, multiply, rebuild
from dejax.rgnn.passes.dce import dce

_PAIR = {"dst": ("destination_pair", Space.DESTINATION_PAIR), "src": ("source_pair", Space.SOURCE_PAIR)}


def aggregate(program: Program, counts: Counts, *, exact: bool = False) -> Program:
    program = program if exact else _bias_behind_sum(program, counts)
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
        # Rows may be integers, and what is summed of them fractions; and sums of many rows are beyond float16.
        dtype = in_range(linear.dtype)
        by_pair = builder.op("reduce", as_dtype(builder, summed, dtype), via=pair_via, op="sum")
        w = as_dtype(builder, new[linear.args[1]], dtype)
        via = "all" if shared else TYPE_VIA[pair_space]
        by_pair = builder.op("linear", by_pair, w, spec=linear.attr("spec"), via=via)
        if shared:
            return as_dtype(builder, by_pair, op.dtype)
        return as_dtype(builder, builder.op("reduce", by_pair, via=f"{pair_via}.node", op="sum"), op.dtype)

    return rebuild(program, visit, new)


def _bias_behind_sum(program: Program, counts: Counts) -> Program:
    """Takes the bias of a shared product out of the sum, where the product can follow the sum then."""
    users = program.users()
    new: dict[int, int] = {}
    moved: list[int] = []

    def visit(builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        if not op.is_sum or op.attr("via") not in _PAIR:
            return None
        added = program.ops[op.args[0]]
        if added.name != "add" or len(users[op.args[0]]) != 1:
            return None
        for value, bias in (added.args, added.args[::-1]):
            linear, read = program.ops[value], program.ops[bias]
            alone = linear.name == "linear" and linear.attr("via") == "all" and len(users[value]) == 1
            shared = read.name == "gather" and read.attr("via") == "all" and read.shape == linear.shape
            if not (alone and shared and is_float(linear.dtype) and is_float(read.dtype)):
                continue
            if not _aggregate_is_cheaper(program, linear, op, counts):
                continue
            moved.append(index)
            # 16-bit dtypes do not hold counts, nor sums of products of which the bias takes most away.
            wide = "float64" if op.dtype == "float64" else "float32"
            product = new[value]
            if linear.dtype != wide:
                weight = as_dtype(builder, new[linear.args[1]], wide)
                product = builder.op("linear", new[linear.args[0]], weight, **dict(linear.attrs))
            degree = builder.op("count", via=op.attr("via"), dtype=wide)
            at_node = builder.op("gather", new[read.args[0]], via="all", space=str(Space.NODE))
            total = builder.op("reduce", product, via=op.attr("via"), op="sum")
            return as_dtype(builder, builder.op("add", total, builder.op("mul", at_node, degree)), op.dtype)
        return None

    after = rebuild(program, visit, new)
    return dce(after, counts) if moved else program


def _summed_product(program: Program, users: list[list[int]], op: Op) -> tuple[Op, list[Factor]] | None:
    """The grouped GEMM whose rows a reduction to nodes sums, and the factors of its rows, which commute with it."""
    if not op.is_sum or op.attr("via") not in _PAIR:
        return None
    found = factors(program, op.args[0])
    linears = [f for f in found if program.ops[f.value].name == "linear"]
    if len(linears) != 1 or linears[0].power != 1 or linears[0].inserts:
        return None
    linear, rest = program.ops[linears[0].value], [f for f in found if f is not linears[0]]
    if not is_float(linear.dtype) or linear.attr("via") not in ("etype", "all") or len(users[linears[0].value]) != 1:
        return None
    product = Product.parse(linear.attr("spec"))
    # With another shape, a factor makes several heads of one, which does not commute with the weight of one.
    commutes = product.is_forward and product.keeps_heads and op.shape == linear.shape
    return (linear, rest) if commutes and all(_scales_rows(program, f) for f in rest) else None


def _scales_rows(program: Program, factor: Factor) -> bool:
    """Whether a factor multiplies all elements of a row along its last axis alike."""
    return (1, *with_axes(program.ops[factor.value].shape, factor.inserts))[-1] <= 1


def _aggregate_is_cheaper(program: Program, linear: Op, reduce: Op, counts: Counts) -> bool:
    """Elements moved each way: rows gathered for each edge, and pair rows that the product reads and writes."""
    x = program.ops[linear.args[0]]
    k, n = x.width, linear.width
    if linear.attr("via") == "all":
        # `compact` multiplies rows that depend on one end alone once for each node, so only the rows' width counts.
        of_nodes = _reads_one_end(program, linear.args[0])
        return k < n if of_nodes else counts.edges * k + counts.nodes * (k + n) < counts.edges * (k + 2 * n)
    pairs, other = counts.destination_pairs, counts.source_pairs
    if reduce.attr("via") == "src":
        pairs, other = other, pairs
    first = counts.edges * k + pairs * (2 * k + 2 * n)
    source = x.name == "gather" and x.attr("via") == ("src" if reduce.attr("via") == "dst" else "dst")
    rows = min(other, counts.edges) if source else counts.edges
    later = rows * (k + n) + counts.edges * n
    return first < later


def _reads_one_end(program: Program, value: int) -> bool:
    """Whether an edge value depends on the nodes at one end alone."""
    found, waiting = set(), [value]
    while waiting:
        op = program.ops[waiting.pop()]
        if op.name == "gather" and op.attr("via") in ("src", "dst", "all"):
            found.add(op.attr("via"))
        elif op.args and op.name != "gather":
            waiting += op.args
        elif op.name != "const":
            return False
    return len(found - {"all"}) == 1
