"""Traversals as calls of their template: what a traversal reads and writes, and in which form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

import dejax.pallas as kernels
from dejax.rgnn.ir.inter import VIAS, Space
from dejax.rgnn.ir.intra import Operand, Traversal
from dejax.rgnn.ir.templates import ONCE_A_SEGMENT
from dejax.rgnn.lowering.factors import WithoutFactors, without_factors
from dejax.rgnn.lowering.running import Running, SharedColumns
from dejax.rgnn.lowering.segments import first_rows, num_rows, segments
from dejax.rgnn.lowering.tiles import TileProgram
from dejax.rgnn.passes.kernels.storage import linear_in, may_round

# Values of at most this many elements a row share an array where they are read at the same rows (a sector holds 8).
_PACKED_WIDTH = 4


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """The arguments of a traversal; `columns_of` are the powers of two of columns of row outputs in 16 bits."""

    arrays: list[Any]
    operands: list[kernels.TileOperand]
    tables: list[jax.Array]
    reductions: tuple[kernels.Reduction, ...]
    compute: TileProgram
    side_by_side: Sequence[tuple[int, ...]]
    columns_of: Mapping[int, jax.Array]


class Traversals(Running):
    """The instances of traversals and maps."""

    def traversal(self, t: Traversal, env: dict[int, Any]) -> None:
        """Adds what a traversal, or a map over rows, writes to `env`."""
        call = self._call(t, env)
        if t.via is None:
            self._map(t, call, env)
        else:
            self._reduce(t, call, env)

    def _call(self, t: Traversal, env: dict[int, Any]) -> _Call:
        arrays, operands, tables, columns = self.loaded(t, env)
        side_by_side = self.side_by_side(t)
        reductions, without = self.reductions(t, arrays, operands, columns)
        # The powers have as many bits as the rows that they divide, so that a thread holds as many elements of either.
        reads_row_scaled = any(isinstance(a, kernels.RowScaled) for a in arrays)
        divided, columns_of = self.stored_columns(t, jnp.bfloat16 if reads_row_scaled else jnp.float32)
        numbers = self._powers(t, arrays, operands, columns, without)
        stored_at = {v: len(arrays) - len(t.operands) + i for i, v in enumerate(divided)}
        arrays += divided.values()
        operands += [kernels.TileOperand("epilogue")] * len(divided)
        compute = TileProgram(self.program, t, side_by_side, self.row_scaled, numbers, without, stored_at)
        return _Call(arrays, operands, tables, reductions, compute, side_by_side, columns_of)

    def _powers(
        self,
        t: Traversal,
        arrays: list[Any],
        operands: list[kernels.TileOperand],
        columns: dict[int, jax.Array],
        without: WithoutFactors,
    ) -> dict[Any, int]:
        """Adds the powers of two of columns, as operands by themselves, after the others.

        Returns:
          For each the number of its tile after those of the traversal's operands; see `TileProgram.columns`.
        """
        numbers: dict[Any, int] = {}

        def add(key: Any, array: jax.Array, access: str, of: int | None = None) -> int:
            numbers[key] = len(arrays) - len(t.operands)
            arrays.append(array)
            operands.append(kernels.TileOperand(access, of))
            return len(arrays) - 1

        at = {o.name: i for i, o in enumerate(t.operands)}
        for o in t.operands:
            if o.name in columns and o.access in ONCE_A_SEGMENT:
                at[o.name] = add(o.name, columns[o.name], "times_row", at[o.name])
            elif o.name in without.used:
                add(o.name, columns[o.name], "slots")
        for (_, row), name in without.rows.items():
            if (row, name) not in numbers:
                add((row, name), columns[name].reshape(self.program.ops[row].shape), "times_row", at[row])
        return numbers

    def _entry_outputs(self, side_by_side: Sequence[tuple[int, ...]]) -> tuple[Any, ...]:
        """(feature shape, dtype) of each array that is written by entry."""
        ops = [self.program.ops[values[0]] for values in side_by_side]
        return tuple(
            ((len(values) * op.width,), jnp.dtype("float32")) if len(values) > 1 else (op.shape, jnp.dtype(op.dtype))
            for values, op in zip(side_by_side, ops, strict=True)
        )

    def _map(self, t: Traversal, call: _Call, env: dict[int, Any]) -> None:
        results = kernels.map_entries(
            call.compute.entries,
            call.arrays,
            call.operands,
            num_entries=self.rows.entries(t),
            index_tables=call.tables,
            outputs=self._entry_outputs(call.side_by_side),
            row_scaled_outputs=tuple(i for i, v in enumerate(t.entry_outputs) if v in self.row_scaled),
            interpret=self.interpret,
        )
        cleared = self.cleared(t.space, results, [(v,) for v in t.entry_outputs])
        for v, found in zip(t.entry_outputs, cleared, strict=True):
            if t.space == Space.NODE:
                self.rows.write(v, found, env)
            else:
                env[v] = found

    def _reduce(self, t: Traversal, call: _Call, env: dict[int, Any]) -> None:
        """Calls the kernel of a traversal that reduces segments, and stores its results in `env` by their values."""
        assert t.via is not None
        ops, rows = self.program.ops, self.rows.count(t)
        row_values, entry_values = kernels.traverse(
            call.compute.body,
            call.compute.rows,
            call.arrays,
            call.operands,
            segments=self._segments(t, rows),
            index_tables=call.tables,
            reductions=call.reductions,
            outputs=kernels.Outputs(
                entries=self._entry_outputs(call.side_by_side),
                rows=tuple((ops[v].shape, jnp.dtype(ops[v].dtype)) for v in t.row_outputs),
                row_scaled=tuple(i for i, v in enumerate(t.row_outputs) if v in self.row_scaled),
                covers_all_entries=True,
            ),
            factored=True,
            interpret=self.interpret,
        )
        found: Any
        for v, found in zip(t.row_outputs, row_values, strict=True):
            found = replace(found, columns=call.columns_of[v]) if v in call.columns_of else found
            if VIAS[t.via].coarse == Space.NODE:
                self.rows.write(v, found, env)
            else:
                env[v] = found
        for values, array in zip(
            call.side_by_side, self.cleared(t.space, entry_values, call.side_by_side), strict=True
        ):
            for i, v in enumerate(values):
                op = ops[v]
                env[v] = SharedColumns(array, i * op.width, op.shape, op.dtype) if len(values) > 1 else array

    def _segments(self, t: Traversal, rows: int) -> kernels.RowSegments:
        """The segments of the first `rows` rows, which are the first ones in `loop`, too."""
        assert t.via is not None
        own = self.graph.destinations_by_type if self.rows.sums_destinations(t) else None
        group = segments(self.graph, t.via) if own is None else own
        ordered = group.loop or group
        return kernels.RowSegments(
            offsets=first_rows(ordered.offsets, rows + 1),
            num_entries=num_rows(self.graph, t.space) if own is None else own.num_entries,
            num_rows=rows,
            order=ordered.order,
            row_order=None if group.loop is None else first_rows(group.loop.rows, rows),
            long_segments=ordered.long_segments,
        )

    def reductions(
        self, t: Traversal, arrays: list[Any], operands: list[kernels.TileOperand], powers: dict[int, jax.Array]
    ) -> tuple[tuple[kernels.Reduction, ...], WithoutFactors]:
        """The sums of a traversal, and which of its values are computed without the powers of two of columns.

        Powers by which sums are multiplied are added to the arrays.
        """
        without = without_factors(self.program, t, powers)
        sums = without.sums
        found = []
        for a in t.accumulators:
            shape, factor = self.program.ops[a.out].shape, None
            if a.out in sums:
                factor = len(arrays)
                arrays.append(powers[sums[a.out]].reshape(shape))
                operands.append(kernels.TileOperand("epilogue"))
            found.append(kernels.Reduction(a.kind, shape, a.score, factor))
        return tuple(found), without

    def stored_columns(self, t: Traversal, dtype: Any) -> tuple[dict[int, jax.Array], dict[int, jax.Array]]:
        """Powers of two of columns for rows that are stored in 16 bits: by value that they divide, and by output."""
        divided: dict[int, jax.Array] = {}
        columns: dict[int, jax.Array] = {}
        for v in self.row_scaled.intersection(t.row_outputs):
            op = self.program.ops[v]
            parts = op.args if op.name == "concat" else (v,)  # rows side by side
            powers = {a: p for a in parts if (p := self.scales.powers(a, dtype)) is not None}
            if len(powers) < len(parts):
                continue
            divided |= powers
            whole = [p for a in parts if (p := self.scales.powers(a)) is not None]
            columns[v] = whole[0] if len(whole) == 1 else jnp.concatenate(whole, axis=op.attr("axis"))
        return divided, columns

    def loaded(
        self, t: Traversal, env: dict[int, Any]
    ) -> tuple[list[Any], list[kernels.TileOperand], list[jax.Array], dict[int, jax.Array]]:
        """The arrays that a traversal reads, how it reads each, and the index tables by which it does.

        Rows in 16 bits come without the powers of two of their columns, which are last, by operand.
        """
        tables: list[jax.Array] = []
        powers: dict[int, jax.Array] = {}
        rows = None if t.via is None else self.rows.count(t)
        entries = self.rows.entries(t) if t.via is None else num_rows(self.graph, t.space)
        numbers: dict[str, int] = {}
        arrays: list[Any] = []
        operands: list[kernels.TileOperand] = []
        gathered_arrays = self.gathered_side_by_side(t, env)
        short = self.rows.sums_destinations(t)
        for o in t.operands:
            array, columns = self.rows_of(o, env), None
            if o.access == "row" and rows is not None:
                array = self.rows.first(rows, o.value, env)
            elif o.access == "dense" and entries < num_rows(self.graph, t.space):
                array = self.rows.of_destinations.get(o.value, array)
            elif short:
                array = self.rows.of_destinations[o.value]
            part = gathered_arrays.get(o.name, array)
            if isinstance(part, SharedColumns):
                array, columns = part.array, (part.first, part.shape)
            index = None
            access = {"dense": "entry", "gathered": "indexed"}.get(o.access, o.access)
            if access == "shared":
                array = (array.decode() if isinstance(array, kernels.RowScaled) else array)[0]
            if access == "row_indexed":
                assert o.via is not None
                index = len(tables)
                tables.append(first_rows(segments(self.graph, o.via).index, rows))
            elif access == "indexed":
                assert o.via is not None
                counts = self.graph.loop_tables.get(f"{t.via}:#{o.via}")
                if counts is not None and columns is None and self.is_count(o):
                    arrays.append(counts)
                    operands.append(kernels.TileOperand("position"))
                    continue
                by_position = self.graph.loop_tables.get(f"{t.via}:{o.via}")
                if o.via not in numbers:
                    numbers[o.via] = len(tables)
                    table = segments(self.graph, o.via).index if by_position is None else by_position
                    tables.append(first_rows(table, entries))
                access, index = "indexed" if by_position is None else "positioned", numbers[o.via]
                if columns is None and may_round(self.kernels, t) and linear_in(self.program, o.value):
                    array = self.narrow_rows_of(o, env)
            if o.name in self.kernels.read_row_scaled and isinstance(array, jax.Array):
                if access != "row" and o.value not in self.encoded:  # the vectors of types, which are few
                    self.encoded[o.value] = kernels.to_row_scaled(array, interpret=self.interpret)
                array = self.encoded.get(o.value, array)
            if isinstance(array, kernels.RowScaled) and array.columns is not None:
                part = slice(None) if o.part is None else slice(o.part[0], sum(o.part))
                powers[o.name] = array.columns[part]
                array = replace(array, columns=None)
            arrays.append(array)
            operands.append(kernels.TileOperand(access, index, columns, o.part))
        return arrays, operands, tables, powers

    def side_by_side(self, t: Traversal) -> list[tuple[int, ...]]:
        """The entry outputs of a traversal; those that go side by side into one array in one tuple.

        These are narrow values that only traversals read, each at its own entry. Side by side they share a memory
        sector, so that float32 takes no more time for them than a narrower dtype would.
        """
        ops = self.program.ops
        found: dict[Any, tuple[int, ...]] = {}
        for v in t.entry_outputs:
            op = ops[v]
            narrow = t.via is not None and len(op.shape) <= 1 and op.width <= _PACKED_WIDTH
            key = op.shape if narrow and self.read_by_entry(v) else v
            found[key] = (*found.get(key, ()), v)
        return list(found.values())

    def read_by_entry(self, value: int) -> bool:
        """Whether all that reads a value is traversals of its entries, each its own."""
        if value in self.program.outputs:
            return False
        readers = [instance for instance in self.kernels.instances if value in instance.reads]
        traversals = [t for t in readers if isinstance(t, Traversal)]
        return len(traversals) == len(readers) and all(
            o.access == "dense" and o.name == value for t in traversals for o in t.operands if o.value == value
        )

    def is_count(self, operand: Operand) -> bool:
        """Whether an operand is the number of entries of the rows that it is gathered from."""
        op = self.program.ops[operand.value]
        return op.name == "count" and op.attr("via") == operand.via and op.dtype == "float32"

    def gathered_side_by_side(self, t: Traversal, env: dict[int, Any]) -> dict[int, SharedColumns]:
        """Narrow values that are gathered from the same rows, side by side in one array: one sector instead of several.

        Returns:
          For each such operand's name, its columns.
        """
        ops = self.program.ops
        groups: dict[str, list[Operand]] = {}
        for o in t.operands:
            op = ops[o.value]
            if o.access == "gathered" and len(op.shape) <= 1 and op.width <= _PACKED_WIDTH and op.dtype == "float32":
                assert o.via is not None
                if f"{t.via}:#{o.via}" not in self.graph.loop_tables or not self.is_count(o):
                    groups.setdefault(o.via, []).append(o)
        found: dict[int, SharedColumns] = {}
        for via, members in groups.items():
            rows = num_rows(self.graph, VIAS[via].coarse)
            if len(members) < 2 or num_rows(self.graph, t.space) < rows or rows == 0:
                continue
            # The barrier keeps XLA from computing the parts inside the concatenation, element by element.
            parts = jax.lax.optimization_barrier([env[o.value].reshape(rows, -1) for o in members])
            array = jnp.concatenate(parts, axis=1)
            column = 0
            for o in members:
                op = ops[o.value]
                found[o.name] = SharedColumns(array, column, op.shape, op.dtype)
                column += op.width
        return found
