"""Plain XLA: every level-1 operator in terms of `jax.numpy`, which is the reference and the CPU path.

Operators that work row by row have their form in the table of operators (`ir/operators.py`). The others, which read the
tables of a graph, are methods of `Evaluator`. A level-2 instance is evaluated by computing the level-1 values that it
writes from those that are there; what it would keep in registers is an intermediate of XLA.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dejax._compat import computed_once
from dejax._platform import platform
from dejax.rgnn.graphs.building.sorting_traced import count_before, inverse, take
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.graphs.segments import Segments
from dejax.rgnn.ir.forms import wide
from dejax.rgnn.ir.inter import ELEMENTWISE, OPERATORS, TYPE_VIA, Op, OpProgram, Space, parse_spec
from dejax.rgnn.lowering.indexed import lookup, place
from dejax.rgnn.lowering.segment_products import product_of_others, segment_prod
from dejax.rgnn.lowering.segments import (
    SegmentSum,
    extremum_of_all,
    lowest,
    num_rows,
    segment_extremum,
    segment_sum,
    segments,
    take_rows,
    valid_rows,
    where_rows,
    zero_if_none,
)

# Rows a tile of a grouped GEMM on the CPU: a batched matrix product over tiles costs O(rows + types) and no more.
_TILE = 32


def _on_cpu() -> bool:
    """XLA's CPU compiler takes many products of two bfloat16 arrays for float32 results and fails when they run."""
    return platform() == "cpu"


