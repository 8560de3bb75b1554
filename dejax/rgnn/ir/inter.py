"""Level 1, the inter-operator IR: a list of operators over values that live in a space.

A value has one row for each element of its space (nodes, edges, unique pairs, types, or one for the whole graph) and a
feature shape that every row shares; layouts come later. Operator 3 defines value `%3`, so a program is in SSA form by
construction. An RGCN layer prints as

    %0 = input<x>                     : node[16] float32
    %1 = input<weight>                : edge_type[16, 8] float32
    %2 = gather %0 via=src            : edge[16] float32
    %3 = linear %2 %1 spec=k,kn->n via=etype : edge[8] float32
    %4 = reduce %3 via=dst op=sum     : node[8] float32
    return %4

Rows move between spaces along one of the maps in `VIAS`: by `gather` (each fine row reads its coarse row) and `reduce`
(each coarse row is the sum or maximum of its fine rows). The two are each other's transposes, so the generated backward
pass stays inside the IR. So are `lookup`, which reads a row of a table by an integer, and `place`, which adds rows at
places that integers give.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np


class Space(enum.StrEnum):
    """What the rows of a value stand for."""

    NODE = "node"
    EDGE = "edge"
    SOURCE_PAIR = "source_pair"  # unique (sender, edge type)
    DESTINATION_PAIR = "destination_pair"  # unique (receiver, edge type)
    EDGE_TYPE = "edge_type"
    NODE_TYPE = "node_type"
    GRAPH = "graph"  # one row, shared by all


@dataclass(frozen=True, slots=True)
class Via:
    """A map from each row of a fine space to one row of a coarse space."""

    fine: Space | None  # None: any space
    coarse: Space


VIAS: dict[str, Via] = {
    "src": Via(Space.EDGE, Space.NODE),
    "dst": Via(Space.EDGE, Space.NODE),
    "source_pair": Via(Space.EDGE, Space.SOURCE_PAIR),
    "destination_pair": Via(Space.EDGE, Space.DESTINATION_PAIR),
    "etype": Via(Space.EDGE, Space.EDGE_TYPE),
    "source_pair.node": Via(Space.SOURCE_PAIR, Space.NODE),
    "source_pair.etype": Via(Space.SOURCE_PAIR, Space.EDGE_TYPE),
    "destination_pair.node": Via(Space.DESTINATION_PAIR, Space.NODE),
    "destination_pair.etype": Via(Space.DESTINATION_PAIR, Space.EDGE_TYPE),
    "ntype": Via(Space.NODE, Space.NODE_TYPE),
    "source_type": Via(Space.EDGE_TYPE, Space.NODE_TYPE),  # where all sources of an edge type have one node type
    "all": Via(None, Space.GRAPH),
}
# Two steps that are one: (outer map, then inner map) -> map.
COMPOSED_VIAS = {
    ("source_pair", "source_pair.node"): "src",
    ("source_pair", "source_pair.etype"): "etype",
    ("destination_pair", "destination_pair.node"): "dst",
    ("destination_pair", "destination_pair.etype"): "etype",
}
# The map by which the rows of a space are typed: what a typed linear of that space is grouped by.
TYPE_VIA = {
    Space.EDGE: "etype",
    Space.SOURCE_PAIR: "source_pair.etype",
    Space.DESTINATION_PAIR: "destination_pair.etype",
    Space.NODE: "ntype",
}


class IRError(ValueError):
    """An operator that breaks a rule of the IR."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operator and the value that it defines."""

    name: str
    args: tuple[int, ...]
    attrs: tuple[tuple[str, Any], ...]
    space: Space
    shape: tuple[int, ...]
    dtype: str

    def attr(self, key: str, default: Any = None) -> Any:
        return dict(self.attrs).get(key, default)

    @property
    def width(self) -> int:
        """Elements in one row."""
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        return self.width * np.dtype(self.dtype).itemsize

    @property
    def type(self) -> str:
        return f"{self.space}[{', '.join(map(str, self.shape))}] {self.dtype}"


@dataclass(frozen=True)
class Program:
    """Operators in order, and which values are returned; operator `i` defines value `i`."""

    name: str
    ops: tuple[Op, ...]
    outputs: tuple[int, ...]
    lines: tuple[str | None, ...] = field(default=(), compare=False)  # the user's line of each operator, where known

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.ops, self.outputs))

    def __hash__(self) -> int:  # programs are keys of the compilation cache: hash once
        return self._hash

    @property
    def inputs(self) -> tuple[int, ...]:
        """The `input` operators, in the order of their positions."""
        found = [i for i, op in enumerate(self.ops) if op.name == "input"]
        return tuple(sorted(found, key=lambda i: self.ops[i].attr("position")))

    def by_position(self) -> dict[int, int]:
        """The `input` operator at each position of a verified program, where no two share one."""
        return {self.ops[i].attr("position"): i for i in self.inputs}

    def users(self) -> list[list[int]]:
        """For each value, the operators that read it."""
        users: list[list[int]] = [[] for _ in self.ops]
        for i, op in enumerate(self.ops):
            for a in dict.fromkeys(op.args):
                users[a].append(i)
        return users

    def __str__(self) -> str:
        return print_program(self)


