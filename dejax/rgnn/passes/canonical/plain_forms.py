"""Ways of writing one function become one form, which the other passes and the kernels know.

(a * b).sum(-1)                       becomes    dot(a, b)
x ** 2                                becomes    square(x)
0 + x,  1 * x                         becomes    x
p / g.dst(g.sum_to_dst(p)), with p = exp(s - g.dst(g.max_to_dst(s)))    becomes    edge_softmax(s)
g.sum_to_dst(m.reshape(H * d))        becomes    g.sum_to_dst(m).reshape(H * d)
g.src(x).reshape(H, d)                becomes    g.src(x.reshape(H, d)), where nothing reads the row in its old shape
x.reshape(3, d)[1]                    becomes    x[d : 2 * d].reshape(d)
"""

from __future__ import annotations

from dejax.rgnn.ir.inter import Builder, is_float
from dejax.rgnn.passes._rewrite import moves_unit_axes
from dejax.rgnn.passes.rules import Attr, Either, Match, Pat, Rule, Var, rules


def _is_float(m: Match) -> bool:
    return is_float(m.op.dtype)


def _without_neutral(operator: str, neutral: float) -> Rule:
    """`x + 0`, as Python's `sum` begins, and `x * 1`, where x has the result's shape and dtype."""

    def is_the_result(m: Match) -> bool:
        x = m.at("x")
        return is_float(m.op.dtype) and (x.shape, x.dtype) == (m.op.shape, m.op.dtype)

    return Rule(Pat(operator, Var("x"), Pat("const", value=neutral)), lambda b, m: m.new("x"), where=is_the_result)


# --- a softmax that is written out -----------------------------------------------------------------------------------


def _perhaps_stopped(value: Pat) -> Pat:
    return Either(value, Pat("stop_gradient", value))


def _perhaps_plus_small(value: Pat, name: str) -> Pat:
    """A sum of exponentials, perhaps plus a constant against division by 0: the sum is at least 1."""
    return Either(value, Pat("add", value, Pat("const", name=name)))


_LARGEST = _perhaps_stopped(Pat("reduce", Var("score"), via=Attr("via"), op="max"))
_SHIFT = _perhaps_stopped(Pat("gather", _LARGEST, via=Attr("via")))
_EXPONENTIAL = Pat("exp", Pat("sub", Var("score"), _SHIFT), name="p")
_TOTAL = _perhaps_plus_small(Pat("reduce", Var("p"), via=Attr("via"), op="sum"), "small")
_READ_TOTAL = _perhaps_plus_small(Pat("gather", _TOTAL, via=Attr("via")), "small_at_rows")
# Constants of at most this size do not change a float32 sum that is at least 1.
_ROUNDED_AWAY = {"float32": 2.0**-24, "float64": 2.0**-53}


def _is_softmax(m: Match) -> bool:
    small = [m.at(name).attr("value") for name in ("small", "small_at_rows") if name in m]
    rounded_away = all(0 <= value < _ROUNDED_AWAY.get(m.op.dtype, 0.0) for value in small)
    return is_float(m.op.dtype) and rounded_away and m.shape("score") == m.op.shape


# --- inner products --------------------------------------------------------------------------------------------------


def _is_inner_product(m: Match) -> bool:
    """Whether two different rows are multiplied and summed along their last axis."""
    shape = m.shape("product")
    rows = m["x"] != m["y"] and {m.shape("x"), m.shape("y")} == {shape}
    return is_float(m.op.dtype) and rows and m.op.attr("axes") == (len(shape) - 1,)


def _inner_product(b: Builder, m: Match) -> int:
    made = b.op("dot", m.new("x"), m.new("y"))
    return b.op("reshape", made, shape=m.op.shape) if m.op.attr("keepdims") else made


# --- reshapes --------------------------------------------------------------------------------------------------------


def _reshaped(b: Builder, m: Match) -> int:
    return m.new("x") if m.shape("x") == m.op.shape else b.op("reshape", m.new("x"), shape=m.op.shape)


def _removes_unit_axes_again(m: Match) -> bool:
    return len(m.shape("reshaped")) > len(m.op.shape) and moves_unit_axes(m.op, m.at("reshaped"))


def _is_read_in_other_shapes_alone(m: Match) -> bool:
    readers = (m.values.ops[u] for u in m.values.users[m["read"]])
    reshaped = m["read"] not in m.values.outputs and all(u.name == "reshape" for u in readers)
    return reshaped and not moves_unit_axes(m.op, m.at("read"))


def _is_slice_of_row(m: Match) -> bool:
    return len(m.shape("reshaped")) >= 2 and len(m.shape("x")) == 1


def _slice_of_row(b: Builder, m: Match) -> int:
    each, attrs = m.at("reshaped").width // m.shape("reshaped")[0], dict(m.op.attrs)
    rows = b.op("slice", m.new("x"), axis=0, start=attrs["start"] * each, stop=attrs["stop"] * each)
    made = b.op("reshape", rows, shape=m.op.shape)
    return b.op("gather", made, **dict(m.at("read").attrs)) if "read" in m else made


_RESHAPED = Pat("reshape", Var("x"), name="reshaped")

plain_forms = rules(
    Rule(Pat("pow", Var("x"), exponent=2.0), lambda b, m: b.op("square", m.new("x")), where=_is_float),
    _without_neutral("add", 0.0),
    _without_neutral("mul", 1.0),
    Rule(
        Pat("div", _EXPONENTIAL, _READ_TOTAL),
        lambda b, m: b.op("softmax", m.new("score"), via=m["via"]),
        where=_is_softmax,
    ),
    Rule(
        Pat("sum_features", Pat("mul", Var("x"), Var("y"), name="product", once=True)),
        _inner_product,
        where=_is_inner_product,
    ),
    Rule(Pat("reshape", _RESHAPED), _reshaped, where=_removes_unit_axes_again),
    Rule(
        Pat("reduce", Pat("reshape", Var("x"), name="reshaped", once=True)),
        lambda b, m: b.op("reshape", b.op("reduce", m.new("x"), **dict(m.op.attrs)), shape=m.op.shape),
        where=lambda m: not moves_unit_axes(m.at("reshaped"), m.at("x")),
    ),
    Rule(
        Pat("reshape", Pat("gather", Var("x"), name="read")),
        lambda b, m: b.op("gather", b.op("reshape", m.new("x"), shape=m.op.shape), **dict(m.at("read").attrs)),
        where=_is_read_in_other_shapes_alone,
    ),
    Rule(Pat("slice", _RESHAPED, axis=0), _slice_of_row, where=_is_slice_of_row),
    Rule(Pat("slice", Pat("gather", _RESHAPED, name="read"), axis=0), _slice_of_row, where=_is_slice_of_row),
)
