"""The operators that kernels compute, as primitives of JAX: linear ones know their transposes, all know `vmap`.

`reduce` sums the rows of entries by segment, `spread` gives each entry the row of its segment: each is the other's
transpose. `gather_reduce` reduces gathered rows times scales without storing them. A batch becomes more features of
the same entries or, where ids differ, more entries and segments: so kernels never see an axis of a batch, and ids are
sorted as one array. `scatter` is the reduction of unsorted entries by XLA. Whether a scatter or a sort and a kernel is
faster depends on the batch, so `vmap` chooses again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from dejax import _compat
from dejax.pallas.segments.reduce import segment_reduce
from dejax.segment import _cost
from dejax.segment._grouping import Grouping, Unsorted, group

_LARGEST = 2**31 - 1


class ReadEdges(NamedTuple):
    """Senders and receivers, grouped for a sum over either.

    Attributes:
        senders: int32[edges], rows that are gathered; those out of range are left out.
        by_receiver: the grouping by the segments of the result.
        by_sender: the grouping for the transpose; None: it is made there.
        rows: int32[edges], senders in the order of receivers; None: they are put in order here.
        rows_back: int32[edges], receivers in the order of senders, or None.
    """

    senders: Any
    by_receiver: Grouping
    by_sender: Grouping | None = None
    rows: Any = None
    rows_back: Any = None

    def swapped(self, num_senders: int, interpret: bool | None) -> ReadEdges:
        """The same edges in the other direction."""
        back = self.by_sender
        if back is None:
            back = group(self.senders, num_senders, is_sorted=False, kernels=True, interpret=interpret)
        return ReadEdges(self.by_receiver.ids, back, self.by_receiver, self.rows_back, self.rows)


class _Alike(Primitive):
    """A primitive whose operands vary over the same axes of a mesh, as the results of its derivatives then do."""

    def bind(self, *args: Any, **params: Any) -> Any:
        return super().bind(*_compat.varying_alike(args), **params)


def _define(name: str, run: Any, aval: Any) -> Primitive:
    """A primitive with one result, which runs a function of arrays and static parameters."""
    primitive = _Alike(name)

    @functools.cache
    def jitted(**params: Any) -> Any:
        return jax.jit(functools.partial(run, **params))

    primitive.def_impl(lambda *args, **params: jitted(**params)(*args))
    primitive.def_abstract_eval(lambda *args, **params: _compat.varying_result(*aval(*args, **params), *args))
    mlir.register_lowering(primitive, _compat.lower_unchecked(run, multiple_results=False))
    return primitive


def _no_tangent(tangent: Any) -> bool:
    return type(tangent) is ad.Zero


def _zero_like(out: Any) -> Any:
    return ad.Zero(jax.typeof(out).to_tangent_aval())


def wide(dtype: Any) -> Any:
    """The dtype in which floats are accumulated."""
    dtype = jnp.dtype(dtype)
    return jnp.dtype(jnp.float32) if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 else dtype


def _batched(array: Any, axis: Any, size: int) -> Array:
    """The array with the batch axis first; repeated where it is not batched."""
    if axis is None:
        return jnp.broadcast_to(array[None], (size, *array.shape))
    return jnp.moveaxis(array, axis, 0)


def _size(args: Sequence[Any], axes: Sequence[Any]) -> int:
    return next(a.shape[axis] for a, axis in zip(args, axes, strict=True) if axis is not None)


def _merged_ids(ids: Array, count: int) -> Array:
    """Ids [batch, entries] of `count` segments each as those of `batch * count` segments."""
    batch = ids.shape[0]
    if batch * (count + 1) > _LARGEST or ids.size > _LARGEST:
        raise NotImplementedError(
            f"a batch under vmap must have fewer than 2^31 entries and segments in all, got {batch} times "
            f"{ids.shape[1]} entries and {count} segments; use jax.lax.map over parts of the batch"
        )
    first = jnp.arange(batch, dtype=jnp.int32)[:, None] * count
    return jnp.where((ids >= 0) & (ids < count), ids + first, batch * count).reshape(-1)


def _joined(x: Array) -> Array:
    """[batch, rows, width] as [batch * rows, width]."""
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2])


def _features_first(x: Array, axis: int) -> Array:
    """A batched [rows, width] as [rows, batch * width]."""
    x = jnp.moveaxis(x, axis, 1)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2])


def in_scales(rows: Array, scales: int) -> Array:
    """[edges, width] as [edges, scales, width / scales]; of size 0, too, where -1 has no meaning."""
    return rows.reshape(rows.shape[0], scales, rows.shape[1] // max(scales, 1))


# reduce: [entries, width] -> [segments, width]


def _run_reduce(data: Array, *arrays: Any, tree: Any, kind: str, dtype: Any, interpret: bool | None) -> Array:
    g: Grouping = jax.tree.unflatten(tree, arrays)
    return segment_reduce(kind, data, g.segments, rows=g.order, dtype=dtype, interpret=interpret)


def _reduce_aval(data: Any, *arrays: Any, tree: Any, dtype: Any, **_: Any) -> tuple[tuple[int, ...], Any]:
    return (jax.tree.unflatten(tree, arrays).num_segments, data.shape[1]), dtype


reduce_p = _define("dejax_segment_reduce", _run_reduce, _reduce_aval)


def reduce(kind: str, data: Array, g: Grouping | Unsorted, dtype: Any = None, interpret: bool | None = None) -> Array:
    """[entries, width] reduced to [segments, width], of `dtype`, by default that of `data`."""
    dtype = jnp.dtype(dtype or data.dtype)
    if isinstance(g, Unsorted):
        return scatter_p.bind(data, g.ids, kind=kind, segments=g.num_segments, dtype=dtype, interpret=interpret)
    arrays, tree = jax.tree.flatten(g)
    return reduce_p.bind(data, *arrays, tree=tree, kind=kind, dtype=dtype, interpret=interpret)


def _linear_jvp(primitive: Primitive, primals: Any, tangents: Any, **params: Any) -> Any:
    """The derivative of a primitive that is linear in its first operand."""
    out = primitive.bind(*primals, **params)
    if _no_tangent(tangents[0]):
        return out, _zero_like(out)
    assert params.get("kind", "sum") == "sum"
    return out, primitive.bind(tangents[0], *primals[1:], **params)


def _reduce_transpose(ct: Any, data: Any, *arrays: Any, tree: Any, kind: str, dtype: Any, interpret: Any) -> list[Any]:
    if _no_tangent(ct):
        return [None] * (1 + len(arrays))
    g = jax.tree.unflatten(tree, arrays)
    return [spread(ct, g, data.aval.dtype, interpret), *[None] * len(arrays)]


def _reduce_batch(args: Any, axes: Any, **params: Any) -> tuple[Array, int]:
    (data, *arrays), (axis, *index_axes) = args, axes
    if all(a is None for a in index_axes):
        batch = data.shape[axis]
        out = reduce_p.bind(_features_first(data, axis), *arrays, **params)
        return out.reshape(out.shape[0], batch, out.shape[1] // max(batch, 1)), 1
    size = _size(args, axes)
    (ids, *_), (ids_axis, *_) = arrays, index_axes
    count = _num_segments(arrays, index_axes, params["tree"])
    merged = _merged_ids(_batched(ids, ids_axis, size), count)
    g = group(merged, size * count, is_sorted=False, kernels=True, interpret=params["interpret"])
    out = reduce(params["kind"], _joined(_batched(data, axis, size)), g, params["dtype"], params["interpret"])
    return out.reshape(size, count, out.shape[1]), 0


def _num_segments(arrays: Sequence[Any], axes: Sequence[Any], tree: Any) -> int:
    """The number of segments of a grouping whose arrays may be batched."""
    shapes = [
        a.shape if axis is None else (*a.shape[:axis], *a.shape[axis + 1 :])
        for a, axis in zip(arrays, axes, strict=True)
    ]
    return jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(s, jnp.int32) for s in shapes]).num_segments


ad.primitive_jvps[reduce_p] = functools.partial(_linear_jvp, reduce_p)
ad.primitive_transposes[reduce_p] = _reduce_transpose
batching.primitive_batchers[reduce_p] = _reduce_batch


# scatter: [entries, width] and [entries] -> [segments, width]


def by_scatter(kind: str, data: Array, ids: Array, segments: int, **options: Any) -> Array:
    """The function of `jax.ops`; also of no segments, where JAX cannot take its gradient."""
    if isinstance(segments, int) and segments == 0:
        return jnp.zeros((0, *data.shape[1:]), data.dtype)
    operator = {"sum": jax.ops.segment_sum, "max": jax.ops.segment_max, "min": jax.ops.segment_min}[kind]
    return operator(data, ids, segments, **options)


def _run_scatter(data: Array, ids: Array, *, kind: str, segments: int, dtype: Any, interpret: bool | None) -> Array:
    data = data.astype(wide(data.dtype))
    rows = data[:, 0] if data.shape[1] == 1 else data  # a scatter of numbers, not of rows
    return by_scatter(kind, rows, ids, segments).astype(dtype).reshape(segments, data.shape[1])


scatter_p = _define(
    "dejax_segment_scatter",
    _run_scatter,
    lambda data, ids, *, segments, dtype, **_: ((segments, data.shape[1]), dtype),
)


def _scatter_transpose(ct: Any, data: Any, ids: Array, *, segments: int, **_: Any) -> list[Any]:
    if _no_tangent(ct):
        return [None, None]
    return [spread(ct, Unsorted(ids, segments), data.aval.dtype), None]


def _scatter_batch(args: Any, axes: Any, *, kind: str, segments: int, dtype: Any, interpret: Any) -> tuple[Array, int]:
    """All examples in one scatter, or sorted together for one kernel where that is faster."""
    (data, ids), (axis, ids_axis) = args, axes
    size, sort = _size(args, axes), functools.partial(group, is_sorted=False, kernels=True, interpret=interpret)
    rows, ids = _batched(data, axis, size), _batched(ids, ids_axis, size) if ids_axis is not None else ids
    entries, width = rows.shape[1:]
    pays = functools.partial(_cost.scatter_pays, kind=kind, is_sorted=False, deterministic=False)
    if ids_axis is None and not pays(_cost.ReductionSize(entries, segments, width, rows.dtype, size)):
        found = reduce(kind, _features_first(rows, 0), sort(ids, segments), dtype, interpret)
        return found.reshape(segments, size, width), 1
    if size * max(entries, segments + 1) > _LARGEST:  # more than one scatter takes
        run = functools.partial(_run_scatter, kind=kind, segments=segments, dtype=dtype, interpret=interpret)
        return jax.vmap(run, in_axes=(0, None if ids_axis is None else 0))(rows, ids), 0
    count, merged = size * segments, _merged_ids(jnp.broadcast_to(ids, (size, entries)), segments)
    scattered = ids_axis is None or pays(_cost.ReductionSize(size * entries, count, width, rows.dtype))
    g = Unsorted(merged, count) if scattered else sort(merged, count)
    return reduce(kind, _joined(rows), g, dtype, interpret).reshape(size, segments, width), 0


ad.primitive_jvps[scatter_p] = functools.partial(_linear_jvp, scatter_p)
ad.primitive_transposes[scatter_p] = _scatter_transpose
batching.primitive_batchers[scatter_p] = _scatter_batch


# spread: [segments, width] -> [entries, width]


def _run_spread(rows: Array, *arrays: Any, tree: Any, dtype: Any, interpret: bool | None) -> Array:
    g: Grouping = jax.tree.unflatten(tree, arrays)
    return rows_at(rows, g.ids).astype(dtype)


def rows_at(rows: Array, ids: Array) -> Array:
    """`rows[ids]`, zeros where an id is out of range, also below 0."""
    if rows.shape[0] == 0:
        return jnp.zeros((*ids.shape, *rows.shape[1:]), rows.dtype)
    ids = jnp.where(ids >= 0, ids, rows.shape[0])
    return rows.at[ids].get(mode="fill", fill_value=0)


def _spread_aval(rows: Any, *arrays: Any, tree: Any, dtype: Any, **_: Any) -> tuple[tuple[int, ...], Any]:
    return (jax.tree.unflatten(tree, arrays).ids.shape[0], rows.shape[1]), dtype


spread_p = _define("dejax_segment_spread", _run_spread, _spread_aval)


def spread(rows: Array, g: Grouping | Unsorted, dtype: Any = None, interpret: bool | None = None) -> Array:
    """[segments, width] to [entries, width]: the row of each entry's segment, zeros for entries of none."""
    if isinstance(g, Unsorted):
        return rows_at(rows, g.ids).astype(dtype or rows.dtype)
    arrays, tree = jax.tree.flatten(g)
    return spread_p.bind(rows, *arrays, tree=tree, dtype=jnp.dtype(dtype or rows.dtype), interpret=interpret)


