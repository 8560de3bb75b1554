"""The rules of the inter-operator IR: space, feature shape and dtype of each operator's result, for `infer`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from dejax.rgnn.ir.values import VIAS, IRError, Op, Space, Type, Via

UNARY = frozenset(
    "neg exp log sqrt rsqrt tanh sigmoid erf abs sign square reciprocal relu leaky_relu step pow cast "
    "sin cos log1p expm1 softplus stop_gradient".split()
)
BINARY = frozenset("add sub mul div max min gt eq power atan2".split())
FEATURE = frozenset(
    "sum_features extremum_features extremum_share reshape transpose broadcast concat slice pad".split()
)
REDUCTIONS = ("sum", "max", "min", "prod")
# Row by row: the value of a row depends on the same row of each argument alone.
ROWWISE = UNARY | BINARY | FEATURE | {"select", "dot"}
# Dtypes that hold the number of entries of any segment: float16 ends at 65,504, bfloat16 is exact up to 256.
COUNT_DTYPES = ("float32", "float64", "int32", "int64")


def need(condition: bool, message: str) -> None:
    """Raises IRError with this message unless the condition holds."""
    if not condition:
        raise IRError(message)


def is_float(dtype: str) -> bool:
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


def _same_space(args: Sequence[Type]) -> Space:
    need(len({a.space for a in args}) == 1, f"arguments are in different spaces: {', '.join(a.space for a in args)}")
    return args[0].space


def _elementwise(args: Sequence[Type], attrs: dict) -> tuple:
    return _same_space(args), broadcast_shapes(*(a.shape for a in args)), promote(*(a.dtype for a in args))


def _unary(args: Sequence[Type], attrs: dict) -> tuple:
    (x,) = args
    return x.space, x.shape, x.dtype


def _via_target(x: Type, attrs: dict, toward: str) -> Via:
    via = VIAS.get(attrs["via"])
    need(via is not None, f"unknown map {attrs['via']!r}")
    assert via is not None
    have, want = (x.space, via.coarse) if toward == "fine" else (x.space, via.fine)
    need(want is None or have == want, f"map {attrs['via']} needs a {want} value, got a {have} value")
    return via


def _gather(args: Sequence[Type], attrs: dict) -> tuple:
    via = _via_target(args[0], attrs, "fine")
    space = via.fine if via.fine is not None else Space(attrs["space"])
    return space, args[0].shape, args[0].dtype


def _reduce(args: Sequence[Type], attrs: dict) -> tuple:
    via = _via_target(args[0], attrs, "coarse")
    need(attrs["op"] in REDUCTIONS, f"unknown reduction {attrs['op']!r}")
    return via.coarse, args[0].shape, args[0].dtype


def _product_of_others(args: Sequence[Type], attrs: dict) -> tuple:
    _via_target(args[0], attrs, "coarse")
    need(len({a.shape for a in args}) == 1, f"rows of different shapes: {', '.join(str(a.shape) for a in args)}")
    return _same_space(args), args[0].shape, promote(*(a.dtype for a in args))


def _count(args: Sequence[Type], attrs: dict) -> tuple:
    dtype, via = attrs["dtype"], VIAS[attrs["via"]]
    need(
        dtype in COUNT_DTYPES,
        f"dtype of a count must be one of {', '.join(COUNT_DTYPES)}, got {dtype!r}, which does not hold the counts of "
        "large graphs; cast the quotient, (x / count).astype(...)",
    )
    need(via.fine is not None or "space" in attrs, "a count of all rows needs their space")
    return via.coarse, (), dtype


def _softmax(args: Sequence[Type], attrs: dict) -> tuple:
    _via_target(args[0], attrs, "coarse")
    return _unary(args, attrs)


def parse_spec(spec: str) -> tuple[str, str, str]:
    """`"k,kn->n"` to `("k", "kn", "n")`."""
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


def _linear(args: Sequence[Type], attrs: dict) -> tuple:
    x, w = args
    if attrs["via"] == "self":
        need(x.space == w.space, f"linear via self of a {x.space} and a {w.space} value")
    else:
        via = VIAS[attrs["via"]]
        need(via.fine in (None, x.space), f"linear via {attrs['via']} needs {via.fine} rows, got {x.space}")
        need(via.coarse == w.space, f"linear via {attrs['via']} needs a {via.coarse} weight, got {w.space}")
    sizes = spec_sizes(attrs["spec"], x.shape, w.shape)
    return x.space, tuple(sizes[c] for c in parse_spec(attrs["spec"])[2]), promote(x.dtype, w.dtype)


def _outer(args: Sequence[Type], attrs: dict) -> tuple:
    x, y = args
    _same_space(args)
    sizes = spec_sizes(attrs["spec"], x.shape, y.shape)
    shape = tuple(sizes[c] for c in parse_spec(attrs["spec"])[2])
    coarse = x.space if attrs["via"] == "self" else _via_target(x, attrs, "coarse").coarse
    return coarse, shape, attrs["dtype"]


def _dot(args: Sequence[Type], attrs: dict) -> tuple:
    x, y = args
    need(len(x.shape) >= 1 and x.shape == y.shape, f"dot of feature shapes {x.shape} and {y.shape}")
    return _same_space(args), x.shape[:-1], promote(x.dtype, y.dtype)


def _sum_features(args: Sequence[Type], attrs: dict) -> tuple:
    (x,) = args
    axes = attrs["axes"]
    need(all(0 <= a < len(x.shape) for a in axes), f"axes {axes} of feature shape {x.shape}")
    kept = (1 if i in axes else s for i, s in enumerate(x.shape) if attrs["keepdims"] or i not in axes)
    return x.space, tuple(kept), x.dtype


def _extremum_features(args: Sequence[Type], attrs: dict) -> tuple:
    need(attrs["op"] in ("max", "min"), f"unknown extremum {attrs['op']!r}")
    return _sum_features(args, attrs)


def _extremum_share(args: Sequence[Type], attrs: dict) -> tuple:
    _extremum_features(args, {"keepdims": True, **attrs})
    return _unary(args, attrs)


def _integers(index: Type) -> None:
    need(index.dtype.startswith(("int", "uint")), f"an index must be of integers, got {index.dtype}")


def _lookup(args: Sequence[Type], attrs: dict) -> tuple:
    table, index = args
    _integers(index)
    via = attrs["via"]
    if via == "self":
        _same_space(args)
    else:
        need(VIAS[via].coarse == table.space, f"lookup via {via} needs a {VIAS[via].coarse} table, got {table.space}")
        _via_target(index, attrs, "coarse")
    need(len(table.shape) > 0, "lookup needs a table with a feature axis, got a scalar")
    return index.space, (*index.shape, *table.shape[1:]), table.dtype


def _place(args: Sequence[Type], attrs: dict) -> tuple:
    x, index = args
    _integers(index)
    need(attrs["op"] in ("sum", "max", "min"), f"unknown reduction {attrs['op']!r}")
    rank = len(index.shape)
    need(x.shape[:rank] == index.shape, f"rows of shape {x.shape} placed by indices of shape {index.shape}")
    space = _same_space(args) if attrs["via"] == "self" else _via_target(x, attrs, "coarse").coarse
    _same_space(args)
    return space, (attrs["size"], *x.shape[rank:]), x.dtype


def _select(args: Sequence[Type], attrs: dict) -> tuple:
    return _same_space(args), broadcast_shapes(*(a.shape for a in args)), promote(*(a.dtype for a in args[1:]))


def _reshape(args: Sequence[Type], attrs: dict) -> tuple:
    (x,) = args
    need(math.prod(attrs["shape"]) == math.prod(x.shape), f"reshape of feature shape {x.shape} to {attrs['shape']}")
    return x.space, tuple(attrs["shape"]), x.dtype


def _transpose(args: Sequence[Type], attrs: dict) -> tuple:
    (x,) = args
    need(sorted(attrs["perm"]) == list(range(len(x.shape))), f"transpose {attrs['perm']} of {x.shape}")
    return x.space, tuple(x.shape[i] for i in attrs["perm"]), x.dtype


def _broadcast(args: Sequence[Type], attrs: dict) -> tuple:
    (x,) = args
    shape = tuple(attrs["shape"])
    need(broadcast_shapes(x.shape, shape) == shape, f"broadcast of feature shape {x.shape} to {shape}")
    return x.space, shape, x.dtype


def _concat(args: Sequence[Type], attrs: dict) -> tuple:
    axis, shapes = attrs["axis"], [list(a.shape) for a in args]
    need(len({len(s) for s in shapes}) == 1, f"concat of different ranks: {', '.join(str(a.shape) for a in args)}")
    total = sum(s[axis] for s in shapes)
    for s in shapes:
        s[axis] = total
    need(all(s == shapes[0] for s in shapes), f"concat of {', '.join(str(a.shape) for a in args)} along axis {axis}")
    return _same_space(args), tuple(shapes[0]), promote(*(a.dtype for a in args))


def _slice(args: Sequence[Type], attrs: dict) -> tuple:
    (x,) = args
    axis, start, stop = attrs["axis"], attrs["start"], attrs["stop"]
    need(0 <= start <= stop <= x.shape[axis], f"slice {start}:{stop} of axis {axis} of feature shape {x.shape}")
    return x.space, (*x.shape[:axis], stop - start, *x.shape[axis + 1 :]), x.dtype


def _pad(args: Sequence[Type], attrs: dict) -> tuple:
    (x,) = args
    axis = attrs["axis"]
    size = attrs["before"] + x.shape[axis] + attrs["after"]
    return x.space, (*x.shape[:axis], size, *x.shape[axis + 1 :]), x.dtype


RULES: dict[str, Callable[[Sequence[Type], dict], tuple]] = {
    "input": lambda args, a: (Space(a["space"]), tuple(a["shape"]), a["dtype"]),
    "const": lambda args, a: (Space(a["space"]), (), a["dtype"]),
    "count": _count,
    "gather": _gather,
    "reduce": _reduce,
    "softmax": _softmax,
    "linear": _linear,
    "outer": _outer,
    "dot": _dot,
    "select": _select,
    "product_of_others": _product_of_others,
    "lookup": _lookup,
    "place": _place,
    "sum_features": _sum_features,
    "extremum_features": _extremum_features,
    "extremum_share": _extremum_share,
    "reshape": _reshape,
    "transpose": _transpose,
    "broadcast": _broadcast,
    "concat": _concat,
    "slice": _slice,
    "pad": _pad,
    **dict.fromkeys(UNARY, _unary),
    **dict.fromkeys(BINARY, _elementwise),
    "cast": lambda args, a: (args[0].space, args[0].shape, a["dtype"]),
}


@lru_cache(maxsize=1 << 16)
def _infer(name: str, args: tuple[Type, ...], attrs: tuple[tuple[str, Any], ...]) -> Type:
    rule = RULES.get(name)
    need(rule is not None, f"unknown operator {name!r}")
    assert rule is not None
    return Type(*rule(args, dict(attrs)))


def infer(name: str, args: Sequence[Op], attrs: tuple[tuple[str, Any], ...]) -> Type:
    """The space, feature shape and dtype that an operator gives, or `IRError`.

    The passes ask for the same ones again and again: the last answers are kept.
    """
    return _infer(name, tuple([Type(a.space, a.shape, a.dtype) for a in args]), attrs)
