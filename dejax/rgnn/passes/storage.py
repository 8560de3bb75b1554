"""Which values kernels keep in 16 bits (`dejax.pallas.half_rows`): wide float32 rows that only kernels read.

Where products round their operands to 10 bits (TF32), rows that are written to be read again lose nothing by being
stored so, and the loops that read one such row for each edge move half the bytes.
"""

from __future__ import annotations

from dejax.rgnn.ir.intra import Fallback, Gemm, Instance, Kernels, Outer, Traversal

# Narrower rows share a memory sector anyway.
_MIN_WIDTH = 16


def storage(kernels: Kernels, packed: tuple[int, ...] = ()) -> Kernels:
    """Names the values to store in 16 bits.

    Args:
      kernels: a level-2 program.
      packed: numbers of the program's outputs that may be stored so too; others may not.
    """
    outputs = {v for i, v in enumerate(kernels.program.outputs) if i not in packed}
    found: set[int] = set()
    for instance in kernels.instances:
        found.update(v for v in _candidates(kernels, instance) if v not in outputs)
    for instance in kernels.instances:
        found -= _needs_whole(instance)
    return Kernels(kernels.program, kernels.instances, frozenset(found))


def _candidates(kernels: Kernels, instance: Instance) -> list[int]:
    ops = kernels.program.ops
    written: tuple[int, ...] = ()
    if isinstance(instance, Gemm) and instance.accumulate is None:
        written = (instance.out,)
    elif isinstance(instance, Traversal):
        # What the epilogue uses again must be what was written.
        used = {a for i in instance.epilogue for a in ops[i].args}
        written = tuple(v for v in instance.row_outputs if v not in used)
    return [v for v in written if ops[v].dtype == "float32" and ops[v].width >= _MIN_WIDTH]


def _needs_whole(instance: Instance) -> set[int]:
    """Values that the instance cannot read as `HalfRows`."""
    if isinstance(instance, Gemm):
        return {instance.w}
    if isinstance(instance, Outer):
        return set()
    if isinstance(instance, Traversal):
        return {o.value for o in instance.operands if o.access == "shared"}
    assert isinstance(instance, Fallback)
    return set(instance.reads)
