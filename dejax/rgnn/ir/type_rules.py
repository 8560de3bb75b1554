"""The typing rules of level 1: space, feature shape and dtype of the result of each operator (`operators.py`).

A rule takes the types of the operator's arguments and its attributes by name, so its signature says which attributes
the operator has.
"""

from __future__ import annotations

import math

import numpy as np

from dejax.rgnn.ir.values import VIAS, IRError, Space, Type, Via

Typed = tuple[Space, tuple[int, ...], str]  # what a rule returns

REDUCTIONS = ("sum", "max", "min", "prod")
# Dtypes that hold the number of entries of any segment: float16 ends at 65,504, bfloat16 is exact up to 256.
COUNT_DTYPES = ("float32", "float64", "int32", "int64")


def need(condition: bool, message: str) -> None:
    """Raises IRError with this message unless the condition holds."""
    if not condition:
        raise IRError(message)


def is_float(dtype: str) -> bool:
    """Whether a dtype is floating point, bfloat16 included."""
    return dtype.startswith(("float", "bfloat"))


def promote(*dtypes: str) -> str:
    """The dtype of mixed arithmetic: float over integer over boolean, then the wider; 16-bit floats meet in float32."""
    found = list(dict.fromkeys(dtypes))
    if len(found) == 1:
        return found[0]
    if {"bfloat16", "float16"} <= set(found) and "float64" not in found:
        return "float32"
    return max(found, key=lambda d: (is_float(d), d != "bool", np.dtype(d).itemsize))


