"""Fusion, first half: typed linears and weight gradients become instances of the GEMM template.

A gather that feeds a product becomes the product's access scheme: rows are read where they are. An elementwise function
of a product that nobody else reads becomes its epilogue. So does the inner product of each row with the vector of its
type, which is what attention scores are made of.
"""

from __future__ import annotations

from dejax.rgnn.ir.inter import TYPE_VIA, Program
from dejax.rgnn.ir.intra import MATRIX_SPECS, OUTER_SPECS, Gemm, Instance, Kernels, Outer, access_operand

# A tile that holds whole rows: wider ones would not fit the registers.
_WHOLE_WIDTH = 64
_ACTIVATIONS = {"relu": "relu", "tanh": "tanh", "sigmoid": "sigmoid", "leaky_relu": "leaky_relu"}


def fuse_gemm(kernels: Kernels, *, accumulate: bool = False) -> Kernels:
    """Adds the GEMM instances.

    Args:
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
        x = access_operand(program, op.args[0])
        if op.name == "linear" and op.attr("spec") in MATRIX_SPECS:
            made.append(_with_epilogue(program, users, i, accumulate))
        elif op.name == "outer" and op.attr("spec") in OUTER_SPECS:
            y = access_operand(program, op.args[1])
            made.append(Outer(i, x, y, op.attr("spec"), op.attr("via")))
    return Kernels(program, (*kernels.instances, *made))


def _with_epilogue(program: Program, users: list[list[int]], i: int, accumulate: bool) -> Gemm:
    op = program.ops[i]
    x, w, spec, via = access_operand(program, op.args[0]), op.args[1], op.attr("spec"), op.attr("via")
    if len(users[i]) == 1 and i not in program.outputs:
        (u,) = users[i]
        user = program.ops[u]
        if user.name in _ACTIVATIONS:
            slope = f":{user.attr('slope')}" if user.name == "leaky_relu" else ""
            return Gemm(u, i, x, w, spec, via, activation=_ACTIVATIONS[user.name] + slope)
        if accumulate and user.name == "reduce" and user.attr("op") == "sum" and user.dtype == "float32":
            return Gemm(u, i, x, w, spec, via, accumulate=user.attr("via"))
    dot = _inner_product(program, users[i], i)
    return Gemm(i, i, x, w, spec, via, dot=dot, vector=None if dot is None else program.ops[dot].args[1])


def _inner_product(program: Program, users: list[int], i: int) -> int | None:
    """A user of product `i` that takes the inner product of each row with the vector of its type."""
    op = program.ops[i]
    if op.dtype != "float32" or op.width != op.shape[-1] or op.width > _WHOLE_WIDTH:  # rows of one head, unrounded
        return None
    for u in users:
        user = program.ops[u]
        inner = user.name == "linear" and user.attr("spec") in ("k,k->", "hk,hk->h") and user.args[0] == i
        vector = user.args[-1]
        # The vector does not wait for the product.
        apart = vector < i or program.ops[vector].name == "input"
        if inner and apart and user.attr("via") == op.attr("via") and user.dtype == "float32":
            return u
    return None
