"""Fusion, first half: grouped GEMMs and grouped weight gradients become instances of their templates.

A gather that feeds a product becomes the product's access scheme: rows are read where they are. A bias by type and an
elementwise function become the product's epilogue if nothing else reads the product, and so does the inner product of
each row with the vector of its type, as in attention scores.
"""

from __future__ import annotations

import math

from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import OPERATORS, TYPE_VIA, Op, OpProgram, Space
from dejax.rgnn.ir.intra import Gemm, Instance, Kernels, WeightGradient, access_operand
from dejax.rgnn.ir.products import Product
from dejax.rgnn.ir.templates import KERNEL_DTYPES, MATRIX_SPECS, WEIGHT_GRADIENT_SPECS
from dejax.rgnn.passes._rewrite import powers_of_two

# The widest row that one tile holds for an inner product: Triton's compiler lays out wider tiles badly for the sum.
_WHOLE_WIDTH = 64
# A product with at least this many vectors for each type is faster as a grouped GEMM with a narrow matrix.
_MIN_VECTORS = 4


def fuse_gemm(kernels: Kernels, counts: Counts) -> Kernels:
    """Adds the GEMM instances to a level-2 program without any."""
    program, users = kernels.program, kernels.program.users()
    made: list[Instance] = []
    for i, op in enumerate(program.ops):
        typed = op.name in ("linear", "outer") and op.attr("via") == TYPE_VIA.get(program.ops[op.args[0]].space)
        if not typed or not all(_has_template(program.ops[v]) for v in (i, *op.args)):
            continue
        x = access_operand(program, op.args[0])
        if op.name == "linear" and (spec := _as_matrix(program, counts, i)) is not None:
            made.append(_with_epilogue(program, users, i, spec))
        elif op.name == "outer" and op.attr("spec") in WEIGHT_GRADIENT_SPECS:
            y = access_operand(program, op.args[1])
            made.append(WeightGradient(i, x, y, op.attr("spec"), op.attr("via")))
    return Kernels(program, (*kernels.instances, *made))


def _has_template(op: Op) -> bool:
    """Whether the template takes rows of this width and dtype."""
    return op.dtype in KERNEL_DTYPES and 0 not in op.shape


def _as_matrix(program: OpProgram, counts: Counts, i: int) -> str | None:
    """The contraction of a product by type, written with a matrix; None if registers compute the product better."""
    op = program.ops[i]
    spec, product = op.attr("spec"), Product.parse(op.attr("spec"))
    if spec in MATRIX_SPECS:
        return spec
    if op.space == Space.EDGE:
        return None
    x = program.ops[op.args[0]]
    many = math.prod(program.ops[op.args[1]].shape[:-1]) >= _MIN_VECTORS
    if x.name == "gather":
        # Even with one vector, where rows come from memory: a GEMM takes its tiles by node and loads a row once, a
        # traversal over types loads it for each type.
        pays = product.left == "k" and product.is_inner and (many or counts.from_memory(program.ops[x.args[0]]))
    else:
        pays = product.left == "h" and product.out == "k" and many
    return str(product.with_heads_as_matrix) if pays else None


def _with_epilogue(program: OpProgram, users: list[list[int]], i: int, spec: str) -> Gemm:
    op = program.ops[i]
    x, w, via = access_operand(program, op.args[0]), op.args[1], op.attr("via")
    out, bias, activation = i, None, None
    u = _only_user(program, users, out)
    if u is not None:
        bias = _bias(program, i, u)
        if bias is not None:
            out, u = u, _only_user(program, users, u)
    if u is not None:
        user = program.ops[u]
        if OPERATORS[user.name].epilogue:
            slope = f":{user.attr('slope')}" if user.name == "leaky_relu" else ""
            out, activation = u, user.name + slope
    dot = None if activation else _inner_product(program, users[out], out, via)
    vector = None if dot is None else program.ops[dot].args[1]
    return Gemm(out, i, x, w, spec, via, bias=bias, activation=activation, dot=dot, vector=vector)


def _only_user(program: OpProgram, users: list[list[int]], value: int) -> int | None:
    return users[value][0] if len(users[value]) == 1 and value not in program.outputs else None


def _bias(program: OpProgram, product: int, u: int) -> int | None:
    """The bias by type that the operator `u` adds to a product; None if `u` does not add one."""
    user, op = program.ops[u], program.ops[product]
    if user.name != "add" or user.shape != op.shape or user.dtype != op.dtype:
        return None
    (other,) = [a for a in user.args if a != product] or [product]
    read = program.ops[other]
    if read.name != "gather" or read.attr("via") != op.attr("via") or read.shape != op.shape:
        return None
    return read.args[0] if _is_there_before(program, read.args[0], product) else None


def _is_there_before(program: OpProgram, value: int, product: int) -> bool:
    """Whether a value can be computed before the product."""
    return value < product or program.ops[value].name == "input"


def _inner_product(program: OpProgram, users: list[int], i: int, via: str) -> int | None:
    """The operator that takes the inner product of each row (or head) of product `i` and the vector of its type."""
    op = program.ops[i]
    whole = op.shape[-1:] == (op.width,) or _heads_in_row(program, i)
    if op.dtype != "float32" or op.width > _WHOLE_WIDTH or not whole:
        return None
    for u in users:
        user = program.ops[u]
        inner = user.name == "linear" and user.attr("spec") in ("k,k->", "hk,hk->h") and user.args[0] == i
        if inner and user.attr("via") == via and user.dtype == "float32" and _is_there_before(program, user.args[1], i):
            return u
    return None


def _heads_in_row(program: OpProgram, i: int) -> bool:
    """Whether the heads of a product lie side by side in a row of one tile, so that the tile can be cut into heads."""
    op = program.ops[i]
    return op.name == "linear" and op.attr("spec") == "k,hkn->hn" and powers_of_two(*op.shape)
