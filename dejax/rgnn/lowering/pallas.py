"""Level-2 instances as calls of the kernel templates in `dejax.pallas`.

Fusion makes no instance of what a template refuses (`ir.intra.refusal`). Should a template raise an error all the same,
the caller evaluates the instance with XLA and warns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dejax.pallas as kernels
from dejax.pallas import tuned_tables
from dejax.pallas._shapes import next_power_of_two
from dejax.pallas.formats.half_rows import of_stored, stored
from dejax.pallas.products.grouped_gemm import MAX_HALF_N
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.graphs.segments import Segments
from dejax.rgnn.ir.inter import VIAS
from dejax.rgnn.ir.intra import BY_ROW, Gemm, Instance, Kernels, Operand, Outer, Traversal, by_head
from dejax.rgnn.lowering.factors import WithoutFactors, without_factors
from dejax.rgnn.lowering.scales import ColumnScales
from dejax.rgnn.lowering.segments import num_rows, segment_sum, segments, valid_rows
from dejax.rgnn.lowering.tiles import TileProgram
from dejax.rgnn.options import Options
from dejax.rgnn.passes.storage import encoded_values, linear_in, may_round

_DTYPES = ("float32", "bfloat16", "float16")
# Values of at most this many numbers a row share an array where they are read at the same rows (a sector holds 8).
_PACKED_WIDTH = 4
# Sums of matrices by type are a kernel's where there are so many, of at most so many matrices each on average: bgs's
# 122 pairs of 64 by 64 by 27 node types take XLA 22 us.
_SUMS_AT_ONCE, _SUMMED_MATRICES = 4, 64


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


class PallasLowering:
    """Runs instances on arrays; `interpret` runs the kernels' own code on the CPU."""

    def __init__(
        self,
        kernels: Kernels,
        graph: RelGraph,
        options: Options,
        encoded: dict[int, Any],
        inputs: dict[int, Any],
    ) -> None:
        self.kernels, self.program, self.half, self.graph = kernels, kernels.program, kernels.half, graph
        self.precision, self.interpret = options.precision or "tf32", options.interpret
        self.encoded = dict(encoded)  # arrays that are there in 16 bits, too
        rounds = self.precision == "tf32" and "storage" not in options.disable
        self.often_read = encoded_values(kernels, partial(num_rows, graph)) if rounds else frozenset()
        scaled = self.precision != "bf16"
        self.scales = ColumnScales(self.program, inputs, self.scaled_values() if scaled else (), self.interpret)

    def scaled_values(self) -> list[int]:
        """The values whose columns are divided by powers of two, in products or where they are stored."""
        found = [*self.half, *self.often_read]
        found += [a for v in self.half if self.program.ops[v].name == "concat" for a in self.program.ops[v].args]
        for instance in self.kernels.instances:
            if isinstance(instance, Gemm):
                found.append(instance.x.value)
        return [v for v in dict.fromkeys(found) if self.program.ops[v].dtype == "float32"]

    def run(self, instance: Instance, env: dict[int, Any]) -> None:
        """Adds what the instance writes to `env`, whose values are arrays, `HalfRows` or `Columns`."""
        for v in (*instance.reads, *instance.writes):
            if self.program.ops[v].dtype not in _DTYPES:
                raise NotImplementedError(f"no kernel for {self.program.ops[v].dtype}")
        if isinstance(instance, Gemm):
            env.update(zip(instance.writes, self.gemm(instance, env), strict=True))
        elif isinstance(instance, Outer):
            env.update(zip(instance.writes, self.outer(instance, env), strict=True))
        elif isinstance(instance, Traversal):
            self.traversal(instance, env)
        else:
            raise NotImplementedError("left to XLA")

    def in_half(self, value: int, env: dict[int, Any]) -> Any:
        """An array whose rows kernels read, in 16 bits where that moves fewer bytes in all than it costs."""
        array = env[value]
        if not isinstance(array, jax.Array) or not (value in self.encoded or value in self.often_read):
            return array
        if value not in self.encoded:
            self.encoded[value] = self.in_16_bits(value, array)
        return self.encoded[value]

    def in_16_bits(self, value: int, array: jax.Array) -> Any:
        return kernels.to_half_rows(array, self.scales.powers(value), interpret=self.interpret)

    def sum_types(self, x: jax.Array, group: Segments) -> jax.Array:
        """Sums matrices of edge types by node type: XLA would read all of them for each node type."""
        few = group.num_items <= _SUMMED_MATRICES * group.num_rows
        if group.num_rows < _SUMS_AT_ONCE or not few or x.ndim < 3 or str(x.dtype) not in _DTYPES:
            return segment_sum(x, group)
        return kernels.sum_rows(x, group.offsets, order=group.order, interpret=self.interpret)

    # --- GEMM --------------------------------------------------------------------------------------------------------

    def row_index(self, operand: Operand, group: Segments) -> jax.Array | None:
        """For each position in the order of types, the row of the array; None where it is the position."""
        index = segments(self.graph, operand.via).index if operand.access == "gathered" and operand.via else None
        if operand.access == "shared":
            index = jnp.zeros((group.num_items,), jnp.int32)
        if group.order is None:
            return index
        return group.order if index is None else index[group.order]

    def gemm(self, instance: Gemm, env: dict[int, Any]) -> tuple[Any, ...]:
        op = self.program.ops[instance.out]
        product = self.program.ops[instance.product]
        group = segments(self.graph, instance.via)
        x, w = self.in_half(instance.x.value, env), env[instance.w]
        x_columns = None
        if not isinstance(x, kernels.HalfRows) and x.dtype == jnp.float32 and self.precision != "bf16":
            x_columns = self.scales.powers(instance.x.value, jnp.float32)
        # Rows of several heads in 16 bits are stored longer head by head: the matrices make the zeros behind each.
        heads_of = stored(op.shape) if self.makes_heads_stored(instance) else op.shape
        if heads_of != op.shape:
            w = jnp.pad(w, ((0, 0), (0, 0), (0, 0), (0, heads_of[-1] - op.shape[-1])))
        x, w, transpose, split = _as_grouped_gemm(instance.spec, x, w)
        x_index = self.row_index(instance.x, group)
        k, n = x.shape[-1], w.shape[-2 if transpose else -1]
        halves = isinstance(x, kernels.HalfRows)
        block = kernels.gemm_block(k, n, group.num_items, group.num_rows, self.precision, half_rows=halves)
        out_index, rows = group.order, group.num_items
        if instance.accumulate is not None:
            onto = segments(self.graph, instance.accumulate)
            out_index = onto.index if group.order is None else onto.index[group.order]
            rows = onto.num_rows
        padded = valid_rows(self.graph, product.space) is not None
        half_out = instance.out in self.half
        out_columns = self.scales.powers(instance.out) if half_out else None
        if out_columns is not None and heads_of != op.shape:
            behind = [(0, longer - size) for longer, size in zip(heads_of, op.shape, strict=True)]
            out_columns = jnp.pad(out_columns, behind, constant_values=1)
        by_type = lambda v: None if v is None else env[v].reshape(w.shape[0], *x.shape[1:-1], n)  # noqa: E731
        heads = 1 if instance.dot is None else self.program.ops[instance.dot].width // math.prod(x.shape[1:-1])
        epilogue = kernels.GemmEpilogue(
            bias=by_type(instance.bias),
            activation=instance.activation,
            dot_vector=by_type(instance.vector),
            dot_parts=heads,
        )
        output = kernels.GemmOutput(
            index=out_index,
            num_rows=rows,
            accumulate=instance.accumulate is not None,
            covers_all=not padded and instance.accumulate is None,
            dtype=jnp.dtype(op.dtype),
            row_scaled=half_out,
            columns=out_columns,
        )

        def call(fields: dict[str, Any]) -> Any:
            tiles = group.tiles_for(fields["block"], near=x_index is not None)
            tile = {key: value for key, value in fields.items() if key != "block"}
            groups = kernels.GemmGroups(group.offsets, tiles.row_type, tiles.start, tiles.block, group.num_items)
            return kernels.grouped_gemm(
                kernels.GroupedGemm(x, w, groups, x_index, x_columns, transpose, epilogue, output, self.precision),
                schedule=kernels.GemmSchedule(**tile) if tile else None,
                interpret=self.interpret,
            )

        groups = x.shape[1] if x.ndim == 3 else 1
        form = ("h" if halves else "f") + ("h" if half_out else "f") + "nt"[transpose]
        form += ("" if instance.bias is None else "b") + ("" if instance.vector is None else "d")
        fields = tuned_tables.choose(
            "gemm",
            f"{k}x{n}x{groups}-{self.precision}-{x.dtype}-{form}"
            f"-{tuned_tables.bucket(group.num_items / max(group.num_rows, 1))}-{tuned_tables.bucket(group.num_items)}",
            {"block": block},  # the rest by `grouped_gemm`
            lambda: tuned_tables.gemm_candidates(k, n) if groups == 1 else [{"block": b} for b in (32, 64, 128)],
            call,
        )
        result = call(fields)
        found = [result] if instance.dot is None else list(result)
        if split:
            found[0] = found[0].reshape(rows, *heads_of)
            if heads_of != op.shape:
                y = found[0]
                halved = isinstance(y, kernels.HalfRows)
                columns = self.scales.powers(instance.out)
                found[0] = of_stored(y.mantissa, y.exponent, op.shape, columns) if halved else y[..., : op.shape[-1]]
        if instance.dot is not None:
            found[1] = found[1].reshape(rows, *self.program.ops[instance.dot].shape)
        return tuple(found)

    def makes_heads_stored(self, instance: Gemm) -> bool:
        """Whether the result of a product is rows of heads in 16 bits whose zeros a tile has columns for."""
        shape = self.program.ops[instance.out].shape
        linear = instance.bias is None and instance.vector is None and instance.activation is None
        if not (linear and instance.out in self.half and instance.spec == "k,hkn->hn") or shape[0] == 1:
            return False
        n, longer = (next_power_of_two(math.prod(s)) for s in (shape, stored(shape)))
        return n == longer <= MAX_HALF_N

    def outer(self, instance: Outer, env: dict[int, Any]) -> tuple[jax.Array, ...]:
        group = segments(self.graph, instance.via)
        x, y = (self.in_half(o.value, env) for o in (instance.x, instance.y))
        heads = by_head(instance.spec)
        summed = heads and "h" not in instance.spec.split("->")[1]  # a product for each head, then their sum
        if not heads:  # zeros behind each head's features are features here
            x, y = (a.whole() if isinstance(a, kernels.HalfRows) and a.ndim > 2 else a for a in (x, y))
        lengths = x.shape[-1], y.shape[-1]
        # [rows, groups, width] on both sides; what is not a group is a width.
        shape = lambda a: (a.shape[0], a.shape[1] if heads else 1, int(np.prod(a.shape[2 if heads else 1 :])))  # noqa: E731
        x_index, y_index = self.row_index(instance.x, group), self.row_index(instance.y, group)
        gathered = x_index is not None or y_index is not None
        splits = group.near_splits if gathered and group.near_splits is not None else group.splits
        narrow = None if instance.narrow is None else env[instance.narrow.value]
        dtype = jnp.dtype(self.program.ops[instance.out].dtype)
        request = kernels.GroupedWeightGradient(
            x.reshape(shape(x)),
            y.reshape(shape(y)),
            group.offsets,
            group.num_items,
            x_index=x_index,
            y_index=y_index,
            narrow=None if narrow is None else narrow.reshape(shape(narrow)),
            splits=None if splits is None else splits.tables,
            rows_per_split=None if splits is None else splits.rows_per_split,
            precision=self.precision,
            dtype=jnp.float32 if summed else dtype,
        )
        found = kernels.grouped_weight_gradient(request, interpret=self.interpret)
        totals = found if isinstance(found, tuple) else (found,)
        sides = [(instance.spec, instance.y, lengths)]
        if instance.narrow is not None and narrow is not None:
            sides.append((instance.narrow_spec, instance.narrow, (lengths[0], narrow.shape[-1])))
        return tuple(
            self.as_contracted(total, spec, instance.x, other, stored_as).astype(dtype)
            for total, (spec, other, stored_as) in zip(totals, sides, strict=True)
        )

    def as_contracted(self, total: jax.Array, spec: str, x: Operand, y: Operand, lengths: tuple[int, int]) -> jax.Array:
        """Sums of outer products [types, groups, width of x, width of y] with the axes of the contraction's result.

        `lengths` are those of the last axes of x and y as they were multiplied, which may be longer.
        """
        (left, right), result = spec.split("->")[0].split(","), spec.split("->")[1]
        heads = "h" if by_head(spec) else ""
        letters = heads + left.replace("h", "" if heads else "h") + right.replace("h", "" if heads else "h")
        sizes = dict(zip(left, self.program.ops[x.name].shape, strict=True))
        sizes |= dict(zip(right, self.program.ops[y.name].shape, strict=True))
        longer = dict(sizes) | {side[-1]: length for side, length in zip((left, right), lengths, strict=True) if side}
        total = total.reshape(total.shape[0], *(longer[c] for c in letters))
        if longer != sizes:
            total = total[:, *(slice(sizes[c]) for c in letters)]
        if heads and "h" not in result:
            total, letters = total.sum(1), letters[1:]
        return jnp.transpose(total, (0, *(1 + letters.index(c) for c in result)))

    # --- traversal ---------------------------------------------------------------------------------------------------

    def traversal(self, t: Traversal, env: dict[int, Any]) -> None:
        ops = self.program.ops
        items = num_rows(self.graph, t.space)
        arrays, operands, tables, columns = self.loaded(t, env)
        together = self.together(t)
        item_outputs = tuple(
            ((len(values) * ops[values[0]].width,), jnp.dtype("float32"))
            if len(values) > 1
            else (ops[values[0]].shape, jnp.dtype(ops[values[0]].dtype))
            for values in together
        )
        beside = self.beside(t.beside, env)
        reductions, without = self.reductions(t, arrays, operands, columns)
        # Numbers of as many bits as those of the rows that they meet: threads have as many of each.
        in_half = any(isinstance(a, kernels.HalfRows) for a in arrays)
        divided, columns_of = self.stored_columns(t, jnp.bfloat16 if in_half else jnp.float32)
        # The powers of two of columns are operands by themselves, after the others.
        given = len(t.operands)
        numbers: dict[int | tuple[int, int], int] = {}

        def add(key: int | tuple[int, int], array: jax.Array, access: str, of: int | None = None) -> int:
            numbers[key] = len(arrays) - given
            arrays.append(array)
            operands.append(kernels.Operand(access, of))
            return len(arrays) - 1

        at = {o.name: i for i, o in enumerate(t.operands)}
        for o in t.operands:
            if o.name in columns and o.access in BY_ROW:
                at[o.name] = add(o.name, columns[o.name], "times_row", at[o.name])
            elif o.name in without.used:
                add(o.name, columns[o.name], "each_slot")
        for (_, row), name in without.rows.items():
            if (row, name) not in numbers:
                add((row, name), columns[name].reshape(ops[row].shape), "times_row", at[row])
        stored_at = {v: len(arrays) - given + i for i, v in enumerate(divided)}
        arrays += divided.values()
        operands += [kernels.Operand("late")] * len(divided)
        compute = TileProgram(self.program, t, together, self.half, numbers, without, stored_at)

        def with_columns(values: Sequence[int], rows: Sequence[Any]) -> list[Any]:
            return [
                replace(a, columns=columns_of[v]) if v in columns_of else a for v, a in zip(values, rows, strict=True)
            ]

        if t.via is None:
            results = kernels.map_items(
                compute.items,
                arrays,
                operands,
                num_items=items,
                index_tables=tables,
                outputs=item_outputs,
                half_outputs=tuple(i for i, v in enumerate(t.item_outputs) if v in self.half),
                interpret=self.interpret,
            )
            mask = valid_rows(self.graph, t.space)
            if mask is not None:
                clear = lambda a: jnp.where(mask.reshape(-1, *(1,) * (a.ndim - 1)), a, 0)  # noqa: E731
                results = tuple(jax.tree.map(clear, results))
            env.update(zip(t.item_outputs, results, strict=True))
            return
        group = segments(self.graph, t.via)
        loop = group.loop or group
        row_values, item_values = kernels.traverse(
            compute.body,
            compute.rows,
            arrays,
            operands,
            segments=kernels.Segments(
                offsets=loop.offsets,
                num_items=items,
                num_rows=num_rows(self.graph, VIAS[t.via].coarse),
                order=loop.order,
                row_order=None if group.loop is None else group.loop.rows,
                hubs=None if loop.hubs is None else loop.hubs.tables,
            ),
            index_tables=tables,
            reductions=reductions,
            outputs=kernels.Outputs(
                items=item_outputs,
                rows=tuple((ops[v].shape, jnp.dtype(ops[v].dtype)) for v in t.row_outputs),
                half=tuple(i for i, v in enumerate(t.row_outputs) if v in self.half),
                covers_all_items=valid_rows(self.graph, t.space) is None,
            ),
            factored=True,
            beside=beside,
            interpret=self.interpret,
        )
        env.update(zip(t.row_outputs, with_columns(t.row_outputs, row_values), strict=True))
        for values, array in zip(together, item_values, strict=True):
            for i, v in enumerate(values):
                op = ops[v]
                env[v] = Columns(array, i * op.width, op.shape, op.dtype) if len(values) > 1 else array

    def reductions(
        self, t: Traversal, arrays: list[Any], operands: list[kernels.Operand], powers: dict[int, jax.Array]
    ) -> tuple[tuple[kernels.Reduction, ...], WithoutFactors]:
        """The sums of a loop, and which of its values are computed without the powers of two of columns.

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
                operands.append(kernels.Operand("late"))
            found.append(kernels.Reduction(a.kind, shape, a.score, factor))
        return tuple(found), without

    def stored_columns(self, t: Traversal, dtype: Any) -> tuple[dict[int, jax.Array], dict[int, jax.Array]]:
        """The powers of two of columns for what a loop stores in 16 bits: by value that it divides, and by output."""
        divided: dict[int, jax.Array] = {}
        columns: dict[int, jax.Array] = {}
        for v in self.half.intersection(t.row_outputs):
            op = self.program.ops[v]
            parts = op.args if op.name == "concat" else (v,)  # rows side by side
            powers = {a: p for a in parts if (p := self.scales.powers(a, dtype)) is not None}
            if len(powers) < len(parts):
                continue
            divided |= powers
            halves = [p for a in parts if (p := self.scales.powers(a)) is not None]
            columns[v] = halves[0] if len(halves) == 1 else jnp.concatenate(halves, axis=op.attr("axis"))
        return divided, columns

    def loaded(
        self, t: Traversal, env: dict[int, Any]
    ) -> tuple[list[Any], list[kernels.Operand], list[jax.Array], dict[int, jax.Array]]:
        """The arrays that a loop reads, how it reads each, and the index tables by which it does.

        Rows in 16 bits come without the powers of two of their columns, which are last, by operand.
        """
        tables: list[jax.Array] = []
        powers: dict[int, jax.Array] = {}
        numbers: dict[str, int] = {}
        arrays: list[Any] = []
        operands: list[kernels.Operand] = []
        packed = self.packed(t, env)
        for o in t.operands:
            array, columns = env[o.value], None
            part = packed.get(o.name, array)
            if isinstance(part, Columns):
                array, columns = part.array, (part.first, part.shape)
            index = None
            access = {"dense": "item", "gathered": "indexed"}.get(o.access, o.access)
            if access == "shared":
                array = (array.decode() if isinstance(array, kernels.HalfRows) else array)[0]
            if access == "row_indexed":
                assert o.via is not None
                index = len(tables)
                tables.append(segments(self.graph, o.via).index)
            elif access == "indexed":
                assert o.via is not None
                counts = self.graph.loop_tables.get(f"{t.via}:#{o.via}")
                if counts is not None and columns is None and self.is_count(o):
                    arrays.append(counts)
                    operands.append(kernels.Operand("position"))
                    continue
                by_position = self.graph.loop_tables.get(f"{t.via}:{o.via}")
                if o.via not in numbers:
                    numbers[o.via] = len(tables)
                    tables.append(segments(self.graph, o.via).index if by_position is None else by_position)
                access, index = "indexed" if by_position is None else "positioned", numbers[o.via]
                if columns is None and may_round(self.kernels, t) and linear_in(self.program, o.value):
                    array = self.in_half(o.value, env)
            if o.name in self.kernels.rounded and isinstance(array, jax.Array):
                if access != "row" and o.value not in self.encoded:  # the vectors of types, which are few
                    self.encoded[o.value] = kernels.to_half_rows(array, interpret=self.interpret)
                array = self.encoded.get(o.value, array)
            if isinstance(array, kernels.HalfRows) and array.columns is not None:
                part = slice(None) if o.part is None else slice(o.part[0], sum(o.part))
                powers[o.name] = array.columns[part]
                array = replace(array, columns=None)
            arrays.append(array)
            when = None if o.when is None else [each.name for each in t.operands].index(o.when)
            operands.append(kernels.Operand(access, index, columns, o.part, when))
        return arrays, operands, tables, powers

    def beside(self, t: Traversal | None, env: dict[int, Any]) -> kernels.Beside | None:
        if t is None:
            return None
        assert t.via is not None
        group = segments(self.graph, t.via)
        arrays, operands, tables, powers = self.loaded(t, env)
        used = without_factors(self.program, t, powers).used
        for at, o in enumerate(t.operands):
            if o.name in used:  # the loop has no tiles to multiply by
                arrays[at] = replace(arrays[at], columns=powers.pop(o.name)).decode()
        reductions, _ = self.reductions(t, arrays, operands, powers)
        body = TileProgram(self.program, t, []).body
        return kernels.Beside(
            body=lambda *tiles: body(*tiles)[0],
            arrays=arrays,
            operands=operands,
            offsets=group.offsets,
            order=group.order,
            num_items=group.num_items,
            index_tables=tables,
            reductions=reductions,
            factored=True,
        )

    def together(self, t: Traversal) -> list[tuple[int, ...]]:
        """The item outputs of a loop; those that go side by side into one array in one tuple.

        They are narrow values that loops alone read, and by item: one sector for all of them, so that float32 costs
        nothing where they are narrower.
        """
        ops = self.program.ops
        found: dict[Any, tuple[int, ...]] = {}
        for v in t.item_outputs:
            op = ops[v]
            narrow = t.via is not None and len(op.shape) <= 1 and op.width <= _PACKED_WIDTH
            key = op.shape if narrow and self.read_by_item(v) else v
            found[key] = (*found.get(key, ()), v)
        return list(found.values())

    def read_by_item(self, value: int) -> bool:
        """Whether all that reads a value is loops over its items, each its own."""
        if value in self.program.outputs:
            return False
        readers = [instance for instance in self.kernels.instances if value in instance.reads]
        loops = [t for t in readers if isinstance(t, Traversal)]
        return len(loops) == len(readers) and all(
            o.access == "dense" and o.name == value for t in loops for o in t.loaded if o.value == value
        )

    def is_count(self, operand: Operand) -> bool:
        """Whether an operand is the number of items of the rows that it is gathered from."""
        op = self.program.ops[operand.value]
        return op.name == "count" and op.attr("via") == operand.via and op.dtype == "float32"

    def packed(self, t: Traversal, env: dict[int, Any]) -> dict[int, Columns]:
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
        found: dict[int, Columns] = {}
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
                found[o.name] = Columns(array, column, op.shape, op.dtype)
                column += op.width
        return found


def _as_grouped_gemm(spec: str, x: Any, w: jax.Array) -> tuple[Any, jax.Array, bool, bool]:
    """A contraction as `grouped_gemm` takes it: (x, w, w is transposed, the result must be reshaped)."""
    rows, types = x.shape[0], w.shape[0]
    if spec in ("k,kn->n", "hk,hkn->hn"):
        return x, w, False, False
    if spec == "k,k->":
        return x, w[:, :, None], False, True
    if spec in ("n,kn->k", "hn,hkn->hk"):
        return x, w, True, False
    if spec == "k,hkn->hn":
        _, h, k, n = w.shape
        return x, jnp.transpose(w, (0, 2, 1, 3)).reshape(types, k, h * n), False, True
    if spec == "hn,hkn->k":
        _, h, k, n = w.shape
        if isinstance(x, kernels.HalfRows) and x.width is not None:  # zeros behind each head's features meet zeros
            x = x.whole()
            w = jnp.pad(w, ((0, 0), (0, 0), (0, 0), (0, x.shape[-1] - n)))
            n = x.shape[-1]
        return x.reshape(rows, h * n), jnp.transpose(w, (0, 2, 1, 3)).reshape(types, k, h * n), True, False
    heads = x.shape[1]
    wide = jnp.broadcast_to(w[:, None], (types, heads, *w.shape[1:]))
    return x, wide, spec == "hn,kn->hk", False