# --- the rules: the type of each operator's result, for the builder (`infer`) and the verifier ------------------------

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


def _need(condition: bool, message: str) -> None:
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
    _need(
        all(len(s) == rank for s in full),
        f"feature shapes {found} have different ranks; add the missing axis: x[..., None] for one scalar "
        "for each head of a (heads, width) value, or x[None, :] for a bias",
    )
    out = []
    for axis in range(rank):
        sizes = {s[axis] for s in full} - {1}
        _need(len(sizes) <= 1, f"feature shapes {found} do not broadcast at axis {axis}")
        out.append(sizes.pop() if sizes else 1)
    return tuple(out)


def _same_space(args: list[Op]) -> Space:
    _need(len({a.space for a in args}) == 1, f"arguments are in different spaces: {', '.join(a.space for a in args)}")
    return args[0].space


def _elementwise(args: list[Op], attrs: dict) -> tuple:
    return _same_space(args), broadcast_shapes(*(a.shape for a in args)), promote(*(a.dtype for a in args))


def _unary(args: list[Op], attrs: dict) -> tuple:
    (x,) = args
    return x.space, x.shape, x.dtype


def _via_target(x: Op, attrs: dict, toward: str) -> Via:
    via = VIAS.get(attrs["via"])
    _need(via is not None, f"unknown map {attrs['via']!r}")
    assert via is not None
    have, want = (x.space, via.coarse) if toward == "fine" else (x.space, via.fine)
    _need(want is None or have == want, f"map {attrs['via']} needs a {want} value, got a {have} value")
    return via


def _gather(args: list[Op], attrs: dict) -> tuple:
    via = _via_target(args[0], attrs, "fine")
    space = via.fine if via.fine is not None else Space(attrs["space"])
    return space, args[0].shape, args[0].dtype


def _reduce(args: list[Op], attrs: dict) -> tuple:
    via = _via_target(args[0], attrs, "coarse")
    _need(attrs["op"] in REDUCTIONS, f"unknown reduction {attrs['op']!r}")
    return via.coarse, args[0].shape, args[0].dtype


def _product_of_others(args: list[Op], attrs: dict) -> tuple:
    _via_target(args[0], attrs, "coarse")
    _need(len({a.shape for a in args}) == 1, f"rows of different shapes: {', '.join(str(a.shape) for a in args)}")
    return _same_space(args), args[0].shape, promote(*(a.dtype for a in args))


def _count(args: list[Op], attrs: dict) -> tuple:
    dtype, via = attrs["dtype"], VIAS[attrs["via"]]
    _need(
        dtype in COUNT_DTYPES,
        f"dtype of a count must be one of {', '.join(COUNT_DTYPES)}, got {dtype!r}, which does not hold the counts of "
        "large graphs; cast the quotient, (x / count).astype(...)",
    )
    _need(via.fine is not None or "space" in attrs, "a count of all rows needs their space")
    return via.coarse, (), dtype


def _softmax(args: list[Op], attrs: dict) -> tuple:
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
    _need(len(a) == len(x) and len(b) == len(w), f"contraction {spec} does not fit feature shapes {x} and {w}")
    sizes: dict[str, int] = {}
    for letter, size in [*zip(a, x, strict=True), *zip(b, w, strict=True)]:
        _need(sizes.setdefault(letter, size) == size, f"widths differ: contraction {spec} of {x} and {w}")
    _need(set(out) <= set(sizes), f"contraction {spec} has a letter in its result alone")
    return sizes


def _linear(args: list[Op], attrs: dict) -> tuple:
    x, w = args
    if attrs["via"] == "self":
        _need(x.space == w.space, f"linear via self of a {x.space} and a {w.space} value")
    else:
        via = VIAS[attrs["via"]]
        _need(via.fine in (None, x.space), f"linear via {attrs['via']} needs {via.fine} rows, got {x.space}")
        _need(via.coarse == w.space, f"linear via {attrs['via']} needs a {via.coarse} weight, got {w.space}")
    sizes = spec_sizes(attrs["spec"], x.shape, w.shape)
    return x.space, tuple(sizes[c] for c in parse_spec(attrs["spec"])[2]), promote(x.dtype, w.dtype)


