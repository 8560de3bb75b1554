"""Fusion, first half: typed linears and weight gradients become instances of the GEMM template.

A gather that feeds a product becomes the product's access scheme: rows are read where they are. An elementwise function
of a product that nobody else reads becomes its epilogue.
"""

from __future__ import annotations

from dejax.rgnn.ir.inter import TYPE_VIA, Program
from dejax.rgnn.ir.intra import MATRIX_SPECS, OUTER_SPECS, Gemm, Instance, Kernels, Outer, access_operand

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
    return Gemm(i, i, x, w, spec, via)
