"""Fusion, first half: typed linears and weight gradients become instances of the GEMM template.

A gather that feeds a product becomes the product's access scheme: rows are read where they are. An elementwise function
of a product that nobody else reads becomes its epilogue. So does the inner product of each row with the vector of its
type, which is what attention scores are made of.
"""

from __future__ import annotations

import math

from dejax.rgnn.ir.inter import TYPE_VIA, Op, Program, Space
from dejax.rgnn.ir.intra import KERNEL_DTYPES, MATRIX_SPECS, OUTER_SPECS, Gemm, Instance, Kernels, Outer, access_operand
from dejax.rgnn.passes._rewrite import Counts, from_memory, powers_of_two

# A tile that holds whole rows. Of wider ones Triton's compiler lays out the numbers such that 450 shuffles add them up.
_WHOLE_WIDTH = 64
# Contractions with one or a few vectors for each type, which can be products with a narrow matrix -> how the template
# says them: of rows that are gathered, and sums of vectors.
_GATHERED = {"k,k->": "k,k->", "k,hk->h": "n,kn->k"}
_SUMS = {"h,hk->k": "k,kn->n"}
# From so many vectors on a product is better: RGAT's 8 heads on 3 million pairs 0.85 ms in registers, 0.19 so; a sum of
# 8 for each pair 0.96 in a loop, 0.16 and 0.30 as a product and a loop.
_MIN_VECTORS = 4
_ACTIVATIONS = {"relu": "relu", "tanh": "tanh", "sigmoid": "sigmoid", "leaky_relu": "leaky_relu"}


def fuse_gemm(kernels: Kernels, counts: Counts, *, accumulate: bool = False) -> Kernels:
    """Adds the GEMM instances.

    Args:
      kernels: a level-2 program without any.
      counts: of the graph.
      accumulate: a product whose rows are only summed by node is added up in place (atomically, so the order of
        additions
        and the last bits vary from run to run).
    """
    program, users = kernels.program, kernels.program.users()
    made: list[Instance] = []
    for i, op in enumerate(program.ops):
        typed = op.name in ("linear", "outer") and op.attr("via") == TYPE_VIA.get(program.ops[op.args[0]].space)
        if not typed:
            continue
        if not all(_multiplied(program.ops[v]) for v in (i, *op.args)):
            continue
        x = access_operand(program, op.args[0])
        if op.name == "linear" and (spec := _as_matrix(program, counts, i)) is not None:
            made.append(_with_epilogue(program, users, i, spec, accumulate))
        elif op.name == "outer" and op.attr("spec") in OUTER_SPECS:
            y = access_operand(program, op.args[1])
            made.append(Outer(i, x, y, op.attr("spec"), op.attr("via")))
    return Kernels(program, (*kernels.instances, *made))


def _multiplied(op: Op) -> bool:
    """Whether the template multiplies such rows: of any width, in the dtypes of kernels."""
    return op.dtype in KERNEL_DTYPES and 0 not in op.shape


def _as_matrix(program: Program, counts: Counts, i: int) -> str | None:
    """The contraction of a typed linear as a product with a matrix; None where it is better done in registers."""
    op = program.ops[i]
    spec = op.attr("spec")
    if spec in MATRIX_SPECS:
        return spec
    if op.space == Space.EDGE:
        return None
    x, vectors = program.ops[op.args[0]], math.prod(program.ops[op.args[1]].shape[:-1])
    if x.name == "gather":
        # With one vector, too, where the cache does not have the rows: a product takes its tiles by node and fetches a
        # row once, a loop over types for each type. RGAT on wikikg2 0.86 -> 0.41 ms; on bgs it was 7 us slower.
        table = program.ops[x.args[0]]
        many = vectors >= _MIN_VECTORS or from_memory(table, counts)
        return _GATHERED.get(spec) if many else None
    return _SUMS.get(spec) if vectors >= _MIN_VECTORS else None


def _with_epilogue(program: Program, users: list[list[int]], i: int, spec: str, accumulate: bool) -> Gemm:
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
        if user.name in _ACTIVATIONS:
            slope = f":{user.attr('slope')}" if user.name == "leaky_relu" else ""
            out, activation = u, _ACTIVATIONS[user.name] + slope
        elif bias is None and accumulate and user.name == "reduce" and user.attr("op") == "sum":
            if user.dtype == "float32":
                return Gemm(u, i, x, w, spec, via, accumulate=user.attr("via"))
    dot = None if activation else _inner_product(program, users[out], out, via)
    vector = None if dot is None else program.ops[dot].args[1]
    return Gemm(out, i, x, w, spec, via, bias=bias, activation=activation, dot=dot, vector=vector)


def _only_user(program: Program, users: list[list[int]], value: int) -> int | None:
    return users[value][0] if len(users[value]) == 1 and value not in program.outputs else None


def _bias(program: Program, product: int, u: int) -> int | None:
    """The rows by type that `u` adds to a product, if that is what it does."""
    user, op = program.ops[u], program.ops[product]
    if user.name != "add" or user.shape != op.shape or user.dtype != op.dtype:
        return None
    (other,) = [a for a in user.args if a != product] or [product]
    read = program.ops[other]
    if read.name != "gather" or read.attr("via") != op.attr("via") or read.shape != op.shape:
        return None
    return read.args[0] if _apart(program, read.args[0], product) else None


def _apart(program: Program, value: int, product: int) -> bool:
    """Whether a value does not wait for the product."""
    return value < product or program.ops[value].name == "input"


def _inner_product(program: Program, users: list[int], i: int, via: str) -> int | None:
    """A user of product `i` that takes the inner product of each row, or of each head, with the vector of its type."""
    op = program.ops[i]
    if (
        op.dtype != "float32"
        or op.width > _WHOLE_WIDTH
        or not (op.shape[-1:] == (op.width,) or _heads_in_row(program, i))
    ):
        return None
    for u in users:
        user = program.ops[u]
        inner = user.name == "linear" and user.attr("spec") in ("k,k->", "hk,hk->h") and user.args[0] == i
        if inner and user.attr("via") == via and user.dtype == "float32" and _apart(program, user.args[1], i):
            return u
    return None


def _heads_in_row(program: Program, i: int) -> bool:
    """Whether the heads of a product lie side by side in a row of one tile, which can be cut in them."""
    op = program.ops[i]
    return op.name == "linear" and op.attr("spec") == "k,hkn->hn" and powers_of_two(*op.shape)