class Evaluator:
    """Evaluates level-1 operators on arrays.

    Attributes:
      precision: the precision of matrix products: "f32", "tf32", "bf16" or None for JAX's default.
      sum_types: sums weights of edge types by a grouping of those; `segment_sum` by default.
    """

    def __init__(
        self, program: OpProgram, graph: RelGraph, precision: str | None, sum_types: SegmentSum = segment_sum
    ) -> None:
        self.program, self.graph, self.precision, self.sum_types = program, graph, precision, sum_types
        self.tiles: dict[str, _TypeTiles] = {}
        # Backward compares these with their extremum: XLA must not compute them once for that and once to be kept, and
        # round the two differently.
        self.compared = {op.args[0] for op in program.ops if op.is_extremum}
        # Backward has the largest score of forward: what it subtracts that from must be rounded as it was there.
        exponents = (program.ops[op.args[0]] for op in program.ops if op.name == "exp")
        self.compared |= {op.args[0] for op in exponents if op.name == "sub"}

    def compute(self, wanted: tuple[int, ...], env: dict[int, jax.Array]) -> None:
        """Adds the wanted values to `env`, computed from what is there; intermediates are not kept."""
        local: dict[int, jax.Array] = {}

        def value(i: int) -> jax.Array:
            if i in env:
                return env[i]
            if i not in local:
                op = self.program.ops[i]
                local[i] = self.apply(op, [value(a) for a in op.args])
                if i in self.compared:
                    local[i] = computed_once(local[i], self.graph.by_receiver.offsets[0] == 0)
            return local[i]

        for i in wanted:
            env[i] = value(i)

    def apply(self, op: Op, args: list[jax.Array]) -> jax.Array:
        form = OPERATORS[op.name].form
        if form is None:  # one that reads the graph, below
            return getattr(self, f"_{op.name}")(op, args).astype(op.dtype)
        if op.name in ELEMENTWISE:
            rank = len(op.shape)
            args = [a.reshape(a.shape[0], *(1,) * rank) if a.ndim == 1 else a for a in args]
        result = form(*args, **dict(op.attrs))
        return result.astype(op.dtype)

    def _const(self, op: Op, args: list[jax.Array]) -> jax.Array:
        return jnp.full((num_rows(self.graph, op.space),), op.attr("value"), op.dtype)

    def _count(self, op: Op, args: list[jax.Array]) -> jax.Array:
        if op.attr("via") == "all":
            valid, rows = valid_rows(self.graph, op.attr("space")), num_rows(self.graph, op.attr("space"))
            return jnp.full((1,), rows) if valid is None else valid.sum(keepdims=True)
        offsets = segments(self.graph, op.attr("via")).offsets
        return offsets[1:] - offsets[:-1]

    def _gather(self, op: Op, args: list[jax.Array]) -> jax.Array:
        (x,) = args
        return self._read(x, op.attr("via"), op.space)

    def _read(self, x: jax.Array, via: str, space: Space) -> jax.Array:
        if via == "all":
            return jnp.broadcast_to(x, (num_rows(self.graph, space), *x.shape[1:]))
        return take_rows(x, segments(self.graph, via).index)

    def _reduce(self, op: Op, args: list[jax.Array]) -> jax.Array:
        (x,) = args
        return self._reduced(x, op.attr("via"), self._space_of(op), op.attr("op"))

    def _reduced(self, x: jax.Array, via: str, space: Space, how: str) -> jax.Array:
        if via == "all":
            return self._reduced_to_one(x, valid_rows(self.graph, space), how)
        group = segments(self.graph, via)
        if how in ("max", "min"):
            return segment_extremum(x, group, 1 if how == "max" else -1)
        if how == "prod":
            return segment_prod(wide(x), group.order, group.offsets)
        return (self.sum_types if space == Space.EDGE_TYPE else segment_sum)(x, group)

    def _reduced_to_one(self, x: jax.Array, valid: jax.Array | None, how: str) -> jax.Array:
        if how == "sum":
            return where_rows(valid, wide(x)).sum(0, keepdims=True)
        if how == "prod":
            return where_rows(valid, wide(x), 1).prod(0, keepdims=True)
        if not x.shape[0]:
            return jnp.zeros((1, *x.shape[1:]), x.dtype)
        sign = 1 if how == "max" else -1
        found = extremum_of_all(where_rows(valid, x, lowest(x.dtype, sign)), sign)
        return zero_if_none(found, jnp.ones((), bool) if valid is None else valid.any(), sign)

    def _product_of_others(self, op: Op, args: list[jax.Array]) -> jax.Array:
        group = segments(self.graph, op.attr("via"))
        x, *directions = map(wide, args)
        return product_of_others(x, directions, group.order, group.offsets)

    def _lookup(self, op: Op, args: list[jax.Array]) -> jax.Array:
        return lookup(op, self.graph, *args)

    def _place(self, op: Op, args: list[jax.Array]) -> jax.Array:
        return place(op, self.graph, self._space_of(op), *args)

    def _space_of(self, op: Op) -> Space:
        return self.program.ops[op.args[0]].space

    def _softmax(self, op: Op, args: list[jax.Array]) -> jax.Array:
        (score,), via, space = args, op.attr("via"), op.space
        score = wide(score)
        largest = self._reduced(jax.lax.stop_gradient(score), via, space, "max")
        e = jnp.exp(score - self._read(largest, via, space))
        total = self._read(self._reduced(e, via, space, "sum"), via, space)
        return e / jnp.where(total == 0, jnp.ones((), total.dtype), total)

    def _einsum(self, subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
        dtype = jnp.promote_types(x.dtype, y.dtype)
        x, y = x.astype(dtype), y.astype(dtype)
        precision = {"f32": jax.lax.Precision.HIGHEST, "tf32": jax.lax.Precision.DEFAULT}.get(self.precision or "")
        if self.precision == "bf16" and dtype == jnp.float32:
            # Not a cast there and back, which XLA may leave out.
            x, y = (jax.lax.reduce_precision(a, exponent_bits=8, mantissa_bits=7) for a in (x, y))
            x, y = (x, y) if _on_cpu() else (x.astype(jnp.bfloat16), y.astype(jnp.bfloat16))
        elif _on_cpu() and dtype in (jnp.bfloat16, jnp.float16):
            x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        result = jnp.float32 if x.dtype in (jnp.bfloat16, jnp.float16) else x.dtype
        return jnp.einsum(subscripts, x, y, precision=precision, preferred_element_type=result)

    def _tiles(self, via: str) -> _TypeTiles:
        """The tiles of a grouping by type, made once for all products."""
        if via not in self.tiles:
            self.tiles[via] = _TypeTiles(segments(self.graph, via))
        return self.tiles[via]

    def _linear(self, op: Op, args: list[jax.Array]) -> jax.Array:
        (x, w), via = args, op.attr("via")
        left, right, out = parse_spec(op.attr("spec"))
        if via == "self":
            return self._einsum(f"r{left},r{right}->r{out}", x, w)
        if via == "all" or w.shape[0] == 1:
            result = self._einsum(f"r{left},{right}->r{out}", x, w[0])
            return result if via == "all" else where_rows(valid_rows(self.graph, op.space), result)
        group = segments(self.graph, via)
        if len(right) < 2 or via != TYPE_VIA.get(op.space):
            return self._einsum(f"r{left},r{right}->r{out}", x, take_rows(w, group.index))
        if x.shape[0] == 0:
            return jnp.zeros((0, *op.shape), op.dtype)
        tiles = self._tiles(via)
        product = self._einsum(f"tb{left},t{right}->tb{out}", tiles.split(x), take(w, tiles.row_type))
        return tiles.join(product)

    def _outer(self, op: Op, args: list[jax.Array]) -> jax.Array:
        (x, y), via = args, op.attr("via")
        left, right, out = parse_spec(op.attr("spec"))
        if via == "self":
            return self._einsum(f"r{left},r{right}->r{out}", x, y)
        space = self._space_of(op)
        if via == "all" or num_rows(self.graph, op.space) == 1:
            mask = valid_rows(self.graph, space)
            x, y = where_rows(mask, x), where_rows(mask, y)
            return self._einsum(f"r{left},r{right}->{out}", x, y)[None]
        group = segments(self.graph, via)
        if via != TYPE_VIA.get(space) or x.shape[0] == 0:
            return segment_sum(self._einsum(f"r{left},r{right}->r{out}", x, y), group)
        tiles = self._tiles(via)
        product = self._einsum(f"tb{left},tb{right}->t{out}", tiles.split(x), tiles.split(y))
        total = jnp.zeros((group.num_rows, *product.shape[1:]), product.dtype).at[tiles.row_type]
        return total.add(product, wrap_negative_indices=False)


class _TypeTiles:
    """Rows grouped by type, cut into tiles of one type each."""

    def __init__(self, group: Segments) -> None:
        table = group.tiles_for(_TILE)
        self.group, self.row_type = group, jnp.asarray(table.row_type)
        offsets = jnp.asarray(group.offsets)
        position = jnp.asarray(table.start)[:, None] + jnp.arange(_TILE, dtype=jnp.int32)
        self.valid = position < take(offsets, self.row_type + 1)[:, None]
        entry = jnp.minimum(position, max(group.num_entries - 1, 0))
        self.entry = entry if group.order is None else take(group.order, entry)
        # Where each row went: its tile is as many tiles past its type's first as its rank in the type holds blocks.
        counts = offsets[1:] - offsets[:-1]
        # Counts are not negative: `//` would also round negative numbers, with seven operations more.
        first_tile = count_before(jax.lax.shift_right_logical(counts + (_TILE - 1), np.int32(_TILE.bit_length() - 1)))
        kind = jnp.minimum(jnp.asarray(group.index), group.num_rows - 1)
        if group.order is None:
            rank = jnp.arange(group.num_entries, dtype=jnp.int32)
        else:
            rank = inverse(jnp.asarray(group.order))
        self.padding = jnp.asarray(group.index) >= group.num_rows
        slot = take(first_tile * _TILE - offsets, kind) + rank
        self.slot = jnp.where(self.padding, 0, slot)

    def split(self, x: jax.Array) -> jax.Array:
        """Rows to [tiles, rows a tile, ...], zeros where a tile is not full."""
        valid = self.valid.reshape(*self.valid.shape, *(1,) * (x.ndim - 1))
        return jnp.where(valid, take(x, self.entry), jnp.zeros((), x.dtype))

    def join(self, y: jax.Array) -> jax.Array:
        """[tiles, rows a tile, ...] back to rows; zeros for padding rows."""
        rows = take(y.reshape(y.shape[0] * y.shape[1], *y.shape[2:]), self.slot)
        return jnp.where(self.padding.reshape(-1, *(1,) * (rows.ndim - 1)), jnp.zeros((), rows.dtype), rows)