def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape to which feature shapes broadcast: an axis of 1 or the shape () does, other ranks never align.

    Every operator, the front end and every pass follow this one rule.
    """
    full = [s for s in shapes if s != ()]
    if not full:
        return ()
    rank = len(full[0])
    found = " and ".join(map(str, shapes))
    need(
        all(len(s) == rank for s in full),
        f"feature shapes {found} have different ranks; add the missing axis: x[..., None] for one scalar "
        "for each head of a (heads, width) value, or x[None, :] for a bias",
    )
    out = []
    for axis in range(rank):
        sizes = {s[axis] for s in full} - {1}
        need(len(sizes) <= 1, f"feature shapes {found} do not broadcast at axis {axis}")
        out.append(sizes.pop() if sizes else 1)
    return tuple(out)


def parse_spec(spec: str) -> tuple[str, str, str]:
    """Splits a contraction into the subscripts of rows, weight and result: `"k,kn->n"` into `("k", "kn", "n")`."""
    ins, out = spec.split("->")
    a, b = ins.split(",")
    return a, b, out


def spec_sizes(spec: str, x: tuple[int, ...], w: tuple[int, ...]) -> dict[str, int]:
    """The size of each letter of a contraction, checked against both feature shapes."""
    a, b, out = parse_spec(spec)
    need(len(a) == len(x) and len(b) == len(w), f"contraction {spec} does not fit feature shapes {x} and {w}")
    sizes: dict[str, int] = {}
    for letter, size in [*zip(a, x, strict=True), *zip(b, w, strict=True)]:
        need(sizes.setdefault(letter, size) == size, f"widths differ: contraction {spec} of {x} and {w}")
    need(set(out) <= set(sizes), f"contraction {spec} has a letter in its result alone")
    return sizes


def _same_space(args: tuple[Type, ...]) -> Space:
    need(len({a.space for a in args}) == 1, f"arguments are in different spaces: {', '.join(a.space for a in args)}")
    return args[0].space


def _along(via: str, x: Type, toward: str) -> Via:
    """The map, along which the rows of `x` move toward its coarse or its fine space."""
    found = VIAS.get(via)
    need(found is not None, f"unknown map {via!r}")
    assert found is not None
    want = found.coarse if toward == "fine" else found.fine
    need(want is None or x.space == want, f"map {via} needs a {want} value, got a {x.space} value")
    return found


# --- values without arguments ----------------------------------------------------------------------------------------


def of_input(*, name: str, position: int, space: str, shape: tuple[int, ...], dtype: str) -> Typed:
    return Space(space), tuple(shape), dtype


def of_const(*, value: float, dtype: str, space: str, negative: bool = False) -> Typed:
    return Space(space), (), dtype


def of_count(*, via: str, dtype: str, space: str | None = None) -> Typed:
    need(
        dtype in COUNT_DTYPES,
        f"dtype of a count must be one of {', '.join(COUNT_DTYPES)}, got {dtype!r}, which does not hold the counts of "
        "large graphs; cast the quotient, (x / count).astype(...)",
    )
    need(VIAS[via].fine is not None or space is not None, "a count of all rows needs their space")
    return VIAS[via].coarse, (), dtype


# --- element by element ----------------------------------------------------------------------------------------------


def like_argument(x: Type) -> Typed:
    return x.space, x.shape, x.dtype


def with_exponent(x: Type, *, exponent: float) -> Typed:
    return like_argument(x)


def with_slope(x: Type, *, slope: float) -> Typed:
    return like_argument(x)


def of_cast(x: Type, *, dtype: str) -> Typed:
    return x.space, x.shape, dtype


def elementwise(x: Type, y: Type) -> Typed:
    return _same_space((x, y)), broadcast_shapes(x.shape, y.shape), promote(x.dtype, y.dtype)


def of_select(condition: Type, x: Type, y: Type) -> Typed:
    args = (condition, x, y)
    return _same_space(args), broadcast_shapes(*(a.shape for a in args)), promote(x.dtype, y.dtype)


# --- the features of each row ----------------------------------------------------------------------------------------


def of_dot(x: Type, y: Type) -> Typed:
    need(len(x.shape) >= 1 and x.shape == y.shape, f"dot of feature shapes {x.shape} and {y.shape}")
    return _same_space((x, y)), x.shape[:-1], promote(x.dtype, y.dtype)


def of_sum_features(x: Type, *, axes: tuple[int, ...], keepdims: bool) -> Typed:
    need(all(0 <= a < len(x.shape) for a in axes), f"axes {axes} of feature shape {x.shape}")
    kept = (1 if i in axes else s for i, s in enumerate(x.shape) if keepdims or i not in axes)
    return x.space, tuple(kept), x.dtype


def of_extremum_features(x: Type, *, axes: tuple[int, ...], keepdims: bool, op: str) -> Typed:
    need(op in ("max", "min"), f"unknown extremum {op!r}")
    return of_sum_features(x, axes=axes, keepdims=keepdims)


def of_extremum_share(x: Type, *, axes: tuple[int, ...], op: str) -> Typed:
    of_extremum_features(x, axes=axes, keepdims=True, op=op)
    return like_argument(x)


def of_reshape(x: Type, *, shape: tuple[int, ...]) -> Typed:
    need(math.prod(shape) == math.prod(x.shape), f"reshape of feature shape {x.shape} to {shape}")
    return x.space, tuple(shape), x.dtype


def of_transpose(x: Type, *, perm: tuple[int, ...]) -> Typed:
    need(sorted(perm) == list(range(len(x.shape))), f"transpose {perm} of {x.shape}")
    return x.space, tuple(x.shape[i] for i in perm), x.dtype


def of_broadcast(x: Type, *, shape: tuple[int, ...]) -> Typed:
    need(broadcast_shapes(x.shape, tuple(shape)) == tuple(shape), f"broadcast of feature shape {x.shape} to {shape}")
    return x.space, tuple(shape), x.dtype


def of_concat(*args: Type, axis: int) -> Typed:
    shapes = [list(a.shape) for a in args]
    need(len({len(s) for s in shapes}) == 1, f"concat of different ranks: {', '.join(str(a.shape) for a in args)}")
    total = sum(s[axis] for s in shapes)
    for s in shapes:
        s[axis] = total
    need(all(s == shapes[0] for s in shapes), f"concat of {', '.join(str(a.shape) for a in args)} along axis {axis}")
    return _same_space(args), tuple(shapes[0]), promote(*(a.dtype for a in args))


def of_slice(x: Type, *, axis: int, start: int, stop: int) -> Typed:
    need(0 <= start <= stop <= x.shape[axis], f"slice {start}:{stop} of axis {axis} of feature shape {x.shape}")
    return x.space, (*x.shape[:axis], stop - start, *x.shape[axis + 1 :]), x.dtype


def of_pad(x: Type, *, axis: int, before: int, after: int) -> Typed:
    return x.space, (*x.shape[:axis], before + x.shape[axis] + after, *x.shape[axis + 1 :]), x.dtype


# --- between rows ----------------------------------------------------------------------------------------------------


def of_gather(x: Type, *, via: str, space: str | None = None) -> Typed:
    fine = _along(via, x, "fine").fine
    need(fine is not None or space is not None, "a gather by the map of all rows needs their space")
    return Space(fine or space or ""), x.shape, x.dtype


def of_reduce(x: Type, *, via: str, op: str, recompute: bool = False) -> Typed:
    """With `recompute`, backward makes the reduction again and forward keeps nothing for it (`gradients/save.py`)."""
    coarse = _along(via, x, "coarse").coarse
    need(op in REDUCTIONS, f"unknown reduction {op!r}")
    return coarse, x.shape, x.dtype


def of_softmax(x: Type, *, via: str) -> Typed:
    _along(via, x, "coarse")
    return like_argument(x)


def of_product_of_others(*args: Type, via: str) -> Typed:
    _along(via, args[0], "coarse")
    need(len({a.shape for a in args}) == 1, f"rows of different shapes: {', '.join(str(a.shape) for a in args)}")
    return _same_space(args), args[0].shape, promote(*(a.dtype for a in args))


def of_linear(x: Type, w: Type, *, spec: str, via: str) -> Typed:
    if via == "self":
        need(x.space == w.space, f"linear via self of a {x.space} and a {w.space} value")
    else:
        found = VIAS[via]
        need(found.fine in (None, x.space), f"linear via {via} needs {found.fine} rows, got {x.space}")
        need(found.coarse == w.space, f"linear via {via} needs a {found.coarse} weight, got {w.space}")
    sizes = spec_sizes(spec, x.shape, w.shape)
    return x.space, tuple(sizes[c] for c in parse_spec(spec)[2]), promote(x.dtype, w.dtype)


def of_outer(x: Type, y: Type, *, spec: str, via: str, dtype: str) -> Typed:
    _same_space((x, y))
    sizes = spec_sizes(spec, x.shape, y.shape)
    coarse = x.space if via == "self" else _along(via, x, "coarse").coarse
    return coarse, tuple(sizes[c] for c in parse_spec(spec)[2]), dtype


def _integers(index: Type) -> None:
    need(index.dtype.startswith(("int", "uint")), f"an index must be of integers, got {index.dtype}")


def of_lookup(table: Type, index: Type, *, via: str, outside: str) -> Typed:
    _integers(index)
    if via == "self":
        _same_space((table, index))
    else:
        need(VIAS[via].coarse == table.space, f"lookup via {via} needs a {VIAS[via].coarse} table, got {table.space}")
        _along(via, index, "coarse")
    need(len(table.shape) > 0, "lookup needs a table with a feature axis, got a scalar")
    return index.space, (*index.shape, *table.shape[1:]), table.dtype


def of_place(x: Type, index: Type, *, via: str, size: int, op: str, outside: str) -> Typed:
    _integers(index)
    need(op in ("sum", "max", "min"), f"unknown reduction {op!r}")
    rank = len(index.shape)
    need(x.shape[:rank] == index.shape, f"rows of shape {x.shape} placed by indices of shape {index.shape}")
    space = _same_space((x, index)) if via == "self" else _along(via, x, "coarse").coarse
    _same_space((x, index))
    return space, (size, *x.shape[rank:]), x.dtype