def _outer(args: list[Op], attrs: dict) -> tuple:
    x, y = args
    _same_space(args)
    sizes = spec_sizes(attrs["spec"], x.shape, y.shape)
    shape = tuple(sizes[c] for c in parse_spec(attrs["spec"])[2])
    coarse = x.space if attrs["via"] == "self" else _via_target(x, attrs, "coarse").coarse
    return coarse, shape, attrs["dtype"]


def _dot(args: list[Op], attrs: dict) -> tuple:
    x, y = args
    _need(len(x.shape) >= 1 and x.shape == y.shape, f"dot of feature shapes {x.shape} and {y.shape}")
    return _same_space(args), x.shape[:-1], promote(x.dtype, y.dtype)


def _sum_features(args: list[Op], attrs: dict) -> tuple:
    (x,) = args
    axes = attrs["axes"]
    _need(all(0 <= a < len(x.shape) for a in axes), f"axes {axes} of feature shape {x.shape}")
    kept = (1 if i in axes else s for i, s in enumerate(x.shape) if attrs["keepdims"] or i not in axes)
    return x.space, tuple(kept), x.dtype


def _extremum_features(args: list[Op], attrs: dict) -> tuple:
    _need(attrs["op"] in ("max", "min"), f"unknown extremum {attrs['op']!r}")
    return _sum_features(args, attrs)


def _extremum_share(args: list[Op], attrs: dict) -> tuple:
    _extremum_features(args, {"keepdims": True, **attrs})
    return _unary(args, attrs)


def _integers(index: Op) -> None:
    _need(index.dtype.startswith(("int", "uint")), f"an index must be of integers, got {index.dtype}")


def _lookup(args: list[Op], attrs: dict) -> tuple:
    table, index = args
    _integers(index)
    via = attrs["via"]
    if via == "self":
        _same_space(args)
    else:
        _need(VIAS[via].coarse == table.space, f"lookup via {via} needs a {VIAS[via].coarse} table, got {table.space}")
        _via_target(index, attrs, "coarse")
    _need(len(table.shape) > 0, "lookup needs a table with a feature axis, got a scalar")
    return index.space, (*index.shape, *table.shape[1:]), table.dtype


def _place(args: list[Op], attrs: dict) -> tuple:
    x, index = args
    _integers(index)
    _need(attrs["op"] in ("sum", "max", "min"), f"unknown reduction {attrs['op']!r}")
    rank = len(index.shape)
    _need(x.shape[:rank] == index.shape, f"rows of shape {x.shape} placed by indices of shape {index.shape}")
    space = _same_space(args) if attrs["via"] == "self" else _via_target(x, attrs, "coarse").coarse
    _same_space(args)
    return space, (attrs["size"], *x.shape[rank:]), x.dtype


def _select(args: list[Op], attrs: dict) -> tuple:
    return _same_space(args), broadcast_shapes(*(a.shape for a in args)), promote(*(a.dtype for a in args[1:]))


def _reshape(args: list[Op], attrs: dict) -> tuple:
    (x,) = args
    _need(math.prod(attrs["shape"]) == x.width, f"reshape of feature shape {x.shape} to {attrs['shape']}")
    return x.space, tuple(attrs["shape"]), x.dtype


def _transpose(args: list[Op], attrs: dict) -> tuple:
    (x,) = args
    _need(sorted(attrs["perm"]) == list(range(len(x.shape))), f"transpose {attrs['perm']} of {x.shape}")
    return x.space, tuple(x.shape[i] for i in attrs["perm"]), x.dtype


def _broadcast(args: list[Op], attrs: dict) -> tuple:
    (x,) = args
    shape = tuple(attrs["shape"])
    _need(broadcast_shapes(x.shape, shape) == shape, f"broadcast of feature shape {x.shape} to {shape}")
    return x.space, shape, x.dtype


def _concat(args: list[Op], attrs: dict) -> tuple:
    axis, shapes = attrs["axis"], [list(a.shape) for a in args]
    _need(len({len(s) for s in shapes}) == 1, f"concat of different ranks: {', '.join(str(a.shape) for a in args)}")
    total = sum(s[axis] for s in shapes)
    for s in shapes:
        s[axis] = total
    _need(all(s == shapes[0] for s in shapes), f"concat of {', '.join(str(a.shape) for a in args)} along axis {axis}")
    return _same_space(args), tuple(shapes[0]), promote(*(a.dtype for a in args))


