"""Plain XLA: every level-1 operator in terms of `jax.numpy`, which is the reference and the CPU path.

A level-2 instance is evaluated by computing the level-1 values that it writes from those that are there; what it would
keep in registers is an intermediate of XLA.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dejax._compat import computed_once, reduce_extremum
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.graphs.segments import Segments
from dejax.rgnn.ir.inter import TYPE_VIA, Op, Program, Space, parse_spec
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
    wide,
    zero_if_none,
)

# Rows a tile of a grouped GEMM on the CPU: a batched matrix product over tiles costs O(rows + types) and no more.
_TILE = 32


def _on_cpu() -> bool:
    """XLA's CPU compiler takes many products of two bfloat16 arrays for float32 results and fails when they run."""
    return jax.default_backend() == "cpu"


class Evaluator:
    """Evaluates level-1 operators on arrays.

    Attributes:
      precision: of matrix products: "f32", "tf32", "bf16" or None for JAX's default.
      sum_types: sums weights of edge types by a grouping of those; `segment_sum` by default.
    """

    def __init__(
        self, program: Program, graph: RelGraph, precision: str | None, sum_types: SegmentSum = segment_sum
    ) -> None:
        self.program, self.graph, self.precision, self.sum_types = program, graph, precision, sum_types
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
        special = {
            "const": self._const,
            "count": self._count,
            "gather": self._gather,
            "reduce": self._reduce,
            "softmax": self._softmax,
            "linear": self._linear,
            "outer": self._outer,
            "product_of_others": self._product_of_others,
            "lookup": lambda op, args: lookup(op, self.graph, *args),
            "place": lambda op, args: place(op, self.graph, self._space_of(op), *args),
        }.get(op.name)
        result = special(op, args) if special else _rowwise(op, self.program, args)
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
        tiles = _Tiles(group)
        product = self._einsum(f"tb{left},t{right}->tb{out}", tiles.split(x), w[tiles.row_type])
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
        tiles = _Tiles(group)
        product = self._einsum(f"tb{left},tb{right}->t{out}", tiles.split(x), tiles.split(y))
        return jax.ops.segment_sum(product, tiles.row_type, group.num_rows, indices_are_sorted=False)


class _Tiles:
    """Rows grouped by type, cut into tiles of one type each."""

    def __init__(self, group: Segments) -> None:
        table = group.tiles_for(_TILE)
        self.group, self.row_type = group, jnp.asarray(table.row_type)
        offsets = jnp.asarray(group.offsets)
        position = jnp.asarray(table.start)[:, None] + jnp.arange(_TILE, dtype=jnp.int32)
        self.valid = position < offsets[self.row_type + 1][:, None]
        entry = jnp.minimum(position, max(group.num_entries - 1, 0))
        self.entry = entry if group.order is None else jnp.asarray(group.order)[entry]
        # Where each row went: its tile is as many tiles past its type's first as its rank in the type holds blocks.
        counts = offsets[1:] - offsets[:-1]
        first_tile = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum((counts + _TILE - 1) // _TILE)])
        kind = jnp.minimum(jnp.asarray(group.index), group.num_rows - 1)
        if group.order is None:
            rank = jnp.arange(group.num_entries, dtype=jnp.int32)
        else:
            rank = (
                jnp.zeros((group.num_entries,), jnp.int32)
                .at[group.order]
                .set(jnp.arange(group.num_entries, dtype=jnp.int32))
            )
        self.slot = first_tile[kind] * _TILE + rank - offsets[kind]
        self.padding = jnp.asarray(group.index) >= group.num_rows

    def split(self, x: jax.Array) -> jax.Array:
        """Rows to [tiles, rows a tile, ...], zeros where a tile is not full."""
        return jnp.where(
            self.valid.reshape(*self.valid.shape, *(1,) * (x.ndim - 1)), x[self.entry], jnp.zeros((), x.dtype)
        )

    def join(self, y: jax.Array) -> jax.Array:
        """[tiles, rows a tile, ...] back to rows; zeros for padding rows."""
        rows = y.reshape(y.shape[0] * y.shape[1], *y.shape[2:]).at[self.slot].get(mode="fill", fill_value=0)
        return jnp.where(self.padding.reshape(-1, *(1,) * (rows.ndim - 1)), jnp.zeros((), rows.dtype), rows)


def _axes(axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + 1 for a in axes)


def _rowwise(op: Op, program: Program, args: list[jax.Array]) -> jax.Array:
    name = op.name
    if name in ELEMENTWISE:
        rank = len(op.shape)
        aligned = [a.reshape(a.shape[0], *(1,) * rank) if a.ndim == 1 else a for a in args]
        return ELEMENTWISE[name](op, *aligned)
    x = args[0]
    if name == "dot":
        return jnp.sum(wide(x) * wide(args[1]), axis=-1)
    if name == "sum_features":
        return jnp.sum(wide(x), axis=_axes(op.attr("axes")), keepdims=op.attr("keepdims"))
    if name == "extremum_features":
        differentiable = jnp.issubdtype(x.dtype, jnp.inexact)
        how = _extremum if differentiable else _extremum.fun
        return how(x, _axes(op.attr("axes")), op.attr("op"), op.attr("keepdims"))
    if name == "extremum_share":
        return _extremum_share(x, _axes(op.attr("axes")), op.attr("op"))
    if name == "reshape":
        return x.reshape(x.shape[0], *op.shape)
    if name == "transpose":
        return jnp.transpose(x, (0, *_axes(op.attr("perm"))))
    if name == "broadcast":
        x = x.reshape(x.shape[0], *(1,) * len(op.shape)) if x.ndim == 1 else x
        return jnp.broadcast_to(x, (x.shape[0], *op.shape))
    if name == "concat":
        return jnp.concatenate([a.astype(op.dtype) for a in args], axis=op.attr("axis") + 1)
    if name == "slice":
        return jax.lax.slice_in_dim(x, op.attr("start"), op.attr("stop"), axis=op.attr("axis") + 1)
    if name == "pad":
        config = [(0, 0, 0)] * x.ndim
        config[op.attr("axis") + 1] = (op.attr("before"), op.attr("after"), 0)
        return jax.lax.pad(x, jnp.zeros((), x.dtype), config)
    raise NotImplementedError(f"operator {name!r} has no XLA lowering")


# Elementwise operators; each works on whole arrays here and on tiles inside kernels.
ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "add": lambda op, x, y: x + y,
    "sub": lambda op, x, y: x - y,
    "mul": lambda op, x, y: x * y,
    "div": lambda op, x, y: x / y,
    "max": lambda op, x, y: jnp.maximum(x, y),
    "min": lambda op, x, y: jnp.minimum(x, y),
    "gt": lambda op, x, y: (x > y).astype(x.dtype),
    "eq": lambda op, x, y: (x == y).astype(x.dtype),
    "select": lambda op, c, x, y: jnp.where(c > 0, x, y),
    "power": lambda op, x, y: jnp.power(x, y),
    "atan2": lambda op, y, x: jnp.arctan2(y, x),
    "neg": lambda op, x: -x,
    "sin": lambda op, x: jnp.sin(x),
    "cos": lambda op, x: jnp.cos(x),
    "log1p": lambda op, x: jnp.log1p(x),
    "expm1": lambda op, x: jnp.expm1(x),
    "softplus": lambda op, x: jnp.logaddexp(x, jnp.zeros_like(x)),
    "exp": lambda op, x: jnp.exp(x),
    "log": lambda op, x: jnp.log(x),
    "sqrt": lambda op, x: jnp.sqrt(x),
    "rsqrt": lambda op, x: jax.lax.rsqrt(x),
    "tanh": lambda op, x: jnp.tanh(x),
    "sigmoid": lambda op, x: 1 / (1 + jnp.exp(-x)),
    "erf": lambda op, x: jax.lax.erf(x),
    "abs": lambda op, x: jnp.abs(x),
    "sign": lambda op, x: jnp.where(x == x, (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype), x),
    "square": lambda op, x: x * x,
    "reciprocal": lambda op, x: 1 / x,
    "relu": lambda op, x: jnp.where(x <= 0, jnp.zeros_like(x), x),  # NaN stays
    "leaky_relu": lambda op, x: jnp.where(x > 0, x, op.attr("slope") * x),
    "step": lambda op, x: jnp.where(x > 0, jnp.ones_like(x), jnp.full_like(x, op.attr("slope"))),
    "pow": lambda op, x: _power(x, op.attr("exponent")),
    "cast": lambda op, x: x,
    "stop_gradient": lambda op, x: jax.lax.stop_gradient(x),
}