def _spread_transpose(ct: Any, rows: Any, *arrays: Any, tree: Any, dtype: Any, interpret: Any) -> list[Any]:
    if _no_tangent(ct):
        return [None] * (1 + len(arrays))
    g = jax.tree.unflatten(tree, arrays)
    return [reduce("sum", ct, g, rows.aval.dtype, interpret), *[None] * len(arrays)]


def _spread_batch(args: Any, axes: Any, **params: Any) -> tuple[Array, int]:
    (rows, *arrays), (axis, *index_axes) = args, axes
    if all(a is None for a in index_axes):
        batch = rows.shape[axis]
        out = spread_p.bind(_features_first(rows, axis), *arrays, **params)
        return out.reshape(out.shape[0], batch, out.shape[1] // max(batch, 1)), 1
    size = _size(args, axes)
    rows = _batched(rows, axis, size)
    merged = _merged_ids(_batched(arrays[0], index_axes[0], size), rows.shape[1])
    g = group(merged, size * rows.shape[1], is_sorted=False, kernels=True, interpret=params["interpret"])
    out = spread(_joined(rows), g, params["dtype"], params["interpret"])
    return out.reshape(size, out.shape[0] // max(size, 1), out.shape[1]), 0


ad.primitive_jvps[spread_p] = functools.partial(_linear_jvp, spread_p)
ad.primitive_transposes[spread_p] = _spread_transpose
batching.primitive_batchers[spread_p] = _spread_batch


# gather_reduce: [rows, width] and [edges, scales] -> [segments, width]


def _run_gather_reduce(
    x: Array, *arrays: Any, tree: Any, kind: str, scaled: bool, dtype: Any, interpret: bool | None
) -> Array:
    scale, arrays = (arrays[0], arrays[1:]) if scaled else (None, arrays)
    edges: ReadEdges = jax.tree.unflatten(tree, arrays)
    g, rows = edges.by_receiver, edges.rows
    if rows is None:
        rows = edges.senders if g.order is None else edges.senders[g.order]
    at = g.order if scaled else None
    return segment_reduce(kind, x, g.segments, rows=rows, scale=scale, edges=at, dtype=dtype, interpret=interpret)


def _gather_reduce_aval(x: Any, *arrays: Any, tree: Any, scaled: bool, dtype: Any, **_: Any) -> Any:
    edges = jax.tree.unflatten(tree, arrays[1:] if scaled else arrays)
    return (edges.by_receiver.num_segments, x.shape[1]), dtype


gather_reduce_p = _define("dejax_gather_segment_reduce", _run_gather_reduce, _gather_reduce_aval)


def gather_reduce(
    kind: str, x: Array, scale: Array | None, edges: ReadEdges, dtype: Any = None, interpret: bool | None = None
) -> Array:
    """Rows of `x` at the senders, times scales [edges, scales], reduced over the edges of each receiver."""
    arrays, tree = jax.tree.flatten(edges)
    given = arrays if scale is None else [scale, *arrays]
    dtype = jnp.dtype(dtype or x.dtype)
    return gather_reduce_p.bind(
        x, *given, tree=tree, kind=kind, scaled=scale is not None, dtype=dtype, interpret=interpret
    )


def _gather_reduce_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    """Linear in rows and linear in scales."""
    out = gather_reduce_p.bind(*primals, **params)
    terms = []
    if not _no_tangent(tangents[0]):
        terms.append(gather_reduce_p.bind(tangents[0], *primals[1:], **params))
    if params["scaled"] and not _no_tangent(tangents[1]):
        terms.append(gather_reduce_p.bind(primals[0], tangents[1], *primals[2:], **params))
    if not terms:
        return out, _zero_like(out)
    assert params["kind"] == "sum"
    return out, terms[0] if len(terms) == 1 else terms[0] + terms[1]


def _gather_reduce_transpose(
    ct: Any, x: Any, *arrays: Any, tree: Any, kind: str, scaled: bool, dtype: Any, interpret: bool | None
) -> list[Any]:
    found: list[Any] = [None] * (1 + len(arrays))
    if _no_tangent(ct):
        return found
    edges: ReadEdges = jax.tree.unflatten(tree, arrays[1:] if scaled else arrays)
    if ad.is_undefined_primal(x):
        back = edges.swapped(x.aval.shape[0], interpret)
        found[0] = gather_reduce("sum", ct, arrays[0] if scaled else None, back, x.aval.dtype, interpret)
        return found
    scales = arrays[0].aval
    back = edges.swapped(x.shape[0], interpret)
    left = spread(x, back.by_receiver, wide(x.dtype), interpret)
    right = spread(ct, edges.by_receiver, wide(ct.dtype), interpret)
    product = in_scales(left * right, scales.shape[1])
    found[1] = product.sum(axis=-1).astype(scales.dtype)
    return found


def _gather_reduce_batch(args: Any, axes: Any, **params: Any) -> tuple[Array, int]:
    """`vmap`: with edges that all examples share, a batch becomes features; else it becomes more rows and segments."""
    given = 2 if params["scaled"] else 1
    arrays, index_axes = args[given:], axes[given:]
    x, scale = args[0], args[1] if params["scaled"] else None
    size = _size(args, axes)
    kind, dtype, interpret = params["kind"], params["dtype"], params["interpret"]
    edges: ReadEdges = jax.tree.unflatten(params["tree"], arrays)
    if all(a is None for a in index_axes):
        x = _batched(x, axes[0], size)
        wide = _features_first(x, 0)
        if scale is not None and (axes[1] is not None or scale.shape[1] > 1):
            scale = _features_first(_batched(scale, axes[1], size), 0)
        out = gather_reduce(kind, wide, scale, edges, dtype, interpret)
        return out.reshape(out.shape[0], size, out.shape[1] // max(size, 1)), 1
    flat, tree = jax.tree.flatten(edges.by_receiver)
    at = index_axes[1 : 1 + len(flat)]  # after the senders
    count = _num_segments(flat, at, tree)
    x = _batched(x, axes[0], size)
    senders = _merged_ids(_batched(arrays[0], index_axes[0], size), x.shape[1])
    receivers = _merged_ids(_batched(flat[0], at[0], size), count)
    merged = ReadEdges(senders, group(receivers, size * count, False, kernels=True, interpret=interpret))
    if scale is not None:
        scale = _joined(_batched(scale, axes[1], size))
    out = gather_reduce(kind, _joined(x), scale, merged, dtype, interpret)
    return out.reshape(size, count, out.shape[1]), 0


ad.primitive_jvps[gather_reduce_p] = _gather_reduce_jvp
ad.primitive_transposes[gather_reduce_p] = _gather_reduce_transpose
batching.primitive_batchers[gather_reduce_p] = _gather_reduce_batch
