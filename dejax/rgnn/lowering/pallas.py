"""Level-2 instances as calls of the kernel templates in `dejax.pallas`.

Fusion makes no instance of what a template refuses (`ir.templates.refusal`). If a template raises an error anyway, the
caller evaluates the instance with XLA and warns.
"""

from __future__ import annotations

from typing import Any

import jax

import dejax.pallas as kernels
from dejax.rgnn.graphs.segments import Segments
from dejax.rgnn.ir.intra import Gemm, Instance, RowProducts, Traversal, WeightGradient
from dejax.rgnn.lowering.product_calls import Products
from dejax.rgnn.lowering.segments import segment_sum
from dejax.rgnn.lowering.traversal_calls import Traversals

_DTYPES = ("float32", "bfloat16", "float16")
# A kernel sums matrices by type for at least this many types, with at most this many matrices of a type on average.
_SUMS_AT_ONCE, _SUMMED_MATRICES = 4, 64


class PallasLowering(Products, Traversals):
    """Runs instances on arrays."""

    def run(self, instance: Instance, env: dict[int, Any]) -> None:
        """Adds what the instance writes to `env`, whose values are arrays, `RowScaled` or `SharedColumns`."""
        for v in (*instance.reads, *instance.writes):
            if self.program.ops[v].dtype not in _DTYPES:
                raise NotImplementedError(f"no kernel for {self.program.ops[v].dtype}")
        if isinstance(instance, Gemm):
            env.update(zip(instance.writes, self.gemm(instance, env), strict=True))
        elif isinstance(instance, WeightGradient):
            env.update(zip(instance.writes, self.weight_gradient(instance, env), strict=True))
        elif isinstance(instance, RowProducts):
            env.update(zip(instance.writes, self.row_products(instance, env), strict=True))
        elif isinstance(instance, Traversal):
            self.traversal(instance, env)
        else:
            raise NotImplementedError("left to XLA")

    def sum_types(self, x: jax.Array, group: Segments) -> jax.Array:
        """Sums matrices of edge types by node type: XLA would read all of them for each node type."""
        few = group.num_entries <= _SUMMED_MATRICES * group.num_rows
        if group.num_rows < _SUMS_AT_ONCE or not few or x.ndim < 3 or str(x.dtype) not in _DTYPES:
            return segment_sum(x, group)
        return kernels.sum_rows(x, group.offsets, order=group.order, interpret=self.interpret)