def _power(x: jax.Array, exponent: float) -> jax.Array:
    """x to a constant power, by multiplication where the exponent is a small whole number."""
    if exponent == int(exponent) and 0 <= exponent <= 4:
        result = jnp.ones_like(x)
        for _ in range(int(exponent)):
            result = result * x
        return result
    whole = jnp.issubdtype(x.dtype, jnp.integer)  # a power by a float would be float32's
    return jax.lax.integer_pow(x, int(exponent)) if whole else x**exponent


@partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _extremum(x: jax.Array, axes: tuple[int, ...], how: str, keepdims: bool) -> jax.Array:
    return reduce_extremum(how, x, axes, keepdims)


@_extremum.defjvp
def _extremum_jvp(axes: tuple[int, ...], how: str, keepdims: bool, primals: Any, tangents: Any) -> tuple[Any, Any]:
    """JAX's own rule divides 0 by 0 where the extremum equals no element; see `_extremum_share`."""
    share = _extremum_share(primals[0], axes, how)
    tangent = (share * tangents[0]).sum(axis=axes, keepdims=keepdims).astype(tangents[0].dtype)
    return _extremum(primals[0], axes, how, keepdims), tangent


def _extremum_share(x: jax.Array, axes: tuple[int, ...], how: str) -> jax.Array:
    """The part of each element in the gradient of the extremum over `axes`: equal elements share it.

    XLA may compute `x` once for the extremum and once for the comparison, and round the two differently, whatever
    barrier stands between. Then no element equals the extremum. The element that the reduction finds counts, too, and
    so does each NaN.
    """
    order = [a for a in range(x.ndim) if a not in axes] + list(axes)
    rows = jnp.transpose(x, order)
    flat = rows.reshape(*rows.shape[: x.ndim - len(axes)], math.prod(x.shape[a] for a in axes))
    first = (jnp.argmax if how == "max" else jnp.argmin)(flat, axis=-1, keepdims=True)
    chosen = (flat == reduce_extremum(how, flat, -1, True)) | (flat != flat) | (jnp.arange(flat.shape[-1]) == first)
    chosen = wide(chosen.astype(x.dtype))
    share = chosen / chosen.sum(axis=-1, keepdims=True)
    return jnp.transpose(share.reshape(rows.shape), [order.index(a) for a in range(x.ndim)])
