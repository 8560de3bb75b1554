"""The state that all instances of a program share while they run: arrays in both forms, and scales of columns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

import dejax.pallas as kernels
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.ir.intra import Gemm, Kernels
from dejax.rgnn.lowering.scales import ColumnScales
from dejax.rgnn.lowering.segments import num_rows
from dejax.rgnn.options import Options
from dejax.rgnn.passes.storage import encoded_values


@dataclass(frozen=True, slots=True)
class Columns:
    """A narrow value as columns of an array that others share, float32[rows, columns]."""

    array: jax.Array
    first: int
    shape: tuple[int, ...]
    dtype: str  # of the value: it is kept as it was computed

    def whole(self) -> jax.Array:
        columns = self.array[:, self.first : self.first + math.prod(self.shape)]
        return columns.reshape(-1, *self.shape).astype(self.dtype)


class Running:
    """A program of kernel instances on a graph; `interpret` runs the kernels' own code on the CPU."""

    def __init__(
        self,
        kernels: Kernels,
        graph: RelGraph,
        options: Options,
        encoded: dict[int, Any],
        inputs: dict[int, Any],
    ) -> None:
        self.kernels, self.program, self.row_scaled, self.graph = kernels, kernels.program, kernels.row_scaled, graph
        self.precision, self.interpret = options.precision or "tf32", options.interpret
        self.encoded = dict(encoded)  # arrays that are there in 16 bits, too
        rounds = self.precision == "tf32" and "storage" not in options.disable
        self.often_read = encoded_values(kernels, partial(num_rows, graph)) if rounds else frozenset()
        scaled = self.precision != "bf16"
        self.scales = ColumnScales(self.program, inputs, self.scaled_values() if scaled else (), self.interpret)

    def scaled_values(self) -> list[int]:
        """The values whose columns are divided by powers of two, in products or where they are stored."""
        found = [*self.row_scaled, *self.often_read]
        found += [a for v in self.row_scaled if self.program.ops[v].name == "concat" for a in self.program.ops[v].args]
        for instance in self.kernels.instances:
            if isinstance(instance, Gemm):
                found.append(instance.x.value)
        return [v for v in dict.fromkeys(found) if self.program.ops[v].dtype == "float32"]

    def as_row_scaled(self, value: int, env: dict[int, Any]) -> Any:
        """An array whose rows kernels read, in 16 bits where that moves fewer bytes in all than it costs."""
        array = env[value]
        if not isinstance(array, jax.Array) or not (value in self.encoded or value in self.often_read):
            return array
        if value not in self.encoded:
            self.encoded[value] = self.in_16_bits(value, array)
        return self.encoded[value]

    def in_16_bits(self, value: int, array: jax.Array) -> Any:
        return kernels.to_row_scaled(array, self.scales.powers(value), interpret=self.interpret)
