"""Aggregate before transform, where that is less work.

    sum over edges into v of c_e (x_e W_r)   =   sum over types r of (sum over edges of type r into v of c_e x_e) W_r

The right side multiplies one row for each (destination, type) pair, the left side one for each edge or, compacted, for
each (source, type) pair. Numbers `c_e` that multiply a whole row commute with the weight and go along.
"""

from __future__ import annotations

from dejax.rgnn.ir.inter import TYPE_VIA, Builder, Op, Program, Space, is_float
from dejax.rgnn.passes._rewrite import Counts, Factor, as_dtype, factors, in_range, insert_axes, multiply, rebuild

_PAIR = {"dst": ("destination_pair", Space.DESTINATION_PAIR), "src": ("source_pair", Space.SOURCE_PAIR)}
_SPECS = ("k,kn->n", "hk,hkn->hn", "hk,kn->hn")


def aggregate(program: Program, counts: Counts) -> Program:
    users = program.users()
    new: dict[int, int] = {}

    def plan(op: Op) -> tuple[Factor, list[Factor]] | None:
        """The typed linear in a summed product and the factors beside it, where aggregating first is less work."""
        if op.name != "reduce" or op.attr("op") != "sum" or op.attr("via") not in _PAIR:
            return None
        found = factors(program, op.args[0])
        linears = [f for f in found if program.ops[f.value].name == "linear"]
        if len(linears) != 1 or linears[0].power != 1 or linears[0].inserts:
            return None
        linear = program.ops[linears[0].value]
        if not is_float(linear.dtype):
            return None
        if linear.attr("via") != "etype" or linear.attr("spec") not in _SPECS or len(users[linears[0].value]) != 1:
            return None
        rest = [f for f in found if f is not linears[0]]
        if op.shape != linear.shape:  # a factor that makes one head many does not commute with the weight of one
            return None
        if any(_inserted_width(program, f) > 1 for f in rest):
            return None
        return (linears[0], rest) if _aggregate_is_cheaper(program, linear, op, counts) else None

    def visit(builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        planned = plan(op)
        if planned is None:
            return None
        linear_factor, rest = planned
        linear = program.ops[linear_factor.value]
        pair_via, pair_space = _PAIR[op.attr("via")]
        parts = [(insert_axes(builder, new[f.value], f.inserts), f.power) for f in rest]
        summed = multiply(builder, [(new[linear.args[0]], 1), *parts], op.dtype)
        # Rows may be integers, and what is summed of them fractions; and sums of many rows are beyond float16.
        dtype = in_range(linear.dtype)
        by_pair = builder.op("reduce", as_dtype(builder, summed, dtype), via=pair_via, op="sum")
        w = as_dtype(builder, new[linear.args[1]], dtype)
        by_pair = builder.op("linear", by_pair, w, spec=linear.attr("spec"), via=TYPE_VIA[pair_space])
        return as_dtype(builder, builder.op("reduce", by_pair, via=f"{pair_via}.node", op="sum"), op.dtype)

    return rebuild(program, visit, new)


def _inserted_width(program: Program, factor: Factor) -> int:
    """How many different numbers of a factor multiply one row along its last axis; 1 commutes with the weight."""
    shape = program.ops[factor.value].shape
    for axes in factor.inserts:
        if shape:
            for axis in axes:
                shape = (*shape[:axis], 1, *shape[axis:])
    return shape[-1] if shape else 1


def _aggregate_is_cheaper(program: Program, linear: Op, reduce: Op, counts: Counts) -> bool:
    """Numbers moved each way: rows gathered for each edge, and pair rows written and read by the product."""
    x = program.ops[linear.args[0]]
    k, n = x.width, linear.width
    pairs = counts.destination_pairs if reduce.attr("via") == "dst" else counts.source_pairs
    first = counts.edges * k + pairs * (2 * k + 2 * n)
    source = x.name == "gather" and x.attr("via") == ("src" if reduce.attr("via") == "dst" else "dst")
    other = counts.source_pairs if reduce.attr("via") == "dst" else counts.destination_pairs
    rows = min(other, counts.edges) if source else counts.edges
    later = rows * (k + n) + counts.edges * n
    return first < later
