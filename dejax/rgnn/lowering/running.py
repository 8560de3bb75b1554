"""The state that all instances of a program share while they run: arrays in both forms, and scales of columns."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

import dejax.pallas as kernels
from dejax.pallas.products.product_schedule import merged_heads, scales_beforehand
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.ir.inter import TYPE_VIA, Space, parse_spec
from dejax.rgnn.ir.intra import Fallback, Gemm, Kernels, Operand
from dejax.rgnn.lowering.node_rows import TO_DESTINATIONS, RowArrays
from dejax.rgnn.lowering.scales import ColumnScales
from dejax.rgnn.lowering.segments import num_rows, segments, valid_rows
from dejax.rgnn.options import Options
from dejax.rgnn.passes.kernels.storage import encoded_values


@dataclass(frozen=True, slots=True)
class SharedColumns:
    """A narrow value as columns of an array that others share, float32[rows, columns]."""

    array: jax.Array
    first: int
    shape: tuple[int, ...]
    dtype: str  # of the value: it is kept as it was computed


def decoded(rows: Any) -> jax.Array:
    """A value as an array of its own, whether it is stored as one, as row-scaled float16 or as `SharedColumns`."""
    if isinstance(rows, SharedColumns):
        columns = rows.array[:, rows.first : rows.first + math.prod(rows.shape)]
        return columns.reshape(-1, *rows.shape).astype(rows.dtype)
    return rows.decode() if isinstance(rows, kernels.RowScaled) else rows


class Running:
    """A program of kernel instances on a graph; `interpret` runs the kernels' own code on the CPU.

    Args:
        kernels: the program.
        graph: the graph.
        options: the options of the compiler.
        encoded: by value, inputs that are there in 16 bits, too.
        env: the inputs by value.
        rows: the inputs of which kernels may read fewer rows.
    """

    def __init__(
        self,
        kernels: Kernels,
        graph: RelGraph,
        options: Options,
        encoded: dict[int, Any],
        env: dict[int, Any],
        rows: RowArrays,
    ) -> None:
        self.kernels, self.program, self.row_scaled, self.graph = kernels, kernels.program, kernels.row_scaled, graph
        self.precision, self.interpret = options.precision or "tf32", options.interpret
        # Values whose padding rows somebody may read: kernels read none, but XLA's operators and a later program may.
        self.with_padding = set(self.program.outputs)
        self.with_padding.update(*(i.reads for i in kernels.instances if isinstance(i, Fallback)))
        self.encoded = dict(encoded)  # arrays that are there in 16 bits, too
        rounds = self.precision == "tf32" and "storage" not in options.disable
        self.often_read = encoded_values(kernels, partial(num_rows, graph)) if rounds else frozenset()
        self.rows = rows
        scaled = self.scaled_values() if self.precision != "bf16" else ()
        self.scales = ColumnScales(self.program, env | rows.of_destinations, scaled, self.interpret)

    def scaled_values(self) -> list[int]:
        """The values whose columns are divided by powers of two, in products or where they are stored."""
        found = [*self.row_scaled, *self.often_read]
        found += [a for v in self.row_scaled if self.program.ops[v].name == "concat" for a in self.program.ops[v].args]
        for instance in self.kernels.instances:
            if isinstance(instance, Gemm) and self.scales_rows_of(instance):
                found.append(instance.x.value)
        return [v for v in dict.fromkeys(found) if self.program.ops[v].dtype == "float32"]

    def scales_rows_of(self, instance: Gemm) -> bool:
        """Whether a product is given the powers of two of the columns of its rows, where these come in float32.

        A product without them measures the rows of each of its tiles, which takes less than a kernel for that alone.
        """
        if self.precision == "bf16":
            return False
        measured_anyway = self.precision == "f32" or bool(self.row_scaled or self.often_read)
        return measured_anyway or self._scales_matrices_of(instance)

    def _scales_matrices_of(self, instance: Gemm) -> bool:
        """Whether `grouped_gemm` scales the matrices of a product beforehand, if it is given the powers of columns."""
        x, product = self.program.ops[instance.x.value], self.program.ops[instance.product]
        left, _, result = parse_spec(instance.spec)
        heads = x.shape[0] if "h" in left and "h" in result else 1
        k, n = x.width // heads, product.width // heads
        merged = merged_heads(heads, k, n, self.precision, x.dtype) if instance.dot is None else 1
        group = segments(self.graph, instance.via)
        return scales_beforehand(group.num_entries * heads // merged, group.num_rows, merged * k, merged * n)

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

    def rows_of(self, operand: Operand, env: dict[int, Any]) -> Any:
        """The array that an operand reads by a map: of destinations alone where the map leads to them.

        A map of edges or pairs leads to no padding node, so that such rows need no zeros.
        """
        value = operand.value
        if value in self.encoded or operand.via is None:
            return env[value]
        if operand.via in TO_DESTINATIONS and value in self.rows.of_destinations:
            return self.rows.of_destinations[value]
        return env[value] if value in self.often_read else self.rows.any_row(value, env)

    def narrow_rows_of(self, operand: Operand, env: dict[int, Any]) -> Any:
        """The rows of `rows_of` as row-scaled float16."""
        value, rows = operand.value, self.rows_of(operand, env)
        if rows is env[value]:
            return self.as_row_scaled(value, env)
        if isinstance(rows, jax.Array) and value in self.often_read:
            self.rows.of_destinations[value] = rows = self.in_16_bits(value, rows)
        return rows

    def cleared(self, space: Space, many: Sequence[Any], values: Sequence[Collection[int]]) -> list[Any]:
        """Arrays with zeros in padding rows, which kernels may have left as they were, where these may be read.

        Padding nodes may be in a grouping by node type, over which kernels sum. Padding edges and pairs are in none.

        Args:
            space: the space of the rows.
            many: the arrays.
            values: for each array the values that it has.
        """
        wanted = [n for n, own in enumerate(values) if space == Space.NODE or self.with_padding.intersection(own)]
        if valid_rows(self.graph, space) is None or not wanted:
            return list(many)
        parts = [a for n in wanted for a in _arrays(many[n])]
        group = segments(self.graph, TYPE_VIA[space])
        done = iter(kernels.clear_rows(parts, group.offsets, order=group.order, interpret=self.interpret))
        found = list(many)
        for n in wanted:
            rows = found[n]
            if isinstance(rows, kernels.RowScaled):
                found[n] = replace(rows, mantissa=next(done), exponent=next(done))
            else:
                found[n] = next(done)
        return found


def _arrays(rows: Any) -> list[jax.Array]:
    return [rows.mantissa, rows.exponent] if isinstance(rows, kernels.RowScaled) else [rows]
