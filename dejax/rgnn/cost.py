"""What each kernel instance moves and computes, and how long that takes at the machine's ceilings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dejax.rgnn.ir.inter import VIAS
from dejax.rgnn.ir.intra import Gemm, Instance, Kernels, Operand, Outer, Traversal
from dejax.rgnn.passes import Counts


@dataclass(frozen=True, slots=True)
class Machine:
    """Ceilings; the defaults were measured on an H200 (docs/performance.md)."""

    bytes_per_second: float = 4.3e12
    flops: tuple[tuple[str, float], ...] = (("f32", 55e12), ("tf32", 350e12), ("bf16", 700e12))
    launch_seconds: float = 2.5e-6


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes to and from memory, floating-point operations of products, and the predicted time in seconds."""

    bytes: int
    flops: int
    seconds: float


def instance_cost(
    kernels: Kernels, instance: Instance, counts: Counts, precision: str = "tf32", machine: Machine = Machine()
) -> Cost:
    """The cost of one instance; a gathered row counts once for each item that reads it, caches left out."""
    ops = kernels.program.ops
    moved = sum(counts.rows(ops[v].space) * kernels.row_bytes(v) for v in instance.writes)
    flops = 0
    if isinstance(instance, Gemm):
        product = ops[instance.product]
        rows = counts.rows(product.space)
        moved += (
            _operand_bytes(kernels, instance.x, rows) + counts.rows(ops[instance.w].space) * ops[instance.w].row_bytes
        )
        flops = 2 * rows * _multiplications(instance.spec, ops[instance.x.name].shape, ops[instance.w].shape)
    elif isinstance(instance, Outer):
        rows = counts.rows(ops[instance.x.name].space)
        moved += _operand_bytes(kernels, instance.x, rows) + _operand_bytes(kernels, instance.y, rows)
        flops = 2 * rows * ops[instance.out].width
    elif isinstance(instance, Traversal):
        items = counts.rows(instance.space)
        loop = counts.rows(VIAS[instance.via].coarse) if instance.via else 0
        indexed = {o.via for o in instance.operands if o.access == "gathered"}
        moved += 4 * items * (len(indexed) + (instance.via is not None)) + 4 * loop
        for o in instance.operands:
            moved += _operand_bytes(kernels, o, loop if o.access in ("row", "row_indexed") else items, with_index=False)
        flops = sum(items * ops[i].width for i in instance.body)
    else:
        moved += sum(counts.rows(ops[v].space) * ops[v].row_bytes for v in instance.reads)
        flops = sum(
            2 * counts.rows(ops[i].space) * ops[ops[i].args[1]].width for i in instance.ops if ops[i].name == "linear"
        )
    rate = dict(machine.flops)[precision if isinstance(instance, (Gemm, Outer)) else "f32"]
    seconds = machine.launch_seconds + max(moved / machine.bytes_per_second, flops / rate)
    return Cost(int(moved), int(flops), seconds)


def _operand_bytes(kernels: Kernels, operand: Operand, rows: int, *, with_index: bool = True) -> int:
    if operand.access == "shared":
        return kernels.program.ops[operand.value].row_bytes
    index = 4 if operand.access == "gathered" and with_index else 0
    return rows * (kernels.row_bytes(operand.value) + index)


def _multiplications(spec: str, x: tuple[int, ...], w: tuple[int, ...]) -> int:
    left, right = spec.split("->")[0].split(",")
    sizes = dict(zip(left, x, strict=True)) | dict(zip(right, w, strict=True))
    return int(np.prod(list(sizes.values())))