def _slice(args: list[Op], attrs: dict) -> tuple:
    (x,) = args
    axis, start, stop = attrs["axis"], attrs["start"], attrs["stop"]
    _need(0 <= start <= stop <= x.shape[axis], f"slice {start}:{stop} of axis {axis} of feature shape {x.shape}")
    return x.space, (*x.shape[:axis], stop - start, *x.shape[axis + 1 :]), x.dtype


def _pad(args: list[Op], attrs: dict) -> tuple:
    (x,) = args
    axis = attrs["axis"]
    size = attrs["before"] + x.shape[axis] + attrs["after"]
    return x.space, (*x.shape[:axis], size, *x.shape[axis + 1 :]), x.dtype


RULES: dict[str, Callable[[list[Op], dict], tuple]] = {
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


def infer(name: str, args: list[Op], attrs: dict) -> tuple[Space, tuple[int, ...], str]:
    """The space, feature shape and dtype that an operator gives, or `IRError`."""
    rule = RULES.get(name)
    _need(rule is not None, f"unknown operator {name!r}")
    assert rule is not None
    return rule(args, attrs)


def verify(program: Program) -> Program:
    """Checks every rule of the IR and returns the program; `IRError` names the operator that breaks one."""
    for i, op in enumerate(program.ops):
        _need(all(0 <= a < i for a in op.args), f"%{i}: an argument is not defined before it: {op.args}")
        try:
            got = infer(op.name, [program.ops[a] for a in op.args], dict(op.attrs))
        except IRError as error:
            raise IRError(f"%{i} = {op.name}: {error}") from None
        want = (op.space, op.shape, op.dtype)
        _need(got == want, f"%{i} = {op.name} is typed {want}, its arguments give {got}")
    _need(all(0 <= o < len(program.ops) for o in program.outputs), "an output is not defined")
    positions = [program.ops[i].attr("position") for i in program.inputs]
    _need(len(set(positions)) == len(positions), f"two inputs share a position: {positions}")
    return program


class Builder:
    """Appends operators and infers their types; the front end and every pass make programs with it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ops: list[Op] = []
        self.lines: list[str | None] = []
        self.line: str | None = None  # recorded with the operators that follow

    def op(self, op_name: str, *args: int, **attrs: Any) -> int:
        space, shape, dtype = infer(op_name, [self.ops[a] for a in args], attrs)
        self.ops.append(Op(op_name, tuple(args), tuple(sorted(attrs.items())), space, shape, dtype))
        self.lines.append(self.line)
        return len(self.ops) - 1

    def copy(self, op: Op, args: Iterable[int], line: str | None = None) -> int:
        """The same operator on other arguments."""
        self.line = line
        return self.op(op.name, *args, **dict(op.attrs))

    def const(self, value: float, dtype: str, space: Space = Space.GRAPH) -> int:
        """A scalar, the same in every row of `space`."""
        return self.op("const", value=float(value), dtype=dtype, space=str(space))

    def lift(self, x: int, space: Space) -> int:
        """A `graph` value (or a constant) for every row of `space`."""
        op = self.ops[x]
        if op.space == space:
            return x
        if op.name == "const":
            return self.const(op.attr("value"), op.dtype, space)
        return self.op("gather", x, via="all", space=str(space))

    def build(self, outputs: Iterable[int]) -> Program:
        outputs = tuple(outputs)  # first, since an iterator may append operators
        return verify(Program(self.name, tuple(self.ops), outputs, tuple(self.lines)))


def format_op(index: int, op: Op) -> str:
    """One line of the printed form, without the type."""
    if op.name == "input":
        return f"%{index} = input<{op.attr('name')}>"
    if op.name == "const":
        return f"%{index} = const {op.attr('value'):g}"
    attrs = dict(op.attrs)
    if op.name in ("gather", "cast", "outer", "count"):  # said by the type
        attrs.pop("space", None), attrs.pop("dtype", None)
    words = [op.name, *(f"%{a}" for a in op.args), *(f"{k}={_short(v)}" for k, v in sorted(attrs.items()))]
    return f"%{index} = {' '.join(words)}"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return "(" + ",".join(map(_short, value)) + ")"
    return str(value)


def print_program(program: Program) -> str:
    """The program as text: one operator a line, its type in a second column."""
    left = [format_op(i, op) for i, op in enumerate(program.ops)]
    margin = min(max((len(s) for s in left), default=0), 56)
    lines = [f"{s:<{margin}} : {op.type}" for s, op in zip(left, program.ops, strict=True)]
    return "\n".join([f"{program.name}:", *lines, f"return {', '.join(f'%{o}' for o in program.outputs)}"])
